// The space of plans that search() looks at. Which values each field takes is documented in planner/search.h.
#pragma once

#include <cstdint>
#include <vector>

#include "model/graph/memory.h"
#include "model/spec/hardware_spec.h"
#include "model/spec/layout.h"
#include "model/spec/model_spec.h"
#include "model/spec/plan.h"
#include "model/spec/train_spec.h"
#include "planner/pins.h"

namespace slidedp {

// What a search is about. Refers to the caller's specs, which must outlive it.
struct SearchProblem {
  // Throws Error for bad pins.
  SearchProblem(const ModelSpec& model, const TrainSpec& train, const HardwareSpec& hardware, const Pins& pins);

  const ModelSpec& model;
  const TrainSpec& train;
  const HardwareSpec& hardware;
  PinnedFields pins;
  ModelLayout layout;
};

// A plan whose activation is empty and whose head_chunk_tokens is 0: those two follow from memory (see below).
using Combination = Plan;

// Every combination, in a fixed order. Throws Error if the pins exclude each other or do not suit the problem.
std::vector<Combination> combinations(const SearchProblem& problem);

// Chunk sizes in elements for a number of ranks, ascending.
std::vector<int64_t> chunk_ladder(const SearchProblem& problem, int ranks);

// The first `recompute` layers recompute and the others keep. The layers that keep are the last ones: backward begins
// with them, with their weights still in the slots, so gradients begin to leave at once; and the recomputation of the
// first layers gives the compute lane work under which the updates queued so far drain before the step ends.
std::vector<ActivationPolicy> activation_policies(const SearchProblem& problem, int recompute);

// Counts of recomputing layers to consider: 0..layers, or only {0} with a pinned activation (then it is ignored).
int most_recompute(const SearchProblem& problem);

// Tokens whose logits exist at once, descending.
std::vector<int64_t> head_chunks(const SearchProblem& problem, const Combination& combination);

// The combination completed.
Plan complete(const SearchProblem& problem, const Combination& combination, int recompute, int64_t head_chunk_tokens);

// memory_table() of the plan's step graph, without building its tasks.
MemoryTable plan_memory(const SearchProblem& problem, const Plan& plan);

// Rough number of tasks of the plan's step graph: what building and simulating it costs.
int64_t estimate_tasks(const SearchProblem& problem, const Plan& plan);

}  // namespace slidedp
