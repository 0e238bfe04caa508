// Independent checks of a step graph: happens-before over two unrolled steps, slot contents, gradient and update
// counts.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "model/graph/step_graph.h"
#include "tests/support/random_problem.h"

namespace slidedp::testing {

// The whole graph of a valid problem.
inline StepGraph build(const RandomProblem& problem) {
  validate_plan(problem.plan, problem.model, problem.train);
  return build_step_graph(problem.model, problem.train, problem.plan);
}

struct Conflict {
  int step_a, step_b;
  TaskId a, b;
  std::string text;
};

// The first pair of task executions that touch overlapping bytes, one of them writing, and that neither dependencies
// nor in-order lanes order; nullopt if there is none. Also reports a cycle (a task that happens before itself).
std::optional<Conflict> find_unordered_conflict(const StepGraph& graph);

// Empty if every compute task reads all weights of its unit, or its block's, and they were delivered to its slot (from
// all ranks' shards); else what is wrong.
std::string check_deliveries(const StepGraph& graph);
// Empty if, in program order, every compute task and copy reads the hidden states of its own layer, micro-batch and
// wave, and those of the layers that offload are on the host between forward and backward; else what is wrong.
std::string check_activations(const StepGraph& graph);
// Empty if, in program order, the blocks of every layer, micro-batch and wave run forward and backward (again forward
// between, if the layer recomputes), each reads only what of the saved area has been written for it, and they give the
// whole gradient; else what is wrong.
std::string check_blocks(const StepGraph& graph);
// Empty if every gradient group of every chunk lands once from every rank (or its shards once), and every chunk is
// updated exactly once, after all of it has landed.
std::string check_gradients(const StepGraph& graph);

}  // namespace slidedp::testing
