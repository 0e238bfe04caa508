// What the search learned about the plans that it looked at; explanations are made from it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "planner/search.h"
#include "planner/space.h"

namespace slidedp {

struct Trial {
  enum class Outcome : uint8_t { over_memory, pruned, simulated };
  Plan plan;
  Outcome outcome{};
  int64_t device_bytes = 0, host_bytes = 0;
  double seconds = 0;  // pruned: the bound, simulated: the step; 0 over memory
};

inline bool fits(int64_t device_bytes, int64_t host_bytes, const Budgets& budgets) {
  return device_bytes <= budgets.device_bytes && host_bytes <= budgets.host_bytes;
}

// One sentence per choice of the winner: what the best plan with another value would take, or why there is none.
std::vector<std::string> explain(const SearchProblem& problem, const Budgets& budgets, const Candidate& winner,
                                 const std::vector<Trial>& trials, const Pins& pins);

// Throws the Error of a search in which nothing fits.
[[noreturn]] void fail_nothing_fits(const SearchProblem& problem, const Budgets& budgets, const Pins& pins);

}  // namespace slidedp
