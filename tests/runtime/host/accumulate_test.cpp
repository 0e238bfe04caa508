// Several waves: the fp32 accumulator on the host, as target of waves and as source of the norm and of Adam.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <memory>
#include <thread>

#include "runtime/host/chunk_update.h"
#include "tests/runtime/host/adam_fixture.h"

namespace slidedp {
namespace {

// Not a multiple of the inner tile, of a vector or of a block.
constexpr size_t kElements = 5 * 1024 + 333;
constexpr size_t kBlocks = (kElements + kBlockElements - 1) / kBlockElements;
constexpr float kInfinity = std::numeric_limits<float>::infinity();

std::vector<uint32_t> bits_of(std::span<const float> values) {
  std::vector<uint32_t> bits;
  for (float value : values) bits.push_back(std::bit_cast<uint32_t>(value));
  return bits;
}

struct Case {
  int sources, group_size;
  DType type;
};

class Waves : public testing::TestWithParam<Case> {
 protected:
  static constexpr int kWaves = 3;
  Waves() {
    const auto [sources, group_size, type] = GetParam();
    for (uint32_t w = 0; w < kWaves; ++w) {
      waves_.push_back(std::make_unique<TestGradient>(sources, group_size, type, kElements, 50 + w));
    }
  }
  // The accumulator after `waves` waves. It starts as NaNs: the first wave overwrites.
  std::vector<float> accumulated(int waves) const {
    std::vector<float> accumulator(kElements, std::nanf(""));
    for (int w = 0; w < waves; ++w) accumulate(accumulator, wave(w).sources(), w == 0);
    return accumulator;
  }
  const TestGradient& wave(int w) const { return *waves_[static_cast<size_t>(w)]; }
  // The last wave beside what the others left, and the accumulator of all waves alone.
  GradientSources fused(const std::vector<float>& others) const {
    GradientSources gradient = wave(kWaves - 1).sources();
    gradient.accumulator = others.data();
    return gradient;
  }
  static GradientSources alone(const std::vector<float>& accumulator) {
    GradientSources gradient;
    gradient.accumulator = accumulator.data();
    return gradient;
  }
  std::vector<std::unique_ptr<TestGradient>> waves_;
};

std::vector<Case> cases() {
  std::vector<Case> all;
  for (DType type : {DType::bf16, DType::fp32}) {
    for (int sources = 1; sources <= 8; ++sources) {
      all.push_back({sources, sources, type});
      if (sources % 2 == 0) all.push_back({sources, sources / 2, type});
    }
  }
  return all;
}
INSTANTIATE_TEST_SUITE_P(Sources, Waves, testing::ValuesIn(cases()), [](const auto& info) {
  return std::string(name(info.param.type)) + "_" + std::to_string(info.param.sources) + "in" +
         std::to_string(info.param.group_size);
});

TEST_P(Waves, AddEverySourceInOrder) {
  const int sources = GetParam().sources;
  const std::vector<float> result = accumulated(kWaves);
  for (size_t i = 0; i < kElements; ++i) {
    volatile float expected = wave(0).value(0, i);  // volatile: one rounded addition after another
    long double exact = expected, magnitude = std::fabs(exact);
    for (int w = 0; w < kWaves; ++w) {
      for (int s = w == 0 ? 1 : 0; s < sources; ++s) {
        expected = expected + wave(w).value(s, i);
        exact += wave(w).value(s, i);
        magnitude += std::fabs(static_cast<long double>(wave(w).value(s, i)));
      }
    }
    ASSERT_EQ(std::bit_cast<uint32_t>(result[i]), std::bit_cast<uint32_t>(static_cast<float>(expected))) << i;
    // Each addition rounds by at most 2^-24 of its result, which (roundings aside: the factor 1.01) is no larger than
    // the sum of magnitudes.
    ASSERT_NEAR(result[i], exact, 1.01L * (kWaves * sources - 1) * 0x1p-24L * magnitude) << i;
  }
}

TEST_P(Waves, PiecesThreadsAndAlignmentsChangeNoBit) {
  std::vector<double> sums(kBlocks);
  std::vector<float> expected = accumulated(kWaves - 1);
  ASSERT_TRUE(accumulate_and_square(expected, wave(kWaves - 1).sources(), false, sums));
  for (size_t piece : {size_t{64}, size_t{192}, size_t{1088}, size_t{4096}}) {
    for (size_t offset : {size_t{0}, size_t{1}, size_t{3}}) {
      std::vector<float> storage(kElements + offset, std::nanf(""));
      const std::span<float> accumulator = std::span(storage).subspan(offset);
      std::vector<double> pieced(kBlocks, -1.0);
      const auto work = [&](size_t thread) {
        std::vector<const void*> keep;
        for (size_t begin = thread * piece; begin < kElements; begin += 3 * piece) {
          const size_t count = std::min(piece, kElements - begin);
          const auto part = accumulator.subspan(begin, count);
          for (int w = 0; w + 1 < kWaves; ++w) {
            accumulate(part, wave(w).from(static_cast<int64_t>(begin), keep), w == 0);
          }
          accumulate_and_square(part, wave(kWaves - 1).from(static_cast<int64_t>(begin), keep), false,
                                std::span(pieced).subspan(begin / 64, (count + 63) / 64));
        }
      };
      {
        std::vector<std::jthread> threads;
        for (size_t t = 0; t < 3; ++t) threads.emplace_back(work, t);
      }
      EXPECT_EQ(bits_of(accumulator), bits_of(expected)) << "pieces of " << piece << ", " << offset << " off";
      EXPECT_EQ(pieced, sums) << "pieces of " << piece << ", " << offset << " off";
    }
  }
}

TEST_P(Waves, OnePassWithTheNormEqualsTwo) {
  for (int waves : {1, kWaves}) {
    std::vector<float> expected = accumulated(waves);
    std::vector<double> expected_sums(kBlocks), sums(kBlocks);
    ASSERT_TRUE(block_square_sums(alone(expected), kElements, expected_sums));
    std::vector<float> accumulator = accumulated(waves - 1);
    EXPECT_TRUE(accumulate_and_square(accumulator, wave(waves - 1).sources(), waves == 1, sums));
    EXPECT_EQ(bits_of(accumulator), bits_of(expected)) << waves;
    EXPECT_EQ(sums, expected_sums) << waves;
  }
}

TEST_P(Waves, LastWaveFusedIntoNormAndAdamEqualsAccumulatorAlone) {
  const std::vector<float> others = accumulated(kWaves - 1), all = accumulated(kWaves);
  std::vector<double> fused_sums(kBlocks), sums(kBlocks);
  EXPECT_TRUE(block_square_sums(fused(others), kElements, fused_sums));
  EXPECT_TRUE(block_square_sums(alone(all), kElements, sums));
  EXPECT_EQ(fused_sums, sums);
  const TestState before = random_state(kElements, 60);
  for (bool decay : {false, true}) {
    for (UpdatePart part : {UpdatePart::whole, UpdatePart::weights, UpdatePart::moments}) {
      TestState last_fused = before, last_added = before;
      adam_update(last_fused.hi, last_fused.lo, last_fused.m, last_fused.v, fused(others), test_scalars(), decay, part);
      adam_update(last_added.hi, last_added.lo, last_added.m, last_added.v, alone(all), test_scalars(), decay, part);
      EXPECT_TRUE(last_fused == last_added) << name(part) << " decay " << decay;
      EXPECT_FALSE(last_fused == before) << name(part) << " decay " << decay;
    }
  }
}

// Against the accumulator's sum handed over as one plain fp32 source.
TEST_P(Waves, AccumulatorIsReadAsAnFp32Source) {
  const std::vector<float> all = accumulated(kWaves);
  const void* const pointer = all.data();
  const GradientSources plain{{&pointer, 1}, 1, DType::fp32};
  TestState expected = random_state(kElements, 61), state = expected;
  adam_update(expected.hi, expected.lo, expected.m, expected.v, plain, test_scalars(), true);
  adam_update(state.hi, state.lo, state.m, state.v, alone(all), test_scalars(), true);
  EXPECT_TRUE(state == expected);
}

TEST(Accumulate, GroupsMakeNoDifferenceAndOrderDoes) {
  // In order ((1 + 2^-24) + 2^-24) + 2^-24 is 1 in fp32; the small ones first make more than 1.
  TestGradient gradient(4, 2, DType::fp32, 64, 1), reversed(4, 2, DType::fp32, 64, 1);
  for (size_t i = 0; i < 64; ++i) {
    for (int s = 0; s < 4; ++s) gradient.set(s, i, s == 0 ? 1.0f : 0x1p-24f);
    for (int s = 0; s < 4; ++s) reversed.set(s, i, s == 3 ? 1.0f : 0x1p-24f);
  }
  std::vector<float> accumulator(64);
  accumulate(accumulator, gradient.sources(), true);
  EXPECT_THAT(accumulator, testing::Each(1.0f));
  accumulate(accumulator, reversed.sources(), true);
  EXPECT_THAT(accumulator, testing::Each(1.0f + 0x1p-22f));
  // The same with an accumulator as a source of the norm: 1, then 2^-24 four times, one at a time.
  for (size_t i = 0; i < 64; ++i) gradient.set(0, i, 0x1p-24f);
  std::fill(accumulator.begin(), accumulator.end(), 1.0f);
  GradientSources sources = gradient.sources();
  sources.accumulator = accumulator.data();
  std::vector<double> sum(1);
  ASSERT_TRUE(block_square_sums(sources, 64, sum));
  EXPECT_EQ(sum[0], 64.0);
}

TEST(Accumulate, NonFiniteValuesAreSeenThroughTheAccumulator) {
  const TestGradient clean(2, 2, DType::bf16, kElements, 2);
  for (size_t at : {size_t{0}, size_t{63}, size_t{64}, size_t{1023}, size_t{1024}, kElements - 1}) {
    for (float value : {kInfinity, -kInfinity, std::nanf("")}) {
      TestGradient bad(2, 2, DType::bf16, kElements, 2);
      bad.set(1, at, value);
      std::vector<double> sums(kBlocks);
      std::vector<float> accumulator(kElements, 1.0f);
      EXPECT_TRUE(accumulate_and_square(accumulator, clean.sources(), false, sums));
      EXPECT_FALSE(accumulate_and_square(accumulator, bad.sources(), true, sums)) << at << " " << value;
      EXPECT_FALSE(std::isfinite(sums[at / 64]));
      // It stays: later waves, and the norm beside them, still see it.
      accumulate(accumulator, clean.sources(), false);
      EXPECT_FALSE(accumulate_and_square(accumulator, clean.sources(), false, sums)) << at << " " << value;
      GradientSources sources = clean.sources();
      sources.accumulator = accumulator.data();
      EXPECT_FALSE(block_square_sums(sources, kElements, sums)) << at << " " << value;
    }
  }
}

TEST(Accumulate, OverflowBesideTheLastWaveIsSeen) {
  TestGradient wave(1, 1, DType::fp32, 64, 1);
  for (size_t i = 0; i < 64; ++i) wave.set(0, i, 0);
  std::vector<float> accumulator(64, std::numeric_limits<float>::max());
  GradientSources sources = wave.sources();
  sources.accumulator = accumulator.data();
  std::vector<double> sum(1);
  EXPECT_TRUE(block_square_sums(sources, 64, sum));
  wave.set(0, 5, std::numeric_limits<float>::max());
  EXPECT_FALSE(block_square_sums(sources, 64, sum));
  EXPECT_FALSE(accumulate_and_square(accumulator, wave.sources(), false, sum));
}

TEST(Accumulate, TheTensorWithANonFiniteElementIsNamed) {
  UnitLayout unit;
  unit.tensors = {{{}, "first", {100}, 0, 100, true}, {{}, "second", {200}, 100, 200, true}};
  unit.elements = 300;
  const TestGradient wave(2, 2, DType::bf16, 300, 3);
  std::vector<const void*> keep;
  for (const auto& [at, tensor] : {std::pair<size_t, const char*>{99, "first"}, {100, "second"}, {299, "second"}}) {
    std::vector<float> accumulator(300, 1.0f);
    GradientSources sources = wave.sources(), only;
    sources.accumulator = only.accumulator = accumulator.data();
    EXPECT_EQ(first_nonfinite_tensor(unit, 0, 300, sources), "");
    accumulator[at] = kInfinity;
    EXPECT_EQ(first_nonfinite_tensor(unit, 0, 300, sources), tensor);
    EXPECT_EQ(first_nonfinite_tensor(unit, 0, 300, only), tensor);
    const auto begin = static_cast<int64_t>(at / 64 * 64);
    EXPECT_EQ(first_nonfinite_tensor(unit, begin, 300 - begin, advance(sources, begin, keep)), tensor);
  }
}

TEST(Accumulate, BadCallsAreRefused) {
  const TestGradient wave(1, 1, DType::bf16, 64, 1);
  std::vector<float> accumulator(64);
  std::vector<double> sums(2);
  EXPECT_THROW(accumulate(accumulator, GradientSources{}, true), std::logic_error) << "nothing to overwrite it with";
  EXPECT_THROW(accumulate_and_square(accumulator, wave.sources(), true, sums), std::logic_error);
  GradientSources sources = wave.sources();
  sources.accumulator = accumulator.data();
  EXPECT_THROW(accumulate(accumulator, sources, false), std::logic_error);
  TestState state(64);
  EXPECT_THROW(adam_update(state.hi, state.lo, state.m, state.v, {}, {}, false), std::logic_error) << "no gradient";
}

}  // namespace
}  // namespace slidedp
