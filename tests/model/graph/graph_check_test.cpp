// The checks of step graphs have teeth: each finds what was broken on purpose.
#include "tests/model/graph/graph_check.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "tests/support/random_problem.h"

namespace slidedp::testing {
namespace {

// The conflict check has teeth: every edge from a device lane is needed (what others imply is left out), and without it
// the check finds the conflict. Edges from the pool, whose tasks have no order of their own, may be implied by others.
TEST(GraphCheck, FindsRemovedEdges) {
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

TEST(GraphCheck, FindsMissingDelivery) {
  StepGraph graph = build(RandomProblem(3));
  const auto delivery = std::find_if(graph.tasks.begin(), graph.tasks.end(),
                                     [](const Task& task) { return task.kind == TaskKind::h2d && task.unit == 1; });
  ASSERT_NE(delivery, graph.tasks.end());
  graph.tasks.erase(delivery);
  EXPECT_NE(check_deliveries(graph), "");
}

// Whatever is left out or comes in the wrong order.
TEST(GraphCheck, FindsAMissingBlock) {
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

TEST(GraphCheck, FindsAnInputWrittenOver) {
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

}  // namespace
}  // namespace slidedp::testing
