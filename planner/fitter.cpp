#include "planner/fitter.h"

#include <algorithm>
#include <limits>

#include "planner/estimate.h"

namespace slidedp {
namespace {

constexpr size_t kBetween = 8;  // choices of activation with offload that are estimated for a combination

}  // namespace

// Looked up, where only what memory does not depend on differs.
const CombinationMemory& Fitter::memory_of(Combination combination) {
  combination.delivery = Delivery::replicated;
  combination.threads = {};
  const auto same = [&](const auto& entry) { return entry.first == combination; };
  std::unique_lock lock(memories_mutex_);
  auto& known = memories_[{combination.chunk_elements, combination.micro_batch_rows}];
  if (const auto found = std::ranges::find_if(known, same); found != known.end()) return found->second;
  lock.unlock();
  CombinationMemory memory(problem_, combination);
  lock.lock();
  return known.emplace_back(combination, std::move(memory)).second;
}

std::optional<Fitted> Fitter::largest_head_chunk(const Combination& combination, const CombinationMemory& memory,
                                                 ActivationCounts counts) const {
  const std::vector<int64_t>& tokens = memory.head_chunks();
  for (size_t i = 0; i < tokens.size(); ++i) {
    const int64_t device = memory.device_bytes(counts, i), host = memory.host_bytes(counts);
    if (!fits(device, host, budgets_)) continue;
    return Fitted{complete(problem_, combination, counts, tokens[i]), device, host};
  }
  return std::nullopt;
}

std::optional<Fitted> Fitter::cheapest(const Combination& combination, const CombinationMemory& memory) const {
  const size_t last = memory.head_chunks().size() - 1;
  const ActivationCounts least = memory.smallest(budgets_.host_bytes);
  if (!fits(memory.device_bytes(least, last), memory.host_bytes(least), budgets_)) return std::nullopt;
  // The least extra compute with and without offload, and a few choices between: they copy less and compute more.
  const size_t choices = without_offload_.size();
  size_t first = choices, resident = 0;
  std::optional<Fitted> best;
  for (; resident < choices; ++resident) {
    best = largest_head_chunk(combination, memory, without_offload_[resident]);
    if (best) break;
    if (first == choices && offloading(combination, memory, without_offload_[resident])) first = resident;
  }
  if (first == choices) return best;
  double best_s = best ? estimate_step(problem_, best->plan) : std::numeric_limits<double>::infinity();
  for (size_t part = 0; part < kBetween; ++part) {
    auto fitted = offloading(combination, memory, without_offload_[first + (resident - first) * part / kBetween]);
    const double fitted_s = fitted ? estimate_step(problem_, fitted->plan) : best_s;
    if (fitted_s >= best_s) continue;
    best = std::move(fitted);
    best_s = fitted_s;
  }
  return best;
}

// With as few layers offloaded as make it fit.
std::optional<Fitted> Fitter::offloading(const Combination& combination, const CombinationMemory& memory,
                                         ActivationCounts counts) const {
  for (size_t i = 0; i < memory.head_chunks().size(); ++i) {
    const auto offloading = memory.offloading(counts, i, budgets_.device_bytes);
    if (!offloading) continue;
    if (auto fitted = largest_head_chunk(combination, memory, *offloading)) return fitted;
  }
  return std::nullopt;
}

Trial Fitter::over_memory(const Combination& combination, const CombinationMemory& memory) const {
  const size_t last = memory.head_chunks().size() - 1;
  const ActivationCounts counts = memory.smallest(budgets_.host_bytes);
  Plan plan = complete(problem_, combination, counts, memory.head_chunks()[last]);
  return {std::move(plan), Trial::Outcome::over_memory, memory.device_bytes(counts, last), memory.host_bytes(counts),
          0};
}

}  // namespace slidedp
