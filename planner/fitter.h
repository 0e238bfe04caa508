// Which plans of a combination fit into the memory budgets.
#pragma once

#include <deque>
#include <map>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "planner/search.h"
#include "planner/space.h"
#include "planner/trial.h"

namespace slidedp {

// A plan with its memory, before it is priced.
struct Fitted {
  Plan plan;
  int64_t device_bytes = 0, host_bytes = 0;
};

// Safe in threads. Refers to the problem, which must outlive it.
class Fitter {
 public:
  Fitter(const SearchProblem& problem, const Budgets& budgets)
      : problem_(problem), budgets_(budgets), without_offload_(choices_without_offload(problem)) {}

  // Computed once for all combinations that need the same; valid as long as this.
  const CombinationMemory& memory_of(Combination combination);

  // With the largest head chunk that fits, if any does. Only the temporaries depend on it.
  std::optional<Fitted> largest_head_chunk(const Combination& combination, const CombinationMemory& memory,
                                           ActivationCounts counts) const;

  // Of the plans with little extra compute time that fit, without or with offload, the one with the best estimate.
  std::optional<Fitted> cheapest(const Combination& combination, const CombinationMemory& memory) const;

  // The smallest plan of a combination of which nothing fits.
  Trial over_memory(const Combination& combination, const CombinationMemory& memory) const;

  // Choices of activation, see choices_without_offload().
  const std::vector<ActivationCounts>& without_offload() const { return without_offload_; }

 private:
  std::optional<Fitted> offloading(const Combination& combination, const CombinationMemory& memory,
                                   ActivationCounts counts) const;

  const SearchProblem& problem_;
  Budgets budgets_;
  std::vector<ActivationCounts> without_offload_;
  // In coarse groups. Found ones keep their places.
  std::mutex memories_mutex_;
  std::map<std::pair<int64_t, int64_t>, std::deque<std::pair<Combination, CombinationMemory>>> memories_;
};

}  // namespace slidedp
