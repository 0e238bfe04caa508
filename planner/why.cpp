#include <algorithm>
#include <functional>
#include <string>
#include <vector>

#include "model/base/format.h"
#include "planner/report.h"
#include "planner/trial.h"

namespace slidedp {
namespace {

struct Choice {
  std::string field;              // as in the plan's YAML
  std::vector<std::string> pins;  // names under which it can be pinned
  std::function<std::string(const Plan&)> value;
};

std::vector<Choice> choices() {
  return {
      {"ranks", {"ranks"}, [](const Plan& p) { return fmt::format("{}", p.ranks); }},
      {"delivery", {"delivery"}, [](const Plan& p) { return std::string(name(p.delivery)); }},
      {"reduction", {"reduction"}, [](const Plan& p) { return std::string(name(p.reduction)); }},
      {"update", {"update"}, [](const Plan& p) { return std::string(name(p.update)); }},
      {"waves", {"waves", "wave"}, [](const Plan& p) { return fmt::format("{}", p.waves); }},
      {"micro_batch_rows",
       {"micro_batch_rows", "micro_batches"},
       [](const Plan& p) { return fmt::format("{}", p.micro_batch_rows); }},
      {"accumulator", {"accumulator"}, [](const Plan& p) { return std::string(name(p.accumulator)); }},
      {"chunk", {"chunk", "chunk_elements"}, [](const Plan& p) { return format_bytes(2 * p.chunk_elements); }},
      {"layer_slots", {"layer_slots"}, [](const Plan& p) { return fmt::format("{}", p.layer_slots); }},
      {"vocabulary_kept", {"vocabulary_kept"}, [](const Plan& p) { return fmt::format("{}", p.vocabulary_kept); }},
      {"threads.update", {"threads.update"}, [](const Plan& p) { return fmt::format("{}", p.threads.update); }},
  };
}

// The best of the trials with another value of the choice: the fastest, or the lowest bound if none was simulated, or
// the smallest if none fits. But for ranks itself, only trials with as many ranks as the winner: other fields' values
// depend on it.
const Trial* best_other(const Choice& choice, const Plan& winner, const std::vector<Trial>& trials) {
  const std::string chosen = choice.value(winner);
  const auto before = [](const Trial& a, const Trial& b) {
    if (a.outcome != b.outcome) return a.outcome > b.outcome;
    if (a.outcome == Trial::Outcome::over_memory) return a.device_bytes < b.device_bytes;
    return a.seconds < b.seconds;
  };
  const Trial* best = nullptr;
  for (const Trial& trial : trials) {
    if (choice.value(trial.plan) == chosen) continue;
    if (choice.field != "ranks" && trial.plan.ranks != winner.ranks) continue;
    if (best == nullptr || before(trial, *best)) best = &trial;
  }
  return best;
}

std::string over_budget(const Trial& trial, const Budgets& budgets) {
  if (trial.device_bytes > budgets.device_bytes) {
    return fmt::format("needs {} per GPU, over the {} there", format_bytes(trial.device_bytes),
                       format_bytes(budgets.device_bytes));
  }
  return fmt::format("needs {} of host memory, over the {} there", format_bytes(trial.host_bytes),
                     format_bytes(budgets.host_bytes));
}

std::string sentence(const Choice& choice, const std::string& chosen, const Trial& other, const Budgets& budgets,
                     const Candidate& winner) {
  const std::string head = fmt::format("{} {}: ", choice.field, chosen);
  const std::string value = choice.value(other.plan);
  switch (other.outcome) {
    case Trial::Outcome::over_memory:
      return head + fmt::format("the smallest plan tried with {} {}.", value, over_budget(other, budgets));
    case Trial::Outcome::pruned:
      return head + fmt::format("with {} a step cannot take less than {}, more than the best plans do.", value,
                                format_seconds(other.seconds));
    case Trial::Outcome::simulated:
      break;
  }
  const double gain = other.seconds / winner.step.seconds - 1;
  if (gain < 1e-6) {
    return head + fmt::format("{} is no slower; of steps within 0.1 % the plan with less memory is taken.", value);
  }
  if (gain < 1e-3) return head + fmt::format("hardly a difference, {} takes {:.2f} % longer.", value, 100 * gain);
  return head + fmt::format("{} a step against {} with {} ({:+.1f} %).", format_seconds(winner.step.seconds),
                            format_seconds(other.seconds), value, 100 * gain);
}

// The counts with one step less: a layer's input left on the device, or else a layer selective instead of recomputed,
// or else kept.
ActivationCounts one_less(ActivationCounts counts) {
  if (counts.offload > 0) return {counts.recompute + 1, counts.selective, counts.offload - 1};
  if (counts.recompute > 0) return {counts.recompute - 1, counts.selective + 1};
  return {0, counts.selective - 1};
}

// Why no more is saved.
std::string activation_sentence(const SearchProblem& problem, const Budgets& budgets, const Candidate& winner) {
  const ActivationCounts counts = activation_counts(winner.plan);
  const std::string chosen = activation_text(winner.plan);
  if (problem.pins.activation) return fmt::format("activation {}: pinned.", chosen);
  if (counts == ActivationCounts{}) {
    return fmt::format(
        "activation: every layer keeps what backward reads, since all of it fits; {} of {} per GPU are "
        "used.",
        format_bytes(winner.device_bytes), format_bytes(budgets.device_bytes));
  }
  Plan more = winner.plan;
  more.activation = activation_policies(problem, one_less(counts));
  const int64_t bytes = plan_memory(problem, more).device_bytes();
  if (bytes > budgets.device_bytes) {
    const char* least = counts.offload > 0 ? "no more is offloaded than must be" : "the least extra compute that fits";
    return fmt::format("activation {}: {}; {} would need {} per GPU, over the {} there.", chosen, least,
                       activation_text(more), format_bytes(bytes), format_bytes(budgets.device_bytes));
  }
  return fmt::format("activation {}: to save more would fit but hardly be faster, and need more memory.", chosen);
}

std::string rows_sentence(const SearchProblem& problem, const Plan& plan) {
  const double share = 100 * problem.train.touched_vocabulary_share;
  const std::string head = fmt::format("vocabulary_rows {}: ", name(plan.vocabulary_rows));
  if (problem.pins.vocabulary_rows) return head + "pinned.";
  if (plan.vocabulary_rows == VocabularyRows::touched) {
    return head + fmt::format(
                      "a step's tokens touch {:.3g} % of the rows (train.touched_vocabulary_share); the others "
                      "are updated before the step's end.",
                      share);
  }
  if (problem.model.hidden % kBlockElements != 0) {
    return head +
           fmt::format("a row of {} elements is not made of whole blocks of {}.", problem.model.hidden, kBlockElements);
  }
  return head +
         fmt::format("a step's tokens touch {:.3g} % of the rows (train.touched_vocabulary_share), too many.", share);
}

std::string bottleneck_sentence(const SearchProblem& problem, const Candidate& winner) {
  return fmt::format("The step takes {} ({}); the busiest resource is {}, and compute waits {} a step.",
                     format_seconds(winner.step.seconds), problem.hardware.measured ? "predicted" : "estimate",
                     winner.bottleneck, format_seconds(winner.exposed.seconds));
}

bool is_pinned(const Choice& choice, const Pins& pins) {
  return std::any_of(choice.pins.begin(), choice.pins.end(),
                     [&](const std::string& pin) { return pins.contains(pin); });
}

}  // namespace

std::vector<std::string> explain(const SearchProblem& problem, const Budgets& budgets, const Candidate& winner,
                                 const std::vector<Trial>& trials, const Pins& pins) {
  std::vector<std::string> why{bottleneck_sentence(problem, winner)};
  for (const Choice& choice : choices()) {
    const std::string chosen = choice.value(winner.plan);
    if (is_pinned(choice, pins)) {
      why.push_back(fmt::format("{} {}: pinned.", choice.field, chosen));
    } else if (const Trial* other = best_other(choice, winner.plan, trials)) {
      why.push_back(sentence(choice, chosen, *other, budgets, winner));
    }
  }
  why.push_back(rows_sentence(problem, winner.plan));
  why.push_back(activation_sentence(problem, budgets, winner));
  return why;
}

}  // namespace slidedp
