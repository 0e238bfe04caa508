// The two passes of the split update against the update in one pass.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <thread>

#include "runtime/host/chunk_update.h"
#include "tests/runtime/host/adam_fixture.h"

namespace slidedp {
namespace {

constexpr UpdatePart kParts[] = {UpdatePart::whole, UpdatePart::weights, UpdatePart::moments};

// Ends of tensors with and without decay off every block; the last element is off every vector.
UnitLayout test_unit() {
  UnitLayout unit;
  unit.name = "layer 0";
  for (const auto& [elements, decay] : {std::pair{100, false}, {701, true}, {17, false}, {5000, true}, {333, false}}) {
    unit.tensors.push_back({{}, "tensor", {elements}, unit.elements, elements, decay});
    unit.elements += elements;
  }
  return unit;
}

struct Case {
  int sources, group_size;
  DType type;
  bool accumulator;
};

class SplitUpdate : public testing::TestWithParam<Case> {
 protected:
  GradientSources sources() const { return with_accumulator(gradient_.sources(), 0); }
  GradientSources with_accumulator(GradientSources gradient, int64_t begin) const {
    if (GetParam().accumulator) gradient.accumulator = accumulator_.data() + begin;
    return gradient;
  }
  TestState whole() const {
    TestState state = before_;
    update_chunk(unit_, state.view(), 0, unit_.elements, sources(), test_scalars());
    return state;
  }
  UnitLayout unit_ = test_unit();
  size_t elements_ = static_cast<size_t>(unit_.elements);
  TestState before_ = random_state(elements_, 31);
  TestGradient gradient_{GetParam().sources, GetParam().group_size, GetParam().type, elements_, 32};
  std::vector<float> accumulator_ = random_state(elements_, 33).m;
};

INSTANTIATE_TEST_SUITE_P(Sources, SplitUpdate,
                         testing::Values(Case{1, 1, DType::bf16, false}, Case{1, 1, DType::fp32, false},
                                         Case{4, 2, DType::bf16, false}, Case{8, 8, DType::bf16, false},
                                         Case{3, 3, DType::fp32, true}, Case{8, 4, DType::bf16, true},
                                         Case{0, 1, DType::bf16, true}),
                         [](const auto& info) {
                           return std::string(name(info.param.type)) + "_" + std::to_string(info.param.sources) + "in" +
                                  std::to_string(info.param.group_size) +
                                  (info.param.accumulator ? "_accumulator" : "");
                         });

TEST_P(SplitUpdate, WeightsThenMomentsLeaveTheBitsOfWhole) {
  const TestState expected = whole();
  TestState state = before_;
  update_chunk(unit_, state.view(), 0, unit_.elements, sources(), test_scalars(), UpdatePart::weights);
  TestState weights_only = before_;
  weights_only.hi = expected.hi;
  weights_only.lo = expected.lo;
  EXPECT_TRUE(state == weights_only);
  EXPECT_FALSE(state == before_);
  update_chunk(unit_, state.view(), 0, unit_.elements, sources(), test_scalars(), UpdatePart::moments);
  EXPECT_TRUE(state == expected);
  EXPECT_FALSE(state == weights_only);
}

// As a run does it: the chunks of one pass in any order and on any thread, then those of the other in other sizes.
TEST_P(SplitUpdate, ChunksAndThreadsChangeNoBit) {
  const TestState expected = whole();
  for (const auto& [weights_chunk, moments_chunk] : {std::pair<int64_t, int64_t>{64, 1024}, {448, 64}, {4096, 2112}}) {
    TestState state = before_;
    const auto pass = [&](int64_t chunk, UpdatePart part) {
      std::vector<std::jthread> threads;
      for (int64_t t = 0; t < 3; ++t) {
        threads.emplace_back([&, chunk, part, t] {
          std::vector<const void*> keep;
          for (int64_t begin = t * chunk; begin < unit_.elements; begin += 3 * chunk) {
            update_chunk(unit_, state.view(), begin, std::min(chunk, unit_.elements - begin),
                         with_accumulator(gradient_.from(begin, keep), begin), test_scalars(), part);
          }
        });
      }
    };
    pass(weights_chunk, UpdatePart::weights);
    pass(moments_chunk, UpdatePart::moments);
    EXPECT_TRUE(state == expected) << "chunks of " << weights_chunk << " and " << moments_chunk;
  }
}

// The next step's weights may be on their way to a device while the moments are written, and the other way round.
TEST_P(SplitUpdate, EachPartKeepsItsHandsOffTheOthersArrays) {
  const TestState expected = whole();
  const GuardedMemory m(std::span<const float>(before_.m), PROT_READ), v(std::span<const float>(before_.v), PROT_READ);
  TestState state = before_;
  update_chunk(unit_, {state.hi, state.lo, m.view<float>(), v.view<float>()}, 0, unit_.elements, sources(),
               test_scalars(), UpdatePart::weights);
  EXPECT_EQ(state.hi, expected.hi);
  EXPECT_EQ(state.lo, expected.lo);
  const GuardedMemory hi(std::span<const uint16_t>(before_.hi), PROT_NONE);
  const GuardedMemory lo(std::span<const uint16_t>(before_.lo), PROT_NONE);
  update_chunk(unit_, {hi.view<uint16_t>(), lo.view<uint16_t>(), state.m, state.v}, 0, unit_.elements, sources(),
               test_scalars(), UpdatePart::moments);
  EXPECT_TRUE(state == expected);
}

TEST_P(SplitUpdate, SkipChangesNothing) {
  AdamScalars scalars = test_scalars();
  scalars.skip = true;
  for (UpdatePart part : kParts) {
    TestState state = before_;
    update_chunk(unit_, state.view(), 0, unit_.elements, sources(), scalars, part);
    EXPECT_TRUE(state == before_) << name(part);
  }
}

TEST(UpdateParts, ManySplitStepsEqualManyWholeSteps) {
  const UnitLayout unit = test_unit();
  const auto elements = static_cast<size_t>(unit.elements);
  const AdamSpec adam{.learning_rate = 1e-3, .beta1 = 0.9, .beta2 = 0.99, .eps = 1e-8, .weight_decay = 0.1};
  TestState whole = random_state(elements, 41), split = whole;
  const TestState before = whole;
  int64_t updates = 0;
  for (int step = 0; step < 20; ++step) {
    const TestGradient gradient(2, 2, DType::bf16, elements, static_cast<uint32_t>(step));
    // Clipped, unclipped and skipped steps.
    const double norm = step % 7 == 3 ? std::numeric_limits<double>::quiet_NaN() : step % 2 == 0 ? 1.0 : 1e4;
    const AdamScalars scalars = make_scalars(adam, 1.0, norm, 50, updates + 1);
    if (!scalars.skip) ++updates;
    update_chunk(unit, whole.view(), 0, unit.elements, gradient.sources(), scalars);
    update_chunk(unit, split.view(), 0, unit.elements, gradient.sources(), scalars, UpdatePart::weights);
    update_chunk(unit, split.view(), 0, unit.elements, gradient.sources(), scalars, UpdatePart::moments);
    ASSERT_TRUE(split == whole) << "step " << step;
  }
  EXPECT_EQ(updates, 17);
  EXPECT_FALSE(whole == before);
}

TEST(UpdateParts, HaveNames) {
  EXPECT_EQ(name(UpdatePart::whole), "whole");
  EXPECT_EQ(name(UpdatePart::weights), "weights");
  EXPECT_EQ(name(UpdatePart::moments), "moments");
}

}  // namespace
}  // namespace slidedp
