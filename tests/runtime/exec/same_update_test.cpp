// Every plan computes the same update: bit for bit where only time and memory differ, else within the rounding of sums.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "tests/support/tiny_run.h"

namespace slidedp::testing {
namespace {

constexpr int kSteps = 5;

struct Variant {
  const char* name;
  std::function<void(Plan&)> change;
};

// What must not change a bit.
std::vector<Variant> exact_variants() {
  return {
      {"tiny chunks", [](Plan& p) { p.chunk_elements = 64; }},
      {"chunks that divide no unit", [](Plan& p) { p.chunk_elements = 1000; }},
      {"whole units", [](Plan& p) { p.chunk_elements = 1 << 24; }},
      {"three update threads", [](Plan& p) { p.threads.update = 3; }},
      {"two compute threads", [](Plan& p) { p.threads.compute_per_rank = 2; }},
      {"recompute", [](Plan& p) { p.activation.assign(p.activation.size(), ActivationPolicy::recompute); }},
      {"mixed activation", [](Plan& p) { p.activation[0] = p.activation[2] = ActivationPolicy::recompute; }},
      {"selective", [](Plan& p) { p.activation.assign(p.activation.size(), ActivationPolicy::selective); }},
      {"keep, selective and recompute",
       [](Plan& p) {
         p.activation[1] = ActivationPolicy::selective;
         p.activation[2] = ActivationPolicy::recompute;
         p.activation[3] = ActivationPolicy::selective;
       }},
      {"offload", [](Plan& p) { p.activation.assign(p.activation.size(), ActivationPolicy::offload); }},
      {"all activation policies",
       [](Plan& p) {
         using enum ActivationPolicy;
         p.activation = {offload, recompute, offload, selective};
       }},
      {"deferred", [](Plan& p) { p.update = UpdatePolicy::deferred; }},
      {"split", [](Plan& p) { p.update = UpdatePolicy::split; }},
      {"split, three update threads, chunks that divide no unit",
       [](Plan& p) {
         p.update = UpdatePolicy::split;
         p.threads.update = 3;
         p.chunk_elements = 1000;
       }},
      {"one slot", [](Plan& p) { p.layer_slots = p.gradient_slots = p.wire_slots = 1; }},
      {"many slots",
       [](Plan& p) {
         p.layer_slots = 9;
         p.gradient_slots = 3;
         p.wire_slots = 5;
       }},
      {"landing ring", [](Plan& p) { p.landing_slots = 2; }},
      {"deferred, tiny chunks, recompute",
       [](Plan& p) {
         p.update = UpdatePolicy::deferred;
         p.chunk_elements = 128;
         p.activation.assign(p.activation.size(), ActivationPolicy::recompute);
       }},
  };
}

void expect_same_bits(const RunResult& a, const RunResult& b, const std::string& what) {
  EXPECT_EQ(a.losses, b.losses) << what;
  EXPECT_EQ(a.gradient_norms, b.gradient_norms) << what;
  EXPECT_TRUE(a.state == b.state) << what;
}

class SameUpdate : public ::testing::TestWithParam<bool> {
 protected:
  TinyTraining training_{GetParam()};
  TrainSpec train_ = training_.train();
};

TEST_P(SameUpdate, BitForBitOnOneRank) {
  for (const DType wire : {DType::fp32, DType::bf16}) {
    Plan base = training_.plan(1, 2);
    base.wire = wire;
    const RunResult reference = training_.run(base, train_, kSteps);
    ASSERT_EQ(reference.losses.size(), static_cast<size_t>(kSteps));
    EXPECT_LT(reference.losses.back(), reference.losses.front());
    for (const Variant& variant : exact_variants()) {
      Plan plan = base;
      variant.change(plan);
      expect_same_bits(training_.run(plan, train_, kSteps), reference, variant.name);
    }
    if (training_.model().tied) {
      Plan plan = base;
      plan.vocabulary_kept = true;
      expect_same_bits(training_.run(plan, train_, kSteps), reference, "vocabulary kept");
    }
  }
}

TEST_P(SameUpdate, BitForBitOnTwoRanksForEachReduction) {
  int turn = 0;
  for (const Reduction reduction : {Reduction::cpu, Reduction::gpu}) {
    for (const DType wire : {DType::fp32, DType::bf16}) {
      Plan base = training_.plan(2, 2);
      base.reduction = reduction;
      base.wire = wire;
      const RunResult reference = training_.run(base, train_, kSteps);
      for (const Variant& variant : exact_variants()) {
        Plan plan = base;
        variant.change(plan);
        plan.delivery = ++turn % 2 == 0 ? Delivery::sharded : Delivery::broadcast;
        expect_same_bits(training_.run(plan, train_, kSteps), reference, variant.name);
      }
    }
  }
}

// Several waves: the same bits for the same number of waves.
TEST_P(SameUpdate, BitForBitWithSeveralWaves) {
  int turn = 0;
  for (const Reduction reduction : {Reduction::cpu, Reduction::gpu}) {
    Plan base = training_.plan(2, 2, 2);
    base.reduction = reduction;
    base.wire = DType::bf16;
    const RunResult reference = training_.run(base, train_, kSteps);
    for (const Variant& variant : exact_variants()) {
      Plan plan = base;
      variant.change(plan);
      plan.delivery = ++turn % 2 == 0 ? Delivery::sharded : Delivery::broadcast;
      expect_same_bits(training_.run(plan, train_, kSteps), reference, variant.name);
      plan.landing_slots = 1 + turn % 3;
      expect_same_bits(training_.run(plan, train_, kSteps), reference, std::string(variant.name) + ", landing ring");
    }
  }
}

TEST_P(SameUpdate, ClippedStepsAreTheSameBitsForAnyChunkAndThreadCount) {
  train_.max_grad_norm = 0.05;  // below every step's norm
  Plan base = training_.plan(2, 2);
  base.update = UpdatePolicy::deferred;
  const RunResult reference = training_.run(base, train_, kSteps);
  EXPECT_GT(*std::min_element(reference.gradient_norms.begin(), reference.gradient_norms.end()), 0.05);
  for (const int64_t chunk : {64, 1000, 1 << 24}) {
    Plan plan = base;
    plan.chunk_elements = chunk;
    plan.threads.update = 3;
    expect_same_bits(training_.run(plan, train_, kSteps), reference, "chunk " + std::to_string(chunk));
    plan.update = UpdatePolicy::split;
    expect_same_bits(training_.run(plan, train_, kSteps), reference, "split, chunk " + std::to_string(chunk));
  }
}

TEST_P(SameUpdate, SecondRunIsTheSame) {
  Plan plan = training_.plan(4, 2);
  plan.delivery = Delivery::sharded;
  plan.reduction = Reduction::gpu;
  expect_same_bits(training_.run(plan, train_, kSteps), training_.run(plan, train_, kSteps), "second run");
}

// Rank count, reduction and micro-batches only change the order in which fp32 sums are rounded. A sum of a few hundred
// terms errs by about 1e-7 of its size, hence 1e-6 for gradients; five small steps keep losses within 1e-5.
TEST_P(SameUpdate, WithinRoundingAcrossRanksReductionsAndMicroBatches) {
  const RunResult reference = training_.run(training_.plan(), train_, kSteps);
  const RunResult first = training_.first_step(training_.plan(), train_);
  for (const int ranks : {1, 2, 4}) {
    for (const Reduction reduction : {Reduction::cpu, Reduction::gpu}) {
      if (ranks == 1 && reduction == Reduction::gpu) continue;
      for (const auto& [micro_batches, waves] : {std::pair(1, 1), std::pair(2, 1), std::pair(1, 2)}) {
        Plan plan = training_.plan(ranks, micro_batches, waves);
        plan.reduction = reduction;
        const std::string what = "ranks " + std::to_string(ranks) + " " + std::string(name(reduction)) +
                                 " micro-batches " + std::to_string(micro_batches) + " waves " + std::to_string(waves);
        const RunResult other = training_.first_step(plan, train_);
        for (size_t t = 0; t < first.first_gradients.size(); ++t) {
          EXPECT_LE(relative_difference(other.first_gradients[t], first.first_gradients[t]), 1e-6)
              << what << " tensor " << t;
        }
        const RunResult result = training_.run(plan, train_, kSteps);
        for (size_t step = 0; step < result.losses.size(); ++step) {
          EXPECT_NEAR(result.losses[step], reference.losses[step], 1e-5 * reference.losses[step]) << what;
        }
      }
    }
  }
}

// bf16 has 8 significant bits: rounding each rank's gradient once changes it by at most 2^-9 of each element, relative.
TEST_P(SameUpdate, Bf16WireRoundsGradientsOnce) {
  const RunResult exact = training_.first_step(training_.plan(2, 1), train_);
  for (const Reduction reduction : {Reduction::cpu, Reduction::gpu}) {
    Plan plan = training_.plan(2, 1);
    plan.wire = DType::bf16;
    plan.reduction = reduction;
    const RunResult rounded = training_.first_step(plan, train_);
    // Ranks' parts may cancel, and gpu reduction rounds the sum again; a tied matrix adds a second gradient. Norm over
    // tensors: each source errs by at most 2^-9 of its own norm, and the sources' norms add up to a few times the
    // sum's.
    for (size_t t = 0; t < exact.first_gradients.size(); ++t) {
      const double difference = relative_difference(rounded.first_gradients[t], exact.first_gradients[t]);
      EXPECT_LE(difference, 4 * std::ldexp(1.0, -9)) << t;
      EXPECT_GT(difference, 0) << t;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Models, SameUpdate, ::testing::Values(true, false),
                         [](const auto& info) { return info.param ? "Tied" : "Untied"; });

}  // namespace
}  // namespace slidedp::testing
