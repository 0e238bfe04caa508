#include "planner/search.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <tuple>
#include <utility>

#include "model/base/format.h"
#include "model/cost/activations.h"
#include "planner/space.h"
#include "planner/trial.h"

namespace slidedp {
namespace {

constexpr size_t kFinalists = 6;  // groups of the second stage

// Steps that differ by less than a nanosecond are equal: the difference is rounding.
int64_t nanoseconds(PredictedSeconds time) { return std::llround(time.seconds * 1e9); }

bool better(const Candidate& a, const Candidate& b) {
  const auto key = [](const Candidate& c) { return std::tuple(nanoseconds(c.step), c.device_bytes, c.host_bytes); };
  return key(a) < key(b);
}

// A plan with its memory, before it is priced.
struct Fitted {
  Plan plan;
  int recompute = 0;
  int64_t device_bytes = 0, host_bytes = 0;
};

class Search {
 public:
  Search(const SearchProblem& problem, const Budgets& budgets, const SearchOptions& options)
      : problem_(problem), budgets_(budgets), options_(options) {}

  // Prices every plan of every combination, but those whose bound shows that they cannot be among the best.
  void run_exhaustive(const std::vector<Combination>& all) {
    for (const Combination& combination : all) {
      std::optional<Candidate> solved;
      for (int recompute = 0; recompute <= most_recompute(problem_); ++recompute) {
        if (const auto fitted = fit(combination, recompute)) price(*fitted, solved);
      }
      keep(solved);
    }
  }

  void run_two_stages(const std::vector<Combination>& all) {
    std::vector<Group> groups = rank_groups(all);
    if (groups.size() > kFinalists) groups.resize(kFinalists);
    for (const Group& group : groups) {
      for (const Combination& variant : group.variants) {
        if (variant == group.priced) continue;
        if (const auto fitted = fewest_recompute(variant)) {
          std::optional<Candidate> solved;
          price(*fitted, solved);
          keep(solved);
        }
      }
    }
    refine_winner();
  }

  bool found() const { return !result_.best.empty(); }
  const std::vector<Trial>& trials() const { return trials_; }
  SearchResult take_result() { return std::move(result_); }

 private:
  // Combinations that differ in chunk, slots, kept vocabulary and threads only: what matters less than the rest.
  struct Group {
    std::vector<Combination> variants;
    Combination priced;
    int64_t step_ns = std::numeric_limits<int64_t>::max();
  };

  static Combination group_key(Combination combination) {
    combination.chunk_elements = 0;
    combination.layer_slots = 0;
    combination.vocabulary_kept = false;
    combination.threads = {};
    return combination;
  }

  // The largest head chunk that fits, if any does. Only the temporaries depend on it.
  std::optional<Fitted> fit(const Combination& combination, int recompute) {
    const std::vector<int64_t> tokens = head_chunks(problem_, combination);
    Fitted fitted{complete(problem_, combination, recompute, tokens.front()), recompute};
    const MemoryTable table = plan_memory(problem_, fitted.plan);
    const int64_t without_temporaries = table.device_bytes() - table.temporary_bytes;
    fitted.host_bytes = table.host_bytes();
    for (const int64_t head_chunk : tokens) {
      fitted.plan.head_chunk_tokens = head_chunk;
      fitted.device_bytes = without_temporaries + temporary_bytes(problem_.model, fitted.plan);
      ++result_.considered;
      if (fits(fitted.device_bytes, fitted.host_bytes, budgets_)) return fitted;
      ++result_.over_memory;
    }
    trials_.push_back({fitted.plan, Trial::Outcome::over_memory, fitted.device_bytes, fitted.host_bytes, 0});
    return std::nullopt;
  }

  // More recomputation never needs more memory, so bisection finds the smallest count that fits.
  std::optional<Fitted> fewest_recompute(const Combination& combination) {
    if (auto fitted = fit(combination, 0)) return fitted;
    int fails = 0, works = most_recompute(problem_);
    if (works == 0) return std::nullopt;
    std::optional<Fitted> best = fit(combination, works);
    while (best && works - fails > 1) {
      const int middle = fails + (works - fails) / 2;
      if (auto fitted = fit(combination, middle)) {
        best = std::move(fitted);
        works = middle;
      } else {
        fails = middle;
      }
    }
    return best;
  }

  // Simulates the plan unless its bound rules it out; `solved` keeps the better of itself and this plan.
  void price(const Fitted& fitted, std::optional<Candidate>& solved) {
    const StepGraph graph = build_step_graph(problem_.model, problem_.train, fitted.plan);
    const Bound lower = bound(graph, problem_.hardware);
    int64_t limit = limit_ns();
    if (solved) limit = std::min(limit, nanoseconds(solved->step));
    Trial trial{fitted.plan, Trial::Outcome::pruned, fitted.device_bytes, fitted.host_bytes, lower.step.seconds};
    if (nanoseconds(lower.step) > limit) {
      ++result_.pruned_by_bound;
      trials_.push_back(std::move(trial));
      return;
    }
    const Simulation simulation = simulate(graph, problem_.hardware);
    ++result_.simulated;
    trial.outcome = Trial::Outcome::simulated;
    trial.seconds = simulation.step.seconds;
    trials_.push_back(std::move(trial));
    Candidate candidate{fitted.plan,           lower.step,          simulation.step,  simulation.exposed,
                        simulation.bottleneck, fitted.device_bytes, fitted.host_bytes};
    if (!solved || better(candidate, *solved)) solved = std::move(candidate);
  }

  int64_t limit_ns() const {
    const bool full = static_cast<int>(result_.best.size()) >= options_.keep;
    return full ? nanoseconds(result_.best.back().step) : std::numeric_limits<int64_t>::max();
  }

  void keep(std::optional<Candidate>& solved) {
    if (!solved) return;
    auto& best = result_.best;
    best.insert(std::upper_bound(best.begin(), best.end(), *solved, better), std::move(*solved));
    if (static_cast<int>(best.size()) > options_.keep) best.pop_back();
  }

  // First stage: one variant of each group, with the second largest chunk (the largest is a whole layer, whose copy and
  // update overlap with nothing) or else the first variant that fits. Best group first.
  std::vector<Group> rank_groups(const std::vector<Combination>& all) {
    std::vector<Group> groups;
    for (const Combination& combination : all) {
      if (groups.empty() || group_key(groups.back().variants.front()) != group_key(combination)) groups.emplace_back();
      groups.back().variants.push_back(combination);
    }
    for (Group& group : groups) {
      std::optional<Fitted> fitted = fewest_recompute(representative(group.variants));
      for (size_t i = 0; !fitted && i < group.variants.size(); ++i) fitted = fewest_recompute(group.variants[i]);
      if (!fitted) continue;
      group.priced = fitted->plan;
      group.priced.activation.clear();
      group.priced.head_chunk_tokens = 0;
      std::optional<Candidate> solved;
      price(*fitted, solved);
      if (solved) group.step_ns = nanoseconds(solved->step);
      keep(solved);
    }
    std::erase_if(groups, [](const Group& group) { return group.step_ns == std::numeric_limits<int64_t>::max(); });
    std::stable_sort(groups.begin(), groups.end(),
                     [](const Group& a, const Group& b) { return a.step_ns < b.step_ns; });
    return groups;
  }

  static const Combination& representative(const std::vector<Combination>& variants) {
    const int64_t largest = variants.back().chunk_elements;
    const Combination* chosen = &variants.front();
    for (const Combination& variant : variants) {
      if (variant.chunk_elements < largest && variant.chunk_elements > chosen->chunk_elements) chosen = &variant;
    }
    return *chosen;
  }

  // Recomputing more layers than memory asks for costs compute time; but where copies or updates take longest it can be
  // free, and then it saves memory. So larger counts for the winner, in growing steps, are tried while the bound allows
  // it.
  void refine_winner() {
    if (!found() || problem_.pins.activation) return;
    Candidate& winner = result_.best.front();
    Combination combination = winner.plan;
    combination.activation.clear();
    const auto& policies = winner.plan.activation;
    const auto fewest = static_cast<int>(std::count(policies.begin(), policies.end(), ActivationPolicy::recompute));
    std::optional<Candidate> solved = winner;
    for (int recompute = fewest + 1; recompute <= most_recompute(problem_); recompute += recompute - fewest) {
      const int64_t pruned = result_.pruned_by_bound;
      if (const auto fitted = fit(combination, recompute)) price(*fitted, solved);
      if (result_.pruned_by_bound > pruned) break;  // the bound grows with the count
    }
    winner = *solved;
    std::stable_sort(result_.best.begin(), result_.best.end(), better);
  }

  const SearchProblem& problem_;
  Budgets budgets_;
  SearchOptions options_;
  SearchResult result_;
  std::vector<Trial> trials_;
};

}  // namespace

SearchResult search(const ModelSpec& model, const TrainSpec& train, const HardwareSpec& hardware,
                    const Budgets& budgets, const Pins& pins, const SearchOptions& options) {
  const SearchProblem problem(model, train, hardware, pins);
  const std::vector<Combination> all = combinations(problem);
  int64_t tasks = 0;
  for (const Combination& combination : all) {
    tasks += estimate_tasks(problem, combination) * (most_recompute(problem) + 1);
  }
  const bool exhaustive = tasks <= options.exhaustive_tasks;
  Search search(problem, budgets, options);
  if (exhaustive) {
    search.run_exhaustive(all);
  } else {
    search.run_two_stages(all);
  }
  if (!search.found()) fail_nothing_fits(problem, budgets, pins);
  SearchResult result = search.take_result();
  result.exhaustive = exhaustive;
  result.why = explain(problem, budgets, result.best.front(), search.trials(), pins);
  return result;
}

std::vector<Plan> enumerate_plans(const ModelSpec& model, const TrainSpec& train, const HardwareSpec& hardware,
                                  const Pins& pins) {
  const SearchProblem problem(model, train, hardware, pins);
  std::vector<Plan> plans;
  for (const Combination& combination : combinations(problem)) {
    for (int recompute = 0; recompute <= most_recompute(problem); ++recompute) {
      for (const int64_t head_chunk : head_chunks(problem, combination)) {
        plans.push_back(complete(problem, combination, recompute, head_chunk));
      }
    }
  }
  return plans;
}

}  // namespace slidedp
