#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <limits>
#include <map>
#include <set>
#include <tuple>

#include "model/cost/activations.h"
#include "model/graph/dependencies.h"
#include "model/graph/memory.h"
#include "model/graph/visits.h"
#include "tests/model/graph/graph_check.h"
#include "tests/support/random_problem.h"

namespace slidedp::testing {
namespace {

StepGraph build(const RandomProblem& problem) {
  validate_plan(problem.plan, problem.model, problem.train);
  return build_step_graph(problem.model, problem.train, problem.plan);
}

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

// The conflict check has teeth: every edge from a device lane is needed (what others imply is left out), and without it
// the check finds the conflict. Edges from the pool, whose tasks have no order of their own, may be implied by others.
TEST(StepGraph, CheckFindsRemovedEdges) {
  int removed = 0, found_pool = 0;
  for (uint32_t seed = 0; seed < 60; ++seed) {
    const StepGraph graph = build(RandomProblem(seed));
    if (graph.tasks.size() > 120) continue;
    for (size_t id = 0; id < graph.tasks.size(); ++id) {
      for (const bool previous : {false, true}) {
        const auto& deps = previous ? graph.tasks[id].previous_deps : graph.tasks[id].deps;
        for (size_t i = 0; i < deps.size(); ++i) {
          StepGraph broken = graph;
          auto& cut = previous ? broken.tasks[id].previous_deps : broken.tasks[id].deps;
          cut.erase(cut.begin() + static_cast<std::ptrdiff_t>(i));
          const bool found = find_unordered_conflict(broken).has_value();
          ++removed;
          if (graph.tasks[static_cast<size_t>(deps[i])].lane.kind == LaneKind::update) {
            found_pool += found;
          } else {
            EXPECT_TRUE(found) << "seed " << seed << ": " << graph.describe(deps[i]) << " -> "
                               << graph.describe(static_cast<TaskId>(id)) << (previous ? " (previous step)" : "");
          }
        }
      }
    }
  }
  EXPECT_GT(removed, 300);
  EXPECT_GT(found_pool, 20);
}

TEST(StepGraph, CheckFindsMissingDelivery) {
  StepGraph graph = build(RandomProblem(3));
  const auto delivery = std::find_if(graph.tasks.begin(), graph.tasks.end(),
                                     [](const Task& task) { return task.kind == TaskKind::h2d && task.unit == 1; });
  ASSERT_NE(delivery, graph.tasks.end());
  graph.tasks.erase(delivery);
  EXPECT_NE(check_deliveries(graph), "");
}

// Whatever is left out or comes in the wrong order.
TEST(StepGraph, CheckFindsAMissingBlock) {
  for (const TaskKind kind : {TaskKind::fwd, TaskKind::recompute, TaskKind::bwd}) {
    for (const LayerBlock block : {LayerBlock::attention, LayerBlock::mlp}) {
      RandomProblem problem(1);
      const ActivationPolicy policy =
          kind == TaskKind::recompute ? ActivationPolicy::recompute : ActivationPolicy::keep;
      problem.plan.activation.assign(problem.plan.activation.size(), policy);
      StepGraph graph = build(problem);
      ASSERT_EQ(check_blocks(graph), "");
      const auto task = std::ranges::find_if(
          graph.tasks, [&](const Task& task) { return task.kind == kind && task.unit == 1 && task.block == block; });
      ASSERT_NE(task, graph.tasks.end());
      graph.tasks.erase(task);
      EXPECT_NE(check_blocks(graph), "") << name(kind) << " " << name(block);
    }
  }
}

TEST(StepGraph, CheckFindsAnInputWrittenOver) {
  for (const TaskKind kind : {TaskKind::act_d2h, TaskKind::act_h2d, TaskKind::fwd, TaskKind::recompute}) {
    RandomProblem problem(1);
    problem.plan.activation.assign(problem.plan.activation.size(), ActivationPolicy::offload);
    StepGraph graph = build(problem);
    const auto task = std::find_if(graph.tasks.begin(), graph.tasks.end(), [&](const Task& task) {
      const bool writes = kind != TaskKind::fwd || task.block == LayerBlock::mlp;
      return task.kind == kind && task.unit == 1 && writes;
    });
    ASSERT_NE(task, graph.tasks.end());
    if (kind == TaskKind::recompute) {  // reads another buffer of the same size
      for (Access& access : task->accesses) {
        if (access.role == Role::hidden_in) ++access.buffer;
      }
    } else {
      graph.tasks.erase(task);
    }
    EXPECT_NE(check_activations(graph), "") << name(kind);
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

TEST(Dependencies, FollowBytesNotBuffers) {
  StepGraph graph;
  graph.plan.ranks = 1;
  graph.buffers.push_back({BufferKind::landing, -1, 0, 100, "b", -1});
  const auto task = [&](LaneKind lane, AccessMode mode, int64_t begin, int64_t end) {
    Task& added = graph.tasks.emplace_back();
    added.lane = {lane, lane == LaneKind::update ? -1 : 0};
    added.accesses.push_back({Role::source, mode, 0, begin, end});
  };
  task(LaneKind::d2h, AccessMode::write, 0, 60);     // 0
  task(LaneKind::h2d, AccessMode::write, 60, 100);   // 1
  task(LaneKind::update, AccessMode::read, 50, 70);  // 2: both
  task(LaneKind::update, AccessMode::read, 0, 10);   // 3: 0 only
  task(LaneKind::comm, AccessMode::write, 5, 55);    // 4: readers 2, 3; writer 0, which they waited for
  derive_dependencies(graph);
  EXPECT_EQ(graph.tasks[2].deps, (std::vector<TaskId>{0, 1}));
  EXPECT_EQ(graph.tasks[3].deps, (std::vector<TaskId>{0}));
  EXPECT_EQ(graph.tasks[4].deps, (std::vector<TaskId>{2, 3}));        // 0 happens before both
  EXPECT_EQ(graph.tasks[0].previous_deps, (std::vector<TaskId>{4}));  // 2 and 3 happen before it
  EXPECT_EQ(graph.tasks[1].previous_deps, (std::vector<TaskId>{2}));
}

// Writes of one partition and step do not wait for each other, only for what came before; whoever reads, or writes
// otherwise, waits for all of them, and so does the same partition of the next step.
TEST(Dependencies, WritesOfAPartitionRunSideBySide) {
  StepGraph graph;
  graph.plan.ranks = 1;
  graph.buffers.push_back({BufferKind::state_hi, -1, 0, 100, "b", -1});
  const auto task = [&](AccessMode mode, int64_t begin, int64_t end, int32_t partition) {
    Task& added = graph.tasks.emplace_back();
    added.lane = {LaneKind::update, -1};
    added.accesses.push_back({Role::source, mode, 0, begin, end, partition});
  };
  task(AccessMode::read, 0, 100, -1);        // 0
  task(AccessMode::read_write, 0, 50, 3);    // 1
  task(AccessMode::write, 0, 100, 3);        // 2
  task(AccessMode::read_write, 50, 100, 3);  // 3
  task(AccessMode::read_write, 90, 100, 4);  // 4: another partition
  task(AccessMode::read, 0, 10, -1);         // 5
  task(AccessMode::write, 0, 20, 3);         // 6: the same one again, after a reader
  derive_dependencies(graph);
  const auto deps = [&](size_t id) { return graph.tasks[id].deps; };
  EXPECT_EQ(deps(1), (std::vector<TaskId>{0}));
  EXPECT_EQ(deps(2), (std::vector<TaskId>{0}));
  EXPECT_EQ(deps(3), (std::vector<TaskId>{0}));
  EXPECT_EQ(deps(4), (std::vector<TaskId>{2, 3}));
  EXPECT_EQ(deps(5), (std::vector<TaskId>{1, 2}));
  EXPECT_EQ(deps(6), (std::vector<TaskId>{0, 5}));  // 5 waited for 1 and 2; nobody has read the other bytes since 0
  EXPECT_EQ(graph.tasks[0].previous_deps, (std::vector<TaskId>{1, 2, 3, 4, 6}));
  graph.tasks.erase(graph.tasks.begin());
  for (Task& left : graph.tasks) {
    left.deps.clear();
    left.previous_deps.clear();
  }
  graph.tasks.resize(3);  // 1, 2, 3 without anything between the steps
  derive_dependencies(graph);
  EXPECT_EQ(deps(1), (std::vector<TaskId>{}));
  EXPECT_EQ(graph.tasks[1].previous_deps, (std::vector<TaskId>{0, 1, 2}));
}

int64_t bytes_of(const StepGraph& graph, BufferKind kind, const std::string& name) {
  int64_t bytes = 0;
  for (const Buffer& buffer : graph.buffers) {
    if (buffer.kind == kind && buffer.rank <= 0 && buffer.name.find(name) != std::string::npos) bytes += buffer.bytes;
  }
  return bytes;
}

// Room for as many rows as there are tokens, instead of the matrix, wherever only the lookup needs it.
TEST(StepGraph, TouchedRowsNeedRoomForTheTokensOnly) {
  RandomProblem problem(1);
  problem.model.hidden = 64;
  problem.model.vocabulary = 1000;
  Plan& plan = problem.plan;
  plan.ranks = 1;
  plan.delivery = Delivery::replicated;
  plan.reduction = Reduction::cpu;
  plan.waves = 1;
  plan.update = UpdatePolicy::deferred;
  plan.landing_slots = 0;
  plan.chunk_elements = 1 << 20;
  plan.vocabulary_rows = VocabularyRows::touched;
  const int64_t tokens = plan.micro_batches * plan.micro_batch_tokens(), matrix = 1000 * 64, rows = tokens * 64;
  ASSERT_LT(tokens, 100);
  for (const bool tied : {true, false}) {
    for (const bool apart : {false, true}) {
      problem.model.tied = tied;
      plan.model = problem.model.fingerprint();
      plan.vocabulary_kept = tied && apart;
      plan.vocabulary_slots = !tied && apart ? 2 : 1;
      problem.train.batch_rows = plan.batch_rows();
      problem.train.max_grad_norm = 0;
      const StepGraph graph = build(problem);
      EXPECT_EQ(graph.touched.capacity, tokens);
      const int64_t head = tied ? matrix : graph.layout.head().elements;
      EXPECT_EQ(bytes_of(graph, BufferKind::weight_slot, "vocabulary"), head * 2);
      EXPECT_EQ(bytes_of(graph, BufferKind::weight_slot, "touched_rows"), apart ? rows * 2 : 0);
      EXPECT_EQ(bytes_of(graph, BufferKind::gradient_slot, "vocabulary"), head * size_of(plan.accumulator));
      EXPECT_EQ(bytes_of(graph, BufferKind::gradient_slot, "touched_rows"), 0);
      EXPECT_EQ(bytes_of(graph, BufferKind::landing, "touched rows"), rows * size_of(plan.wire));
      EXPECT_EQ(bytes_of(graph, BufferKind::landing, "embedding"), tied ? matrix * size_of(plan.wire) : 0);
      EXPECT_EQ(bytes_of(graph, BufferKind::touched_rows, ""), 2 * tokens * 4);
    }
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

// Every layer that saves has an area a micro-batch, of its policy's size; those that recompute share one.
TEST(StepGraph, SizesSavedAreasByPolicy) {
  RandomProblem problem(1);
  problem.model.layers = 5;
  problem.model.qk_norm = true;
  using enum ActivationPolicy;
  problem.plan.activation = {recompute, selective, keep, selective, recompute};
  problem.plan.ranks = 1;
  problem.plan.delivery = Delivery::replicated;
  problem.plan.reduction = Reduction::cpu;
  problem.plan.micro_batches = 2;
  problem.plan.accumulator = DType::fp32;
  problem.plan.model = problem.model.fingerprint();
  problem.train.batch_rows = problem.plan.batch_rows();
  const StepGraph graph = build(problem);
  std::vector<int64_t> sizes, expected;
  for (const Buffer& buffer : graph.buffers) {
    if (buffer.kind == BufferKind::saved) sizes.push_back(buffer.bytes);
  }
  for (const ActivationPolicy policy : {keep, keep, recompute, selective, selective, selective, selective}) {
    expected.push_back(
        saved_layout(problem.model, problem.plan.micro_batch_tokens(), problem.plan.compute, policy).bytes);
  }
  EXPECT_LT(expected.back(), expected.front());
  std::sort(sizes.begin(), sizes.end(), std::greater<>());
  EXPECT_EQ(sizes, expected);
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

// Layers that offload hold no input on the device: a ring of a slot more than micro-batches serves all of them and the
// head, and the inputs lie on the host.
TEST(MemoryTable, HoldsOffloadedInputsOnTheHost) {
  RandomProblem problem(1);
  problem.model.layers = 5;
  problem.plan.ranks = 2;
  problem.plan.micro_batches = 3;
  problem.plan.accumulator = DType::fp32;
  problem.plan.model = problem.model.fingerprint();
  problem.train.batch_rows = problem.plan.batch_rows();
  const int64_t hidden = hidden_bytes(problem.model, problem.plan.micro_batch_tokens(), problem.plan.compute);
  const auto bytes = [&](std::vector<ActivationPolicy> activation) {
    problem.plan.activation = std::move(activation);
    std::map<BufferKind, int64_t> sums;
    for (const Buffer& buffer : build(problem).buffers) {
      if (buffer.rank <= 0) sums[buffer.kind] += buffer.bytes;
    }
    return sums;
  };
  using enum ActivationPolicy;
  auto recomputed = bytes({recompute, recompute, recompute, recompute, recompute});
  EXPECT_EQ(recomputed[BufferKind::hidden], 6 * 3 * hidden);
  auto offloaded = bytes({offload, offload, offload, offload, offload});
  EXPECT_EQ(offloaded[BufferKind::hidden], (3 + 1) * hidden);
  EXPECT_EQ(offloaded[BufferKind::activation_host], 2 * 5 * 3 * hidden);
  EXPECT_EQ(offloaded[BufferKind::saved], recomputed[BufferKind::saved]);
  auto mixed = bytes({offload, keep, recompute, offload, selective});
  EXPECT_EQ(mixed[BufferKind::hidden], (3 * 3 + 3 + 1) * hidden);
  EXPECT_EQ(mixed[BufferKind::activation_host], 2 * 2 * 3 * hidden);
}

TEST(MemoryTable, IsTheSumOfTheBuffers) {
  for (uint32_t seed = 0; seed < 50; ++seed) {
    const RandomProblem problem(seed);
    const StepGraph graph = build(problem);
    HardwareSpec hardware;
    hardware.device.context_bytes = 1000;
    const MemoryTable table = memory_table(graph, problem.model, hardware);
    int64_t device = 0, host = 0, other_rank = 0;
    for (const Buffer& buffer : graph.buffers) {
      if (buffer.on_host()) host += buffer.bytes;
      if (buffer.rank == 0) device += buffer.bytes;
      if (buffer.rank == problem.plan.ranks - 1) other_rank += buffer.bytes;
    }
    EXPECT_EQ(table.host_bytes(), host);
    EXPECT_EQ(table.device_buffer_bytes, device);
    EXPECT_EQ(device, other_rank);
    EXPECT_EQ(table.device_bytes(), device + table.temporary_bytes + 1000);
    // 12 bytes a parameter, and the gradients: nothing else is per parameter (but the norm's 1/8 byte).
    const int64_t elements = graph.layout.elements;
    EXPECT_GE(host, elements * 12);
  }
}

}  // namespace
}  // namespace slidedp::testing
