#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <map>
#include <set>
#include <tuple>

#include "model/graph/visits.h"
#include "tests/model/graph/graph_check.h"
#include "tests/support/random_problem.h"

namespace slidedp::testing {
namespace {

TEST(StepGraph, OrdersEveryConflictOnRandomPlans) {
  int checked = 0;
  for (uint32_t seed = 0; seed < 400; ++seed) {
    const RandomProblem problem(seed);
    const StepGraph graph = build(problem);
    if (graph.tasks.size() > 1500) continue;  // the check is quadratic
    ++checked;
    const auto conflict = find_unordered_conflict(graph);
    ASSERT_FALSE(conflict) << "seed " << seed << ": " << conflict->text;
  }
  EXPECT_GT(checked, 150);
}

TEST(StepGraph, DeliversReducesAndUpdatesEveryChunkOnRandomPlans) {
  for (uint32_t seed = 0; seed < 300; ++seed) {
    const StepGraph graph = build(RandomProblem(seed));
    ASSERT_EQ(check_deliveries(graph), "") << "seed " << seed;
    ASSERT_EQ(check_gradients(graph), "") << "seed " << seed;
    ASSERT_EQ(check_activations(graph), "") << "seed " << seed;
    ASSERT_EQ(check_blocks(graph), "") << "seed " << seed;
  }
}

// Dependencies stand in program order, so running the tasks one after another is a legal execution.
TEST(StepGraph, ProgramOrderIsTopological) {
  for (uint32_t seed = 0; seed < 100; ++seed) {
    const StepGraph graph = build(RandomProblem(seed));
    for (TaskId id = 0; id < static_cast<TaskId>(graph.tasks.size()); ++id) {
      for (const TaskId dep : graph.tasks[static_cast<size_t>(id)].deps) ASSERT_LT(dep, id);
    }
  }
}

TEST(StepGraph, FirstStepHasNoDeferredUpdateAndFlushHasOnlyThose) {
  for (uint32_t seed = 0; seed < 60; ++seed) {
    const RandomProblem problem(seed);
    const StepGraph graph = build(problem);
    const bool deferred = problem.plan.update != UpdatePolicy::eager;
    for (const Task& task : graph.tasks) {
      const bool late = deferred && task.kind == TaskKind::update;
      EXPECT_EQ((task.phases & phase_bit(Phase::first)) != 0, !late);
      EXPECT_EQ((task.phases & phase_bit(Phase::flush)) != 0, late);
      EXPECT_NE(task.phases & phase_bit(Phase::steady), 0);
    }
  }
}

// A step delivers the weights that its own (deferred) or the previous step's (eager) update left: with deferred updates
// each chunk's update stands before its first delivery, with eager ones after its last.
TEST(StepGraph, DeliversAfterTheUpdateThatTheStepNeeds) {
  for (uint32_t seed = 0; seed < 100; ++seed) {
    const RandomProblem problem(seed);
    const StepGraph graph = build(problem);
    const bool deferred = problem.plan.update != UpdatePolicy::eager;
    // A lookup's rows are updated by chunks of their own, the rest of a chunk by another task.
    std::map<std::tuple<int, int, bool>, TaskId> updates;
    for (TaskId id = 0; id < static_cast<TaskId>(graph.tasks.size()); ++id) {
      const Task& task = graph.tasks[static_cast<size_t>(id)];
      if (task.kind == TaskKind::update && task.part != UpdatePart::moments) {
        updates[{task.unit, task.chunk, task.rows == Rows::touched}] = id;
      }
    }
    for (TaskId id = 0; id < static_cast<TaskId>(graph.tasks.size()); ++id) {
      const Task& task = graph.tasks[static_cast<size_t>(id)];
      if (task.kind != TaskKind::h2d || task.unit < 0) continue;
      const TaskId update = updates.at({task.unit, task.chunk, task.rows == Rows::touched});
      ASSERT_EQ(update < id, deferred) << "seed " << seed << ": " << graph.describe(id);
    }
  }
}

// Weights still in their slots at the turn from forward to backward are not delivered again.
TEST(Visits, KeepWeightsAtTheTurn) {
  RandomProblem problem(1);
  problem.model.layers = 5;
  problem.plan.activation.assign(5, ActivationPolicy::keep);
  problem.plan.waves = 1;
  problem.plan.layer_slots = 2;
  const ModelLayout layout = make_layout(problem.model);
  std::vector<int> delivered;
  for (const Visit& visit : plan_visits(layout, problem.plan)) {
    for (const Residency& weights : visit.weights) {
      if (weights.slot_class == SlotClass::layer && weights.deliver) delivered.push_back(weights.unit);
    }
  }
  EXPECT_EQ(delivered, (std::vector<int>{1, 2, 3, 4, 5, 3, 2, 1}));
}

// A layer's weights can be on their way while the layer before computes: no path from that compute to the copy.
TEST(StepGraph, PrefetchesTheNextLayer) {
  RandomProblem problem(1);
  problem.model.layers = 5;
  problem.plan.activation.assign(5, ActivationPolicy::keep);
  problem.plan.layer_slots = 2;
  problem.plan.chunk_elements = 1 << 20;
  problem.plan.model = problem.model.fingerprint();
  const StepGraph graph = build(problem);
  for (const Task& task : graph.tasks) {
    if (task.kind != TaskKind::h2d || task.unit < 2 || task.unit > 5) continue;
    for (const TaskId dep : task.deps) {
      const Task& before = graph.tasks[static_cast<size_t>(dep)];
      if (before.kind == TaskKind::fwd) {
        EXPECT_LE(before.unit, task.unit - 2) << graph.describe(dep);
      }
    }
  }
}

// What happens before the task in its step, by dependencies and in-order lanes.
std::set<TaskId> ancestors(const StepGraph& graph, TaskId of) {
  std::map<TaskId, TaskId> before;  // on the same lane
  for (size_t lane = 0; lane + 1 < graph.lanes.size(); ++lane) {
    for (size_t i = 1; i < graph.lanes[lane].size(); ++i) before[graph.lanes[lane][i]] = graph.lanes[lane][i - 1];
  }
  std::set<TaskId> found;
  std::vector<TaskId> left{of};
  while (!left.empty()) {
    const TaskId id = left.back();
    left.pop_back();
    std::vector<TaskId> next = graph.tasks[static_cast<size_t>(id)].deps;
    if (before.contains(id)) next.push_back(before.at(id));
    for (const TaskId dep : next) {
      if (found.insert(dep).second) left.push_back(dep);
    }
  }
  return found;
}

// A layer's blocks are waited for one by one: attention runs forward before the MLP's weights are there, for backward
// it is the other way round, and the MLP's gradients leave while attention runs backward.
TEST(StepGraph, BlocksWaitForTheirOwnChunksOnly) {
  RandomProblem problem(1);
  problem.model.layers = 6;
  Plan& plan = problem.plan;
  plan.activation.assign(6, ActivationPolicy::keep);
  plan.ranks = plan.waves = 1;
  plan.micro_batches = 2;
  plan.delivery = Delivery::replicated;
  plan.reduction = Reduction::cpu;
  plan.accumulator = plan.wire = DType::fp32;
  plan.update = UpdatePolicy::eager;
  plan.landing_slots = 0;
  plan.layer_slots = plan.gradient_slots = 2;
  plan.chunk_elements = 2 * kBlockElements;
  plan.model = problem.model.fingerprint();
  problem.train.batch_rows = plan.batch_rows();
  problem.train.max_grad_norm = 0;
  const StepGraph graph = build(problem);
  constexpr int kUnit = 2;  // neither in its slot at the turn nor the last to be computed
  const int64_t middle = graph.layout.units[kUnit].range(LayerBlock::mlp).begin;
  const auto task_of = [&](TaskKind kind, LayerBlock block, int m) {
    const auto found = std::ranges::find_if(graph.tasks, [&](const Task& task) {
      return task.kind == kind && task.unit == kUnit && task.block == block && task.micro_batch == m;
    });
    return static_cast<TaskId>(found - graph.tasks.begin());
  };
  const TaskId head =
      static_cast<TaskId>(std::ranges::find(graph.tasks, TaskKind::head, &Task::kind) - graph.tasks.begin());
  // Chunks of this delivery (of two) that the task waits for.
  const auto delivered = [&](TaskId of, bool backward) {
    std::vector<std::pair<int64_t, int64_t>> chunks;
    for (const TaskId id : ancestors(graph, of)) {
      const Task& task = graph.tasks[static_cast<size_t>(id)];
      const bool copy = task.kind == TaskKind::h2d && task.unit == kUnit && (id > head) == backward;
      if (copy) chunks.emplace_back(task.elements_begin, task.elements_begin + task.elements);
    }
    return chunks;
  };
  const auto forward = delivered(task_of(TaskKind::fwd, LayerBlock::attention, 0), false);
  EXPECT_EQ(static_cast<int64_t>(forward.size()), ceil_div(middle, plan.chunk_elements));
  for (const auto& [begin, end] : forward) EXPECT_LT(begin, middle);
  const auto backward = delivered(task_of(TaskKind::bwd, LayerBlock::mlp, 0), true);
  EXPECT_EQ(backward.size(), graph.chunks[kUnit].size() - static_cast<size_t>(middle / plan.chunk_elements));
  for (const auto& [begin, end] : backward) EXPECT_GT(end, middle);

  const TaskId mlp = task_of(TaskKind::bwd, LayerBlock::mlp, 1);
  const TaskId attention = task_of(TaskKind::bwd, LayerBlock::attention, 1);
  for (TaskId id = 0; id < static_cast<TaskId>(graph.tasks.size()); ++id) {
    const Task& task = graph.tasks[static_cast<size_t>(id)];
    if (task.kind != TaskKind::d2h || task.unit != kUnit || task.chunk < 0) continue;
    const std::set<TaskId> before = ancestors(graph, id);
    EXPECT_TRUE(before.contains(mlp));
    EXPECT_EQ(before.contains(attention), task.elements_begin < middle) << graph.describe(id);
  }
}

// The pool runs the second pass of a split update after every first pass, in the order in which backward's gradients
// land on what it reads: the head's first, so that they need not wait for the other units.
TEST(StepGraph, MomentsAreFormedInLandingOrder) {
  RandomProblem problem(1);
  problem.model.layers = 5;
  problem.plan.activation.assign(5, ActivationPolicy::keep);
  problem.plan.update = UpdatePolicy::split;
  problem.plan.waves = 1;
  problem.plan.landing_slots = 0;
  problem.plan.model = problem.model.fingerprint();
  problem.train.batch_rows = problem.plan.batch_rows();
  const StepGraph graph = build(problem);
  int32_t last_weights = 0;
  std::vector<int32_t> moments, landed;
  std::map<std::pair<int, int>, int32_t> moments_of;
  for (const Task& task : graph.tasks) {
    if (task.kind == TaskKind::update && task.part == UpdatePart::weights) {
      last_weights = std::max(last_weights, task.need);
    } else if (task.kind == TaskKind::update) {
      moments.push_back(task.need);
      moments_of[{task.unit, task.chunk}] = task.need;
    } else if (task.kind == TaskKind::d2h && task.chunk >= 0 && task.rank == 0) {
      landed.push_back(moments_of.at({task.unit, task.chunk}));
    }
  }
  ASSERT_GE(moments.size(), 7u);
  EXPECT_GT(moments.front(), last_weights);
  EXPECT_TRUE(std::is_sorted(moments.begin(), moments.end()));
  if (graph.layout.tied) {  // the embedding lands twice; the second time its moments are long formed
    landed.resize(landed.size() - graph.chunks.front().size());
  }
  EXPECT_TRUE(std::is_sorted(landed.begin(), landed.end()));
}

// Several waves land in a ring. What frees its places is worked on before the untouched rows, whose update frees none.
TEST(StepGraph, UntouchedRowsLeaveTheRingToTheOthers) {
  RandomProblem problem(1);
  problem.model.hidden = 64;
  problem.model.vocabulary = 1000;
  problem.model.tied = true;
  Plan& plan = problem.plan;
  plan.waves = 2;
  plan.update = UpdatePolicy::eager;
  plan.landing_slots = 3;
  plan.chunk_elements = 1000;
  plan.vocabulary_rows = VocabularyRows::touched;
  plan.model = problem.model.fingerprint();
  problem.train.batch_rows = plan.batch_rows();
  problem.train.max_grad_norm = 0;
  const StepGraph graph = build(problem);
  int32_t least_untouched = std::numeric_limits<int32_t>::max(), most_landed = 0;
  for (const Task& task : graph.tasks) {
    if (task.kind == TaskKind::update && task.rows == Rows::untouched) {
      least_untouched = std::min(least_untouched, task.need);
    } else if ((task.kind == TaskKind::update || task.kind == TaskKind::host_accumulate) && task.work.sources > 0) {
      most_landed = std::max(most_landed, task.need);
    }
  }
  EXPECT_LT(most_landed, least_untouched);
  EXPECT_LT(least_untouched, std::numeric_limits<int32_t>::max());
}

// The copies of offloaded layer inputs run beside computing: each way in its own lane, and the next micro-batch's (or
// layer's) input is on its way while this one's layer is computed backward.
TEST(StepGraph, OffloadsBesideComputing) {
  for (const int micro_batches : {1, 3}) {
    RandomProblem problem(1);
    problem.model.layers = 5;
    problem.plan.activation.assign(5, ActivationPolicy::offload);
    problem.plan.waves = 1;
    problem.plan.micro_batches = micro_batches;
    problem.plan.accumulator = DType::fp32;
    problem.plan.model = problem.model.fingerprint();
    problem.train.batch_rows = problem.plan.batch_rows();
    const StepGraph graph = build(problem);
    const auto place = [&](int boundary, const Task& task) { return boundary * micro_batches + task.micro_batch; };
    int from_backward = 0, from_forward = 0;
    for (const Task& task : graph.tasks) {
      for (const TaskId dep : task.deps) {
        const Task& before = graph.tasks[static_cast<size_t>(dep)];
        if (task.kind == TaskKind::act_h2d && before.kind == TaskKind::bwd) {
          ++from_backward;
          EXPECT_GT(place(-task.unit, task), place(-before.unit, before) + micro_batches) << graph.describe(dep);
        }
        // Forward waits only for a copy that began before the last `micro_batches` tasks of forward.
        if (task.kind == TaskKind::fwd && before.kind == TaskKind::act_d2h) {
          ++from_forward;
          EXPECT_GT(place(task.unit, task), place(before.unit - 1, before) + micro_batches) << graph.describe(dep);
        }
      }
      const bool act = task.kind == TaskKind::act_d2h || task.kind == TaskKind::act_h2d;
      EXPECT_EQ(act, task.lane.kind == LaneKind::act_d2h || task.lane.kind == LaneKind::act_h2d);
    }
    EXPECT_GT(from_backward, 0);
    EXPECT_GT(from_forward, 0);
  }
}

}  // namespace
}  // namespace slidedp::testing
