#include "runtime/host/cpu_adam.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <thread>

#include "tests/runtime/host/adam_fixture.h"

namespace slidedp {
namespace {

// Not a multiple of the inner tile, of a vector or of a block.
constexpr size_t kElements = 5 * 1024 + 333;
constexpr float kInfinity = std::numeric_limits<float>::infinity();

struct Case {
  int sources, group_size;
  DType type;
};
class AdamOfSources : public testing::TestWithParam<Case> {};
INSTANTIATE_TEST_SUITE_P(Sources, AdamOfSources,
                         testing::Values(Case{1, 1, DType::bf16}, Case{1, 1, DType::fp32}, Case{4, 4, DType::bf16},
                                         Case{3, 3, DType::fp32}, Case{2, 1, DType::bf16}, Case{6, 3, DType::bf16},
                                         Case{8, 4, DType::fp32}),
                         [](const auto& info) {
                           return std::string(name(info.param.type)) + "_" + std::to_string(info.param.sources) + "in" +
                                  std::to_string(info.param.group_size);
                         });

// Against the formula in long double, from the same fp32 inputs. u = 2^-24 is fp32's unit roundoff; each bound counts
// the roundings on the way to that value and doubles them. In the update, an error of m is carried to p as
// step / denominator times it.
TEST_P(AdamOfSources, AgreesWithLongDouble) {
  constexpr long double u = 0x1p-24L;
  const auto [sources, group_size, type] = GetParam();
  const TestGradient gradient(sources, group_size, type, kElements, 7);
  const AdamScalars s = test_scalars();
  for (bool decay : {false, true}) {
    const TestState before = random_state(kElements, 3);
    TestState after = before;
    adam_update(after.hi, after.lo, after.m, after.v, gradient.sources(), s, decay);
    for (size_t i = 0; i < kElements; ++i) {
      const long double g = static_cast<long double>(gradient.sum(i)) * s.gradient_scale;
      const long double m = before.m[i] + static_cast<long double>(s.one_minus_beta1) * (g - before.m[i]);
      const long double v =
          static_cast<long double>(before.v[i]) * s.beta2 + static_cast<long double>(s.one_minus_beta2) * g * g;
      const long double denominator = std::sqrt(v) / s.bias_correction2_sqrt + s.eps;
      const long double update = s.step_size * m / denominator;
      const long double kept = static_cast<long double>(before.master(i)) * (decay ? s.decay : 1.0f);
      const long double m_bound = 8 * u * (std::fabs(static_cast<long double>(before.m[i])) + std::fabs(g)) + 0x1p-148L;
      ASSERT_NEAR(after.m[i], m, m_bound) << i;
      ASSERT_NEAR(after.v[i], v, 12 * u * v + 0x1p-148L) << i;
      ASSERT_NEAR(after.master(i), kept - update,
                  4 * u * std::fabs(kept) + 24 * u * std::fabs(update) + s.step_size / denominator * m_bound)
          << i;
    }
  }
}

// Against the same operations one element at a time: what the compiler made of the loops changes no bit.
TEST_P(AdamOfSources, BitsAreThoseOfScalarCode) {
  const auto [sources, group_size, type] = GetParam();
  const TestGradient gradient(sources, group_size, type, kElements, 8);
  const AdamScalars s = test_scalars();
  TestState expected = random_state(kElements, 4);
  TestState state = expected;
  adam_update(state.hi, state.lo, state.m, state.v, gradient.sources(), s, true);
  for (size_t i = 0; i < kElements; ++i) update_in_scalar_code(expected, i, gradient.sum(i), s, s.decay);
  EXPECT_TRUE(state == expected);
}

TEST_P(AdamOfSources, SplitsAndThreadsChangeNoBit) {
  const auto [sources, group_size, type] = GetParam();
  const TestGradient gradient(sources, group_size, type, kElements, 9);
  const TestState before = random_state(kElements, 5);
  TestState whole = before;
  adam_update(whole.hi, whole.lo, whole.m, whole.v, gradient.sources(), test_scalars(), true);
  ASSERT_FALSE(whole == before);
  for (size_t piece : {size_t{64}, size_t{192}, size_t{1024}, size_t{1088}, size_t{4096}}) {
    TestState state = before;
    const auto work = [&](size_t first, size_t stride) {
      std::vector<const void*> keep;
      for (size_t begin = first * piece; begin < kElements; begin += stride * piece) {
        const size_t count = std::min(piece, kElements - begin);
        adam_update(std::span(state.hi).subspan(begin, count), std::span(state.lo).subspan(begin, count),
                    std::span(state.m).subspan(begin, count), std::span(state.v).subspan(begin, count),
                    gradient.from(static_cast<int64_t>(begin), keep), test_scalars(), true);
      }
    };
    {
      std::vector<std::jthread> threads;
      for (size_t t = 0; t < 3; ++t) threads.emplace_back(work, t, 3);
    }
    EXPECT_TRUE(state == whole) << "pieces of " << piece;
  }
}

TEST_P(AdamOfSources, BlockSumsAreOfTheSummedGradientAndSplitFree) {
  const auto [sources, group_size, type] = GetParam();
  const TestGradient gradient(sources, group_size, type, kElements, 10);
  const auto blocks = static_cast<size_t>(ceil_div(kElements, kBlockElements));
  std::vector<double> sums(blocks);
  ASSERT_TRUE(block_square_sums(gradient.sources(), kElements, sums));
  for (size_t block = 0; block < blocks; ++block) {
    long double expected = 0;
    for (size_t i = block * 64; i < std::min(kElements, block * 64 + 64); ++i) {
      expected += static_cast<long double>(gradient.sum(i)) * gradient.sum(i);
    }
    // Exact squares, at most 11 additions deep, in double.
    ASSERT_NEAR(sums[block], expected, 11 * 0x1p-53L * expected) << block;
  }
  std::vector<const void*> keep;
  for (int64_t piece : {64, 320, 1024, 2112}) {
    std::vector<double> pieced(blocks, -1.0);
    for (int64_t begin = 0; begin < static_cast<int64_t>(kElements); begin += piece) {
      const int64_t count = std::min(piece, static_cast<int64_t>(kElements) - begin);
      EXPECT_TRUE(block_square_sums(
          gradient.from(begin, keep), count,
          std::span(pieced).subspan(static_cast<size_t>(begin / 64), static_cast<size_t>(ceil_div(count, 64)))));
    }
    EXPECT_EQ(pieced, sums) << "pieces of " << piece;
  }
}

TEST(CpuAdam, GroupsAreSummedBeforeTheyAreAdded) {
  // In order ((1 + 2^-24) + 2^-24) + 2^-24 is 1 in fp32; in two groups the last two make 2^-23 first.
  TestGradient ungrouped(4, 4, DType::fp32, 64, 1), grouped(4, 2, DType::fp32, 64, 1);
  for (TestGradient* gradient : {&ungrouped, &grouped}) {
    for (size_t i = 0; i < 64; ++i) {
      for (int s = 0; s < 4; ++s) gradient->set(s, i, s == 0 ? 1.0f : 0x1p-24f);
    }
  }
  std::vector<double> sum(1);
  ASSERT_TRUE(block_square_sums(ungrouped.sources(), 64, sum));
  EXPECT_EQ(sum[0], 64.0);
  ASSERT_TRUE(block_square_sums(grouped.sources(), 64, sum));
  EXPECT_EQ(sum[0], 64.0 * (1 + 0x1p-23) * (1 + 0x1p-23));
}

TEST(CpuAdam, SkipLeavesTheState) {
  const TestGradient gradient(1, 1, DType::bf16, kElements, 1);
  const TestState before = random_state(kElements, 1);
  TestState state = before;
  AdamScalars scalars = test_scalars();
  scalars.skip = true;
  adam_update(state.hi, state.lo, state.m, state.v, gradient.sources(), scalars, true);
  EXPECT_TRUE(state == before);
}

TEST(CpuAdam, ZeroGradientDecaysOnlyWhereAsked) {
  TestGradient gradient(1, 1, DType::fp32, 64, 1);
  TestState state(64);
  for (size_t i = 0; i < 64; ++i) {
    gradient.set(0, i, 0.0f);
    state.set_master(i, static_cast<float>(i));
  }
  adam_update(state.hi, state.lo, state.m, state.v, gradient.sources(), test_scalars(), false);
  for (size_t i = 0; i < 64; ++i) ASSERT_EQ(state.master(i), static_cast<float>(i));
  adam_update(state.hi, state.lo, state.m, state.v, gradient.sources(), test_scalars(), true);
  for (size_t i = 0; i < 64; ++i) ASSERT_EQ(state.master(i), static_cast<float>(i) * test_scalars().decay);
}

TEST(CpuAdam, SubnormalGradientsAndMomentsAreKept) {
  TestGradient gradient(1, 1, DType::bf16, 64, 1);
  TestState state(64);
  AdamScalars scalars = test_scalars();
  scalars.gradient_scale = 1;
  scalars.one_minus_beta1 = 0.5f;
  for (size_t i = 0; i < 64; ++i) gradient.set(0, i, 0x1p-130f);
  adam_update(state.hi, state.lo, state.m, state.v, gradient.sources(), scalars, false);
  for (size_t i = 0; i < 64; ++i) ASSERT_EQ(state.m[i], 0x1p-131f);
}

TEST(CpuAdam, NonFiniteGradientsAreSeenAnywhere) {
  for (size_t at : {size_t{0}, size_t{63}, size_t{64}, size_t{1023}, size_t{1024}, kElements - 1}) {
    for (float value : {kInfinity, -kInfinity, std::numeric_limits<float>::quiet_NaN()}) {
      TestGradient gradient(2, 2, DType::bf16, kElements, 2);
      std::vector<double> sums(static_cast<size_t>(ceil_div(kElements, kBlockElements)));
      ASSERT_TRUE(block_square_sums(gradient.sources(), kElements, sums));
      gradient.set(1, at, value);
      EXPECT_FALSE(block_square_sums(gradient.sources(), kElements, sums)) << at << " " << value;
    }
  }
  // Finite sources whose sum overflows, and the largest finite block.
  TestGradient gradient(2, 2, DType::fp32, 64, 2);
  std::vector<double> sum(1);
  for (size_t i = 0; i < 64; ++i) {
    gradient.set(0, i, std::numeric_limits<float>::max());
    gradient.set(1, i, 0);
  }
  EXPECT_TRUE(block_square_sums(gradient.sources(), 64, sum));
  gradient.set(1, 5, std::numeric_limits<float>::max());
  EXPECT_FALSE(block_square_sums(gradient.sources(), 64, sum));
}

TEST(CpuAdam, BlockSumsCombineInAFixedShape) {
  EXPECT_EQ(combine_block_sums({}), 0.0);
  std::vector<double> sums(3 * 4096 + 17, 1.0);
  EXPECT_EQ(combine_block_sums(sums), 3 * 4096 + 17);
  // The shape shows in the rounding: 2^-53 is lost beside 1, but 4096 of them in a group of their own are not.
  std::vector<double> tiny(2 * 4096, 0x1p-53);
  tiny[0] = 1.0;
  EXPECT_EQ(combine_block_sums(tiny), 1.0 + 4096 * 0x1p-53);
}

TEST(CpuAdam, BadCallsAreRefused) {
  const TestGradient gradient(3, 3, DType::bf16, 64, 1);
  TestState state(64);
  std::vector<double> sums(2);
  EXPECT_THROW(block_square_sums(gradient.sources(), 64, sums), std::logic_error);
  GradientSources uneven = gradient.sources();
  uneven.group_size = 2;
  EXPECT_THROW(adam_update(state.hi, state.lo, state.m, state.v, uneven, {}, false), std::logic_error);
  EXPECT_THROW(adam_update(state.hi, std::span(state.lo).first(63), state.m, state.v, gradient.sources(), {}, false),
               std::logic_error);
}

}  // namespace
}  // namespace slidedp
