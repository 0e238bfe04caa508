// Small step graphs and machines with round numbers, made by hand or at random.
#pragma once

#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "model/graph/step_graph.h"
#include "model/spec/hardware_spec.h"

namespace slidedp::testing {

// One second of work alone is 1e9 bytes, elements or flops on every path; no latencies, and no shared capacity that
// binds. Tests turn single values.
HardwareSpec round_machine();

// Adds tasks in program order and makes the lanes at the end. Every duration is in seconds of work alone on
// round_machine().
class GraphMaker {
 public:
  explicit GraphMaker(int ranks, int workers = 1);
  TaskId compute(int rank, double seconds, std::vector<TaskId> deps = {});
  TaskId copy(TaskKind kind, int rank, double seconds, std::vector<TaskId> deps = {});
  TaskId collective(TaskKind kind, int rank, int32_t group, double seconds, std::vector<TaskId> deps = {});
  // An update of one source that moves `host_bytes`.
  TaskId update(double seconds, int32_t need, std::vector<TaskId> deps = {}, int64_t host_bytes = 0);
  Task& at(TaskId id) { return graph_.tasks[static_cast<size_t>(id)]; }
  StepGraph& graph() { return graph_; }
  StepGraph finish();

 private:
  TaskId add(TaskKind kind, Lane lane, std::vector<TaskId> deps);
  StepGraph graph_;
};

struct RandomGraphOptions {
  int max_tasks = 30;
  // Pool workers for every pool task of two steps: no decision of the pool changes the order of anything.
  bool enough_workers = false;
};

// A random graph that can run: dependencies point back in program order, members of a group stand together.
StepGraph random_graph(std::mt19937& random, const RandomGraphOptions& options = {});
// Every shared resource may bind, latencies are there.
HardwareSpec random_machine(std::mt19937& random);

}  // namespace slidedp::testing
