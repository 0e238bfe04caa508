#include "model/graph/dependencies.h"

#include <gtest/gtest.h>

#include <vector>

namespace slidedp::testing {
namespace {

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

}  // namespace
}  // namespace slidedp::testing
