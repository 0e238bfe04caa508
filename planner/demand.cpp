// What to say when nothing fits: the binding budget, the smallest demand, and changes that were checked to fit.
#include <algorithm>
#include <limits>
#include <optional>
#include <string_view>
#include <utility>

#include "model/base/format.h"
#include "planner/report.h"
#include "planner/trial.h"

namespace slidedp {
namespace {

constexpr int64_t kMiB = 1 << 20;

// The smallest plans of a combination: the activation and the head chunk that need the least device memory. How much
// they can do without depends on the host memory that offloading may take.
struct Demand {
  Combination combination;
  CombinationMemory memory;
  // On the device with so much host memory; without offload if that is too little for the rest.
  int64_t device_bytes(int64_t host_bytes) const {
    return memory.device_bytes(memory.smallest(host_bytes), memory.head_chunks().size() - 1);
  }
  int64_t least_host_bytes() const { return memory.host_bytes({}); }
};

// Device memory never falls with a larger chunk or more slots, so only the smallest are looked at.
std::vector<Demand> smallest_demands(const SearchProblem& problem) {
  std::vector<Demand> demands;
  std::vector<Combination> seen;
  for (const Combination& combination : combinations(problem)) {
    const bool smallest = combination.chunk_elements ==
                              problem.pins.chunk_elements.value_or(chunk_ladder(problem, combination.ranks).front()) &&
                          combination.layer_slots == problem.pins.layer_slots.value_or(2);
    if (!smallest) continue;
    // Memory does not depend on these two, and ways out ask for all demands again and again.
    Combination alike = combination;
    alike.delivery = Delivery::replicated;
    if (alike.update == UpdatePolicy::split) alike.update = UpdatePolicy::deferred;
    if (std::ranges::find(seen, alike) != seen.end()) continue;
    seen.push_back(alike);
    demands.push_back({combination, CombinationMemory(problem, combination)});
  }
  return demands;
}

struct Needed {
  Plan plan;
  int64_t device_bytes = 0, host_bytes = 0;
};

// The budgets that would do: host memory is raised to the smallest host demand at most, then GPU memory to the smallest
// demand of the plans that this host memory holds.
Needed needed(const SearchProblem& problem, const std::vector<Demand>& demands, const Budgets& budgets) {
  int64_t host = std::numeric_limits<int64_t>::max();
  for (const Demand& demand : demands) host = std::min(host, demand.least_host_bytes());
  host = std::max(host, budgets.host_bytes);
  const Demand* best = nullptr;
  for (const Demand& demand : demands) {
    if (demand.least_host_bytes() > host) continue;
    if (best == nullptr || demand.device_bytes(host) < best->device_bytes(host)) best = &demand;
  }
  const ActivationCounts counts = best->memory.smallest(host);
  return {complete(problem, best->combination, counts, best->memory.head_chunks().back()), best->device_bytes(host),
          best->memory.host_bytes(counts)};
}

bool any_fits(const SearchProblem& problem, const Budgets& budgets) {
  const std::vector<Demand> demands = smallest_demands(problem);
  return std::any_of(demands.begin(), demands.end(), [&](const Demand& demand) {
    return fits(demand.device_bytes(budgets.host_bytes), demand.least_host_bytes(), budgets);
  });
}

// The least host memory with which some combination fits the GPU budget because its layers offload.
std::optional<int64_t> host_bytes_to_offload(const SearchProblem& problem, const Budgets& budgets) {
  if (problem.pins.activation) return std::nullopt;
  std::optional<int64_t> least;
  for (const Demand& demand : smallest_demands(problem)) {
    const size_t last = demand.memory.head_chunks().size() - 1;
    const ActivationCounts recompute{.recompute = problem.layout.layers};
    const auto counts = demand.memory.offloading(recompute, last, budgets.device_bytes);
    if (!counts) continue;
    const int64_t bytes = demand.memory.host_bytes(*counts);
    if (!least || bytes < *least) least = bytes;
  }
  return least;
}

bool fits_with(const SearchProblem& problem, const TrainSpec& train, const Pins& pins, const Budgets& budgets) {
  try {
    return any_fits(SearchProblem(problem.model, train, problem.hardware, pins), budgets);
  } catch (const Error&) {
    return false;  // the change contradicts a pin: not a way out
  }
}

// The largest of value/2, value/4, ... with which a plan fits.
std::optional<int64_t> largest_that_fits(const SearchProblem& problem, const Pins& pins, const Budgets& budgets,
                                         int64_t TrainSpec::*field) {
  TrainSpec train = problem.train;
  while (train.*field > 1) {
    train.*field /= 2;
    if (fits_with(problem, train, pins, budgets)) return train.*field;
  }
  return std::nullopt;
}

// Changes that would fit without more GPU memory, each checked; the cheapest first.
std::vector<std::string> ways_out(const SearchProblem& problem, const Budgets& budgets, const Pins& pins) {
  std::vector<std::string> ways;
  for (const auto& [field, value] : pins) {
    Pins others = pins;
    others.erase(field);
    if (fits_with(problem, problem.train, others, budgets))
      ways.push_back(fmt::format("drop --pin {}={}", field, value));
  }
  if (const auto host = host_bytes_to_offload(problem, budgets); host && *host > budgets.host_bytes) {
    ways.push_back(fmt::format("offload activations to more host memory (--host-memory {}MiB)", ceil_div(*host, kMiB)));
  }
  if (problem.train.max_grad_norm > 0) {
    TrainSpec unclipped = problem.train;
    unclipped.max_grad_norm = 0;
    if (fits_with(problem, unclipped, pins, budgets)) {
      ways.push_back("train without clipping (--set train.max_grad_norm=0), which holds fewer gradients at once");
    }
  }
  if (const auto rows = largest_that_fits(problem, pins, budgets, &TrainSpec::batch_rows)) {
    ways.push_back(fmt::format("lower the batch (--set train.batch_rows={} fits)", *rows));
  }
  if (const auto seq = largest_that_fits(problem, pins, budgets, &TrainSpec::seq)) {
    ways.push_back(fmt::format("shorten the rows (--set train.seq={} fits)", *seq));
  }
  return ways;
}

std::string describe(const Plan& plan) {
  return fmt::format("ranks {}, {} x {}, update {}, waves {}, micro_batch_rows {}, activation {}", plan.ranks,
                     name(plan.delivery), name(plan.reduction), name(plan.update), plan.waves, plan.micro_batch_rows,
                     activation_text(plan));
}

}  // namespace

void fail_nothing_fits(const SearchProblem& problem, const Budgets& budgets, const Pins& pins) {
  const Needed need = needed(problem, smallest_demands(problem), budgets);
  std::string there, least, flags;
  const auto add = [&](const char* what, const char* flag, int64_t bytes, int64_t budget) {
    if (bytes <= budget) return;
    const std::string_view joint = flags.empty() ? "" : " and ";
    there += fmt::format("{}{} of {}", joint, format_bytes(budget), what);
    least += fmt::format("{}{}", joint, format_bytes(bytes));
    flags += fmt::format("{}{} {}MiB", flags.empty() ? "" : " ", flag, ceil_div(bytes, kMiB));
  };
  add("GPU memory per rank", "--gpu-memory", need.device_bytes, budgets.device_bytes);
  add("host memory", "--host-memory", need.host_bytes, budgets.host_bytes);
  std::string ways;
  for (const std::string& way : ways_out(problem, budgets, pins)) ways += "; or " + way;
  throw Error(fmt::format("No plan fits {}: the smallest needs {} ({}). Raise the budget ({}){}.", there, least,
                          describe(need.plan), flags, ways),
              ExitCode::nothing_fits);
}

}  // namespace slidedp
