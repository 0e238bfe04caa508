// The space of plans that search() looks at. Which values each field takes is documented in planner/search.h.
#pragma once

#include <cstdint>
#include <optional>
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

// Layers that recompute, that are selective and that offload; the others keep.
struct ActivationCounts {
  int recompute = 0, selective = 0, offload = 0;
  bool operator==(const ActivationCounts&) const = default;
};
ActivationCounts activation_counts(const Plan& plan);

// The first layers offload (their inputs have the longest way until backward), the next recompute, then come the
// selective ones, and the last ones keep: backward begins with them, with their weights still in the slots, so
// gradients begin to leave at once; and the extra work of the first layers gives the compute lane something to do while
// the updates queued so far drain before the step ends.
std::vector<ActivationPolicy> activation_policies(const SearchProblem& problem, ActivationCounts counts);

// All counts to consider, those with the least extra compute time first, of those the ones that offload least; only
// zeros with a pinned activation (then the counts are ignored).
std::vector<ActivationCounts> activation_choices(const SearchProblem& problem);
// Those of them that do not offload.
std::vector<ActivationCounts> choices_without_offload(const SearchProblem& problem);

// Tokens whose logits exist at once, descending.
std::vector<int64_t> head_chunks(const SearchProblem& problem, const Combination& combination);

// The combination completed.
Plan complete(const SearchProblem& problem, const Combination& combination, ActivationCounts counts,
              int64_t head_chunk_tokens);

// memory_table() of the plan's step graph, without building its tasks.
MemoryTable plan_memory(const SearchProblem& problem, const Plan& plan);

// The sums of plan_memory() for every activation and head chunk of a combination. Only one rank's buffers of two short
// waves are looked at: memory grows linearly with the micro-batches, and all ranks are alike.
class CombinationMemory {
 public:
  CombinationMemory(const SearchProblem& problem, const Combination& combination);
  int64_t host_bytes(ActivationCounts counts) const { return host_ + counts.offload * offloaded_; }
  // `head_chunk`: index into head_chunks().
  int64_t device_bytes(ActivationCounts counts, size_t head_chunk) const;
  // The counts that need the least device memory (with the last head chunk) among those with at most so many host
  // bytes; without offload if even that is too little.
  ActivationCounts smallest(int64_t host_bytes) const;
  // The counts with as many of the recomputing layers offloaded as it takes to stay within the device bytes; nullopt if
  // all of them are not enough, or none is needed. Offloading costs host memory only.
  std::optional<ActivationCounts> offloading(ActivationCounts counts, size_t head_chunk, int64_t device_bytes) const;
  const std::vector<int64_t>& head_chunks() const { return head_chunks_; }

 private:
  int64_t host_ = 0;
  int64_t keep_all_ = 0;  // device, without temporaries; with pinned activation that one
  int64_t micro_batches_ = 0;
  int layers_ = 0;                           // 0 with a pinned activation
  int64_t saved_ = 0, saved_selective_ = 0;  // of a layer and micro-batch
  int64_t scratch_ = 0;                      // of the layers that recompute
  int64_t hidden_ = 0;                       // of a micro-batch
  int64_t offloaded_ = 0;                    // host bytes of a layer that offloads
  std::vector<int64_t> head_chunks_, temporaries_, temporaries_recompute_, temporaries_selective_;
};

// Rough number of tasks of the plan's step graph: what building and simulating it costs.
int64_t estimate_tasks(const SearchProblem& problem, const Plan& plan);
// The same of build_rank_graph.
int64_t estimate_rank_tasks(const SearchProblem& problem, const Plan& plan);

}  // namespace slidedp
