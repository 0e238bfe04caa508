#include "planner/search.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <future>
#include <limits>
#include <optional>
#include <span>
#include <utility>

#include "model/base/format.h"
#include "planner/estimate.h"
#include "planner/fitter.h"
#include "planner/space.h"
#include "planner/trial.h"

namespace slidedp {
namespace {

constexpr size_t kFinalists = 6;          // groups of the second stage, fewer if the tasks allow no more
constexpr int64_t kStageTasks = 300'000;  // of one rank, simulated in each of the two stages: half a second
constexpr int64_t kExactTasks = 150'000;  // of all ranks, of the plans that are priced once more at the end
// Plans priced at the same time, by a thread each. What is pruned depends on it, so it is the same on all machines.
constexpr size_t kBatch = 4;

// Steps that differ by less than a nanosecond are equal: the difference is rounding.
int64_t nanoseconds(PredictedSeconds time) { return std::llround(time.seconds * 1e9); }

// A plan's price. No simulation: the bound rules it out.
struct Priced : Price {
  bool exact = false;  // else of one rank that stands for others, which are not quite alike
};

// What was simulated of one combination.
struct Solved {
  std::vector<Candidate> candidates;
  std::vector<bool> exact;  // by candidate
  int64_t fastest_ns = std::numeric_limits<int64_t>::max();
};

class Search {
 public:
  Search(const SearchProblem& problem, const Budgets& budgets, const SearchOptions& options)
      : problem_(problem), options_(options), fitter_(problem, budgets) {}

  // Prices every plan of every combination, but those whose bound shows that they cannot be among the best.
  void run_exhaustive(const std::vector<Combination>& all) {
    const std::vector<ActivationCounts> choices = activation_choices(problem_);
    for (const Combination& combination : all) {
      const CombinationMemory& memory = fitter_.memory_of(combination);
      std::vector<Fitted> plans;
      for (const ActivationCounts counts : choices) {
        if (auto fitted = fit(combination, memory, counts)) plans.push_back(std::move(*fitted));
      }
      if (plans.empty()) trials_.push_back(fitter_.over_memory(combination, memory));
      Solved solved;
      price(plans, solved);
      keep(std::move(solved));
    }
  }

  void run_two_stages(const std::vector<Combination>& all) {
    two_stages_ = true;
    std::vector<Group> groups = estimated_groups(all);
    const size_t simulated = simulate_groups(groups);
    groups.resize(simulated);
    std::ranges::stable_sort(groups, {}, &Group::step_ns);
    int64_t tasks = 0;
    std::vector<Fitted> variants;
    for (size_t i = 0; i < groups.size() && i < kFinalists; ++i) {
      for (const Combination& variant : groups[i].variants) {
        if (variant == groups[i].chosen) continue;
        tasks += estimate_rank_tasks(problem_, variant);
        if (tasks > kStageTasks) break;
        FirstFit found;
        try_fit(variant, found);
        note_fit(found);
        if (found.fitted) variants.push_back(std::move(*found.fitted));
      }
    }
    price_each(variants);
    if (!found()) return;
    refine_winner();
    make_exact();
  }

  bool found() const { return !solved_.empty(); }
  const std::vector<Trial>& trials() const { return trials_; }

  // The best plan of every combination, ranked.
  SearchResult take_result() {
    std::vector<Candidate>& best = result_.best;
    for (Solved& solved : solved_) best.push_back(std::move(best_of(solved)));
    std::ranges::stable_sort(best, {}, [&](const Candidate& c) { return key(c); });
    if (static_cast<int>(best.size()) > options_.keep) best.resize(static_cast<size_t>(options_.keep));
    result_.fastest = fastest_;
    return std::move(result_);
  }

 private:
  // Combinations that differ in chunk, slots, kept vocabulary and threads only: what matters less than the rest.
  struct Group {
    std::vector<Combination> variants;
    Combination chosen;  // the variant that stands for all in the first stage
    Fitted fitted;       // it, completed
    double estimate_s = 0;
    int64_t step_ns = std::numeric_limits<int64_t>::max();
  };

  static Combination group_key(Combination combination) {
    combination.chunk_elements = 0;
    combination.layer_slots = 0;
    combination.landing_slots = 0;
    combination.vocabulary_kept = false;
    combination.threads = {};
    return combination;
  }

  RankKey key(const Candidate& candidate) const {
    return rank_key(nanoseconds(candidate.step), nanoseconds(fastest_), candidate.device_bytes, candidate.host_bytes);
  }

  size_t best_index(Solved& solved) const {
    const auto best = std::ranges::min_element(solved.candidates, {}, [&](const Candidate& c) { return key(c); });
    return static_cast<size_t>(best - solved.candidates.begin());
  }
  Candidate& best_of(Solved& solved) const { return solved.candidates[best_index(solved)]; }

  // The same, counted.
  std::optional<Fitted> fit(const Combination& combination, const CombinationMemory& memory, ActivationCounts counts) {
    auto fitted = fitter_.largest_head_chunk(combination, memory, counts);
    ++result_.considered;
    if (!fitted) ++result_.over_memory;
    return fitted;
  }

  // The first of some combinations of which a plan fits, and those before it.
  struct FirstFit {
    std::optional<Fitted> fitted;
    std::vector<Trial> over_memory;
  };

  // Safe in threads.
  void try_fit(const Combination& combination, FirstFit& found) {
    const CombinationMemory& memory = fitter_.memory_of(combination);
    found.fitted = fitter_.cheapest(combination, memory);
    if (!found.fitted) found.over_memory.push_back(fitter_.over_memory(combination, memory));
  }

  void note_fit(FirstFit& found) {
    const auto over = static_cast<int64_t>(found.over_memory.size());
    result_.considered += over + (found.fitted ? 1 : 0);
    result_.over_memory += over;
    std::ranges::move(found.over_memory, std::back_inserter(trials_));
  }

  // Simulates the plan unless its bound rules it out: all ranks, or in two stages one that stands for all.
  Priced priced(const Plan& plan, const Solved& solved) const {
    const StepGraph graph = two_stages_ ? build_rank_graph(problem_.model, problem_.train, plan)
                                        : build_step_graph(problem_.model, problem_.train, plan);
    const auto ruled_out = [&](const Bound& bound) { return cannot_win(bound.step, solved); };
    return {price_graph(graph, problem_.hardware, ruled_out), !two_stages_ || ranks_alike(graph)};
  }

  // Calls work(0) to work(count - 1), each in a thread of its own. What the first of them throws is thrown.
  template <typename Work>
  static void in_threads(size_t count, const Work& work) {
    std::vector<std::future<void>> running;
    for (size_t i = 0; i < count; ++i) running.push_back(std::async(std::launch::async, [&work, i] { work(i); }));
    for (std::future<void>& done : running) done.get();
  }

  // The plans of one combination. Those of a batch know of each other's steps only afterwards.
  void price(std::span<const Fitted> plans, Solved& solved) {
    for (size_t begin = 0; begin < plans.size(); begin += kBatch) {
      const size_t count = std::min(kBatch, plans.size() - begin);
      std::array<Priced, kBatch> prices;
      in_threads(count, [&](size_t i) { prices[i] = priced(plans[begin + i].plan, solved); });
      for (size_t i = 0; i < count; ++i) note(plans[begin + i], std::move(prices[i]), solved);
    }
  }

  // The only plans that are priced of as many combinations. Returns the steps; the greatest number for a pruned plan.
  std::vector<int64_t> price_each(std::span<const Fitted> plans) {
    std::vector<int64_t> steps;
    for (size_t begin = 0; begin < plans.size(); begin += kBatch) {
      const size_t count = std::min(kBatch, plans.size() - begin);
      std::array<Priced, kBatch> prices;
      in_threads(count, [&](size_t i) { prices[i] = priced(plans[begin + i].plan, {}); });
      for (size_t i = 0; i < count; ++i) {
        Solved solved;
        note(plans[begin + i], std::move(prices[i]), solved);
        steps.push_back(solved.fastest_ns);
        keep(std::move(solved));
      }
    }
    return steps;
  }

  void note(const Fitted& fitted, Priced priced, Solved& solved) {
    Trial trial{fitted.plan, Trial::Outcome::pruned, fitted.device_bytes, fitted.host_bytes, priced.bound.step.seconds};
    if (!priced.simulation) {
      ++result_.pruned_by_bound;
      trials_.push_back(std::move(trial));
      return;
    }
    const Simulation& simulation = *priced.simulation;
    ++result_.simulated;
    trial.outcome = Trial::Outcome::simulated;
    trial.seconds = simulation.step.seconds;
    trials_.push_back(std::move(trial));
    if (fastest_.seconds == 0 || simulation.step < fastest_) fastest_ = simulation.step;
    solved.fastest_ns = std::min(solved.fastest_ns, nanoseconds(simulation.step));
    solved.candidates.push_back({fitted.plan, priced.bound.step, simulation.step, simulation.exposed,
                                 simulation.bottleneck, fitted.device_bytes, fitted.host_bytes});
    solved.exact.push_back(priced.exact);
  }

  // Whether a plan with this bound ranks behind another of its combination, or behind as many combinations as are kept,
  // whatever its memory: its step is longer by more than counts as equal (of the fastest step so far; the final one is
  // no longer). A simulated step may be below its bound by 0.1 %.
  bool cannot_win(PredictedSeconds lower, const Solved& solved) const {
    const bool full = static_cast<int>(limits_.size()) >= options_.keep;
    const int64_t limit = full ? std::min(solved.fastest_ns, limits_.back()) : solved.fastest_ns;
    if (limit == std::numeric_limits<int64_t>::max()) return false;
    const int64_t equal = nanoseconds(fastest_) / kRankSteps + 1;
    return static_cast<double>(nanoseconds(lower)) > static_cast<double>(limit + equal) * 1.001 + 2;
  }

  void keep(Solved solved) {
    if (solved.candidates.empty()) return;
    limits_.insert(std::upper_bound(limits_.begin(), limits_.end(), solved.fastest_ns), solved.fastest_ns);
    if (static_cast<int>(limits_.size()) > options_.keep) limits_.pop_back();
    solved_.push_back(std::move(solved));
  }

  // Groups of which some plan fits, best estimate first. One variant stands for each: that with the second largest
  // chunk (the largest is a whole layer, whose copy and update overlap with nothing), or else the first that fits.
  std::vector<Group> estimated_groups(const std::vector<Combination>& all) {
    std::vector<Group> groups;
    for (const Combination& combination : all) {
      if (groups.empty() || group_key(groups.back().variants.front()) != group_key(combination)) groups.emplace_back();
      groups.back().variants.push_back(combination);
    }
    std::vector<FirstFit> firsts(groups.size());
    in_threads(kBatch, [&](size_t thread) {
      for (size_t i = thread; i < groups.size(); i += kBatch) {
        try_fit(representative(groups[i].variants), firsts[i]);
        for (size_t v = 0; !firsts[i].fitted && v < groups[i].variants.size(); ++v)
          try_fit(groups[i].variants[v], firsts[i]);
      }
    });
    for (size_t i = 0; i < groups.size(); ++i) {
      Group& group = groups[i];
      note_fit(firsts[i]);
      if (!firsts[i].fitted) continue;
      group.fitted = std::move(*firsts[i].fitted);
      group.chosen = group.fitted.plan;
      group.chosen.activation.clear();
      group.chosen.head_chunk_tokens = 0;
      group.estimate_s = estimate_step(problem_, group.fitted.plan);
    }
    std::erase_if(groups, [](const Group& group) { return group.estimate_s <= 0; });
    std::ranges::stable_sort(groups, {}, &Group::estimate_s);
    return groups;
  }

  // First stage: prices the groups in this order while the tasks allow it. Returns how many.
  size_t simulate_groups(std::vector<Group>& groups) {
    int64_t tasks = 0;
    size_t done = 0;
    std::vector<Fitted> plans;
    for (; done < groups.size(); ++done) {
      tasks += estimate_rank_tasks(problem_, groups[done].chosen);
      if (done > 0 && tasks > kStageTasks) break;
      plans.push_back(groups[done].fitted);
    }
    const std::vector<int64_t> steps = price_each(plans);
    for (size_t i = 0; i < done; ++i) groups[i].step_ns = steps[i];
    result_.not_tried = static_cast<int64_t>(groups.size() - done);
    return done;
  }

  // With several waves a landing ring of two layers holds only a few large chunks and stalls, so it is smaller there.
  const Combination& representative(const std::vector<Combination>& variants) const {
    const int64_t largest = variants.back().chunk_elements;
    const int64_t most = variants.front().waves > 1 ? problem_.layout.units[1].elements / 32 : largest;
    const Combination* chosen = &variants.front();
    for (const Combination& variant : variants) {
      const bool allowed = variant.chunk_elements < largest && variant.chunk_elements <= most;
      if (allowed && variant.chunk_elements > chosen->chunk_elements) chosen = &variant;
    }
    return *chosen;
  }

  // Less saved than memory allows costs compute time, and offloading costs copies; but where something else takes
  // longest it can be free, and then it saves memory. So activations that cost more and need less are tried for the
  // winner, in growing steps, while some of them are about as fast: more extra compute first, then more layers
  // offloaded.
  void refine_winner() {
    if (problem_.pins.activation) return;
    Solved& winner = *std::ranges::min_element(solved_, {}, [&](Solved& solved) { return key(best_of(solved)); });
    Combination combination = winner.candidates.front().plan;
    const ActivationCounts first = activation_counts(combination);
    combination.activation.clear();
    combination.head_chunk_tokens = 0;
    const CombinationMemory& memory = fitter_.memory_of(combination);
    int64_t least = winner.candidates.front().device_bytes;
    std::vector<Fitted> plans;
    // Takes a plan that fits and needs less than the last; returns whether it is one.
    const auto take = [&](ActivationCounts counts) {
      auto fitted = fitter_.largest_head_chunk(combination, memory, counts);
      if (!fitted || fitted->device_bytes >= least) return false;
      least = fitted->device_bytes;
      plans.push_back(std::move(*fitted));
      return true;
    };
    const std::vector<ActivationCounts>& choices = fitter_.without_offload();
    size_t at = 0, skip = 0;
    const ActivationCounts resident{first.recompute + first.offload, first.selective};
    while (at < choices.size() && choices[at] != resident) ++at;
    for (size_t i = at + 1; i < choices.size(); i += 1 + skip) {
      ActivationCounts counts = choices[i];
      counts.offload = std::min(first.offload, counts.recompute);
      counts.recompute -= counts.offload;
      if (take(counts)) skip = 4 * skip + 3;
    }
    refine(winner, plans);
    plans.clear();
    least = best_of(winner).device_bytes;
    ActivationCounts counts = activation_counts(best_of(winner).plan);
    for (int more = 1; counts.recompute > 0; more *= 4) {
      more = std::min(more, counts.recompute);
      counts.offload += more;
      counts.recompute -= more;
      take(counts);
    }
    refine(winner, plans);
  }

  void refine(Solved& winner, std::span<const Fitted> plans) {
    for (size_t begin = 0; begin < plans.size(); begin += kBatch) {
      const std::span<const Fitted> batch = plans.subspan(begin, std::min(kBatch, plans.size() - begin));
      const size_t before = winner.candidates.size();
      price(batch, winner);
      result_.considered += static_cast<int64_t>(batch.size());
      const auto as_fast = [&](const Candidate& candidate) { return std::get<0>(key(candidate)) <= kRankSteps; };
      if (std::none_of(winner.candidates.begin() + static_cast<ptrdiff_t>(before), winner.candidates.end(), as_fast)) {
        return;
      }
    }
  }

  // Prices the best plans once more, with all ranks, where one did not quite stand for the others: as many as the tasks
  // allow, and on until the best is among them.
  void make_exact() {
    int64_t tasks = 0;
    while (true) {
      std::vector<Solved*> order;
      for (Solved& solved : solved_) order.push_back(&solved);
      std::ranges::stable_sort(order, {}, [&](Solved* solved) { return key(best_of(*solved)); });
      order.resize(std::min(order.size(), static_cast<size_t>(options_.keep)));
      const auto rough =
          std::ranges::find_if(order, [&](Solved* solved) { return !solved->exact[best_index(*solved)]; });
      if (rough == order.end()) return;
      const size_t index = best_index(**rough);
      Candidate& candidate = (*rough)->candidates[index];
      tasks += estimate_tasks(problem_, candidate.plan);
      if (rough != order.begin() && tasks > kExactTasks) return;
      price_exactly(candidate);
      (*rough)->exact[index] = true;
      find_fastest();
    }
  }

  void price_exactly(Candidate& candidate) {
    const StepGraph graph = build_step_graph(problem_.model, problem_.train, candidate.plan);
    const auto [bound, simulated] = price_graph(graph, problem_.hardware, [](const Bound&) { return false; });
    const Simulation& simulation = *simulated;
    candidate.bound = bound.step;
    candidate.step = simulation.step;
    candidate.exposed = simulation.exposed;
    candidate.bottleneck = simulation.bottleneck;
    for (Trial& trial : trials_) {
      if (trial.outcome == Trial::Outcome::simulated && trial.plan == candidate.plan) {
        trial.seconds = simulation.step.seconds;
      }
    }
  }

  void find_fastest() {
    fastest_ = solved_.front().candidates.front().step;
    for (const Solved& solved : solved_) {
      for (const Candidate& candidate : solved.candidates) fastest_ = std::min(fastest_, candidate.step);
    }
  }

  const SearchProblem& problem_;
  bool two_stages_ = false;
  SearchOptions options_;
  Fitter fitter_;
  SearchResult result_;
  PredictedSeconds fastest_;     // of all simulated
  std::vector<Solved> solved_;   // by combination, none empty
  std::vector<int64_t> limits_;  // the fastest steps of the best combinations, ascending, as many as are kept
  std::vector<Trial> trials_;
};

}  // namespace

SearchResult search(const ModelSpec& model, const TrainSpec& train, const HardwareSpec& hardware,
                    const Budgets& budgets, const Pins& pins, const SearchOptions& options) {
  const SearchProblem problem(model, train, hardware, pins);
  const std::vector<Combination> all = combinations(problem);
  const auto choices = static_cast<int64_t>(activation_choices(problem).size());
  int64_t tasks = 0;
  for (const Combination& combination : all) {
    tasks += estimate_tasks(problem, combination) * choices;
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
  const std::vector<ActivationCounts> choices = activation_choices(problem);
  std::vector<Plan> plans;
  for (const Combination& combination : combinations(problem)) {
    for (const ActivationCounts counts : choices) {
      for (const int64_t head_chunk : head_chunks(problem, combination)) {
        plans.push_back(complete(problem, combination, counts, head_chunk));
      }
    }
  }
  return plans;
}

}  // namespace slidedp
