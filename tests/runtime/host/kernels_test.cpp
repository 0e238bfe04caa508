#include "runtime/host/kernels.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>

#include "tests/runtime/host/adam_fixture.h"

namespace slidedp {
namespace {

// Not a multiple of any vector.
constexpr int64_t kCount = 16 * kBlockElements + 37;
constexpr int64_t kBlocks = kCount / kBlockElements;
constexpr size_t kSlack = 3;  // elements before the range: moves it off any alignment

std::vector<uint32_t> bits_of(std::span<const float> values) {
  std::vector<uint32_t> bits;
  for (float value : values) bits.push_back(std::bit_cast<uint32_t>(value));
  return bits;
}

// The bits of all that one set of loops makes of the same random inputs, `offset` elements into its arrays.
struct Results {
  std::vector<TestState> states;               // by UpdatePart
  std::vector<std::vector<uint32_t>> vectors;  // copy_bf16, add_bf16, add_fp32
  std::vector<double> sums;
};

Results run(const Kernels& kernels, size_t offset) {
  const auto count = static_cast<size_t>(kCount);
  const auto shifted = [&](const auto& values) {
    auto copy = values;
    copy.insert(copy.begin(), offset, {});
    return copy;
  };
  const TestGradient gradient(1, 1, DType::fp32, count, 21), narrow(1, 1, DType::bf16, count, 22);
  const auto* values = static_cast<const float*>(gradient.sources().sources[0]);
  const auto* half = static_cast<const uint16_t*>(narrow.sources().sources[0]);
  const std::vector<float> from = shifted(std::vector<float>(values, values + count));
  const std::vector<uint16_t> narrow_from = shifted(std::vector<uint16_t>(half, half + count));
  Results results;
  for (const Kernels::Update update : kernels.update) {
    const TestState before = random_state(count, 23);
    TestState state(0);
    state.hi = shifted(before.hi);
    state.lo = shifted(before.lo);
    state.m = shifted(before.m);
    state.v = shifted(before.v);
    update(state.hi.data() + offset, state.lo.data() + offset, state.m.data() + offset, state.v.data() + offset,
           from.data() + offset, kCount, test_scalars(), test_scalars().decay);
    const auto drop = static_cast<std::ptrdiff_t>(offset);
    state.hi.erase(state.hi.begin(), state.hi.begin() + drop);
    state.lo.erase(state.lo.begin(), state.lo.begin() + drop);
    state.m.erase(state.m.begin(), state.m.begin() + drop);
    state.v.erase(state.v.begin(), state.v.begin() + drop);
    results.states.push_back(state);
  }
  const auto into = [&](const std::function<void(float*)>& loop) {
    std::vector<float> out = shifted(random_state(count, 24).m);
    loop(out.data() + offset);
    results.vectors.push_back(bits_of(std::span<const float>(out).subspan(offset)));
  };
  into([&](float* out) { kernels.copy_bf16(narrow_from.data() + offset, kCount, out); });
  into([&](float* out) { kernels.add_bf16(narrow_from.data() + offset, kCount, out); });
  into([&](float* out) { kernels.add_fp32(from.data() + offset, kCount, out); });
  results.sums.resize(static_cast<size_t>(kBlocks));
  kernels.square_blocks(from.data() + offset, kBlocks, results.sums.data());
  return results;
}

// On a CPU with AVX-512 this compares three sets; on others those that it can run. (That the widest set is right is for
// the comparison with scalar code in cpu_adam_test.cpp.)
TEST(Kernels, EveryInstructionSetGivesTheSameBitsAtAnyAlignment) {
  const std::span<const Kernels> sets = supported_kernels();
  ASSERT_EQ(sets.back().target, "baseline");
  const Results expected = run(sets.back(), 0);
  ASSERT_FALSE(expected.states[0] == random_state(static_cast<size_t>(kCount), 23));
  for (const Kernels& set : sets) {
    for (size_t offset = 0; offset <= kSlack; ++offset) {
      const Results results = run(set, offset);
      EXPECT_TRUE(results.states == expected.states) << set.target << ", " << offset << " elements off";
      EXPECT_EQ(results.vectors, expected.vectors) << set.target << ", " << offset << " elements off";
      EXPECT_EQ(results.sums, expected.sums) << set.target << ", " << offset << " elements off";
    }
  }
}

#if defined(__GNUC__) && !defined(__clang__) && defined(__x86_64__)
TEST(Kernels, TheWidestSetOfThisCpuIsFirst) {
  const std::string_view widest = __builtin_cpu_supports("avx512f") ? "avx512f"
                                  : __builtin_cpu_supports("avx2")  ? "avx2"
                                                                    : "baseline";
  EXPECT_EQ(supported_kernels().front().target, widest);
}
#endif

}  // namespace
}  // namespace slidedp
