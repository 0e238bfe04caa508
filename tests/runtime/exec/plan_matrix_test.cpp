// The whole plan space on one tiny model: same bits where the design promises them, the same update within rounding
// elsewhere, and for every plan the memory and the copied bytes that its graph claims.
#include "tests/support/plan_matrix.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>
#include <optional>
#include <set>
#include <tuple>

#include "model/graph/memory.h"
#include "runtime/data/packed_dataset.h"
#include "tests/support/expected_traffic.h"
#include "tests/support/tiny_run.h"

namespace slidedp::testing {
namespace {

constexpr int kSteps = 3;
constexpr size_t kPlans = 320;
constexpr int64_t kHidden = 64;  // touched rows need whole blocks

PlanMatrix make_matrix() {
  const TinyTraining tied(true, kHidden), untied(false, kHidden);
  return PlanMatrix({tied.model(), untied.model(), untied.train(), untied.plan()}, kPlans);
}

TEST(PlanMatrix, HasEveryLegalPairOfValues) {
  const PlanMatrix matrix = make_matrix();
  EXPECT_EQ(matrix.plans().size(), kPlans);
  // All others are legal.
  EXPECT_THAT(
      matrix.illegal_pairs(),
      ::testing::UnorderedElementsAre(
          "ranks 1, delivery sharded", "ranks 1, delivery broadcast", "ranks 1, reduction gpu",
          "tied 0, vocabulary kept 1", "update eager, clip 1", "micro-batches 2, accumulator bf16",
          "micro-batches 4, accumulator bf16", "ranks 8, waves 2", "ranks 8, waves 4", "ranks 8, micro-batches 2",
          "ranks 8, micro-batches 4", "ranks 4, waves 4", "ranks 4, micro-batches 4", "waves 4, micro-batches 4"));
  const std::vector<std::string> missing = matrix.missing_pairs();
  EXPECT_TRUE(missing.empty()) << missing.size() << " pairs, first: " << missing.front();
  RecordProperty("plans", static_cast<int>(matrix.plans().size()));
  RecordProperty("legal_pairs", static_cast<int>(matrix.legal_pairs()));
  RecordProperty("covering", static_cast<int>(matrix.covering()));
}

// Plans with the same rows and clipping come close to this one.
struct Reference {
  RunResult run, first;
};

class PlanMatrixRuns : public ::testing::TestWithParam<bool> {
 protected:
  // One rank, one micro-batch, fp32.
  Reference reference(const TrainSpec& train) const {
    Plan plan = training_.plan();
    plan.micro_batch_rows = train.batch_rows;
    if (train.max_grad_norm > 0) plan.update = UpdatePolicy::deferred;
    return {training_.run(plan, train, kSteps), training_.first_step(plan, train)};
  }

  // Runs the plan and checks all that holds for every plan.
  RunResult run(const Plan& plan, const TrainSpec& train) const {
    const StepGraph graph = build_step_graph(training_.model(), train, plan);
    RunResult result = training_.run(plan, train, kSteps);
    EXPECT_EQ(result.losses.size(), static_cast<size_t>(kSteps));
    expect_planned_memory(graph, result);
    expect_planned_copies(graph, result);
    return result;
  }

  // The device allocator hands out the graph's buffers and nothing else. Temporaries peak at different times on
  // different ranks, so all together stay within the sum; no rank's forward and backward can do without any.
  void expect_planned_memory(const StepGraph& graph, const RunResult& result) const {
    const MemoryTable table = memory_table(graph, training_.model(), HardwareSpec{});
    EXPECT_EQ(result.device_peak, table.device_buffer_bytes);
    EXPECT_LE(result.temporary_peak, table.temporary_bytes * graph.ranks());
    EXPECT_GT(result.temporary_peak, 0);
  }

  // What the devices copied: weights, gradients and offloaded activations by the closed forms, token ids, labels,
  // positions and losses beside.
  void expect_planned_copies(const StepGraph& graph, const RunResult& result) const {
    const Plan& plan = graph.plan;
    const int64_t micro_batches = int64_t{1} * plan.ranks * plan.waves * plan.micro_batches;
    const int64_t arrays = plan.vocabulary_rows == VocabularyRows::touched ? 4 : 3;
    const int64_t offloaded = offloaded_bytes(training_.model(), plan);
    int64_t to_device = 0, to_host = 0;
    for (int step = 0; step < kSteps; ++step) {
      const Traffic traffic = step_traffic(graph.layout, plan, touched_rows(plan, step) * kHidden);
      to_device += traffic.delivery + micro_batches * plan.micro_batch_tokens() * arrays * 4 + offloaded;
      to_host += traffic.landing + micro_batches * 8 + offloaded;
    }
    EXPECT_EQ(result.copied.to_device, to_device);
    EXPECT_EQ(result.copied.to_host, to_host);
  }

  // Different token ids of each wave of a step, summed over waves.
  int64_t touched_rows(const Plan& plan, int step) const {
    std::vector<std::set<int32_t>> ids(static_cast<size_t>(plan.waves));
    std::vector<int32_t> batch(static_cast<size_t>(plan.batch_bytes() / 4));
    for (int rank = 0; rank < plan.ranks; ++rank) {
      data_.fill(step, plan, rank, batch.data());
      for (int64_t m = 0; m < plan.micro_batches_per_step(); ++m) {
        const int32_t* of_micro_batch = batch.data() + m * plan.micro_batch_bytes() / 4;
        ids[static_cast<size_t>(m / plan.micro_batches)].insert(of_micro_batch,
                                                                of_micro_batch + plan.micro_batch_tokens());
      }
    }
    return std::accumulate(ids.begin(), ids.end(), int64_t{0},
                           [](int64_t sum, const auto& wave) { return sum + static_cast<int64_t>(wave.size()); });
  }

  // Ranks, reduction, waves, micro-batches and head chunks only change the order in which fp32 sums are rounded. A sum
  // of a few hundred terms errs by about 1e-7 of its size, hence 1e-6 for gradients; three small steps keep losses
  // within 1e-5. A bf16 wire or slot rounds each part of a gradient to 8 significant bits, at most 2^-9 of the part;
  // slot, wire and reduced sum may each round, and parts may cancel: twice those three.
  void expect_near(const Plan& plan, const TrainSpec& train, const RunResult& result, const Reference& reference) {
    const bool exact = plan.wire == DType::fp32 && plan.accumulator == DType::fp32;
    const double tolerance = exact ? 1e-6 : 6 * std::ldexp(1.0, -9);
    const RunResult first = training_.first_step(plan, train);
    for (size_t t = 0; t < first.first_gradients.size(); ++t) {
      const double difference = relative_difference(first.first_gradients[t], reference.first.first_gradients[t]);
      EXPECT_LE(difference, tolerance) << "tensor " << t;
      worst_[exact] = std::max(worst_[exact], difference);
    }
    if (!exact) return;
    for (size_t step = 0; step < result.losses.size(); ++step) {
      EXPECT_NEAR(result.losses[step], reference.run.losses[step], 1e-5 * reference.run.losses[step]);
    }
  }

  static void expect_same_bits(const RunResult& a, const RunResult& b) {
    EXPECT_EQ(a.losses, b.losses);
    EXPECT_EQ(a.gradient_norms, b.gradient_norms);
    EXPECT_TRUE(a.state == b.state);
  }

  TinyTraining training_{GetParam(), kHidden};
  PackedDataset data_{training_.data(), training_.model(), training_.plan().seq};
  std::map<bool, double> worst_;  // gradient differences: of plans with a bf16 type, of all fp32
};

TEST_P(PlanMatrixRuns, ComputeTheSameUpdateWithTheMemoryAndCopiesPlanned) {
  const PlanMatrix matrix = make_matrix();
  TrainSpec clipping = training_.train();
  clipping.max_grad_norm = kClip;
  const Reference unclipped = reference(training_.train()), clipped = reference(clipping);
  EXPECT_GT(*std::min_element(clipped.run.gradient_norms.begin(), clipped.run.gradient_norms.end()), kClip);
  std::map<std::string, RunResult> groups;  // the first plan's results
  int compared = 0;
  for (const MatrixPlan& plan : matrix.plans()) {
    if (plan.tied != GetParam()) continue;
    SCOPED_TRACE(matrix.describe(plan));
    const RunResult result = run(plan.plan, plan.train);
    const auto [group, opened] = groups.try_emplace(matrix.group(plan), result);
    if (opened) {
      expect_near(plan.plan, plan.train, result, plan.train.max_grad_norm > 0 ? clipped : unclipped);
    } else {
      expect_same_bits(result, group->second);
      ++compared;
    }
  }
  EXPECT_GT(compared, static_cast<int>(2 * groups.size()));
  RecordProperty("groups", static_cast<int>(groups.size()));
  RecordProperty("compared", compared);
  RecordProperty("worst_gradient_fp32", ::testing::PrintToString(worst_[true]));
  RecordProperty("worst_gradient_bf16", ::testing::PrintToString(worst_[false]));
}

// Rank counts that do not divide the matrix' rows: shards of the last chunk end in padding, or are all padding.
TEST_P(PlanMatrixRuns, ComputeTheSameUpdateOnThreeFiveSixAndSevenRanks) {
  using enum Delivery;
  using enum UpdatePolicy;
  for (const int ranks : {3, 5, 6, 7}) {
    TrainSpec train = training_.train();
    train.batch_rows = ranks;
    const Reference near = reference(train);
    for (const Reduction reduction : {Reduction::cpu, Reduction::gpu}) {
      Plan plan = training_.plan();
      plan.ranks = ranks;
      plan.reduction = reduction;
      plan.micro_batch_rows = 1;
      std::optional<RunResult> first;
      for (const auto& [delivery, update, chunk, rows] : {std::tuple(replicated, eager, 1 << 24, VocabularyRows::all),
                                                          {sharded, split, 300, VocabularyRows::touched},
                                                          {broadcast, deferred, 1000, VocabularyRows::touched},
                                                          {replicated, eager, 300, VocabularyRows::touched}}) {
        plan.delivery = delivery;
        plan.update = update;
        plan.chunk_elements = chunk;
        plan.vocabulary_rows = rows;
        SCOPED_TRACE(std::to_string(ranks) + " ranks, " + std::string(name(reduction)) + ", " +
                     std::string(name(delivery)));
        const RunResult result = run(plan, train);
        if (first) {
          expect_same_bits(result, *first);
        } else {
          expect_near(plan, train, result, near);
          first = result;
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Models, PlanMatrixRuns, ::testing::Values(true, false),
                         [](const auto& info) { return info.param ? "Tied" : "Untied"; });

}  // namespace
}  // namespace slidedp::testing
