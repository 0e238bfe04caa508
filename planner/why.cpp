#include <algorithm>
#include <functional>
#include <string>
#include <vector>

#include "model/base/format.h"
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
    return head + fmt::format("{} takes as long; of equals the plan with less memory is taken.", value);
  }
  if (gain < 1e-3) return head + fmt::format("hardly a difference, {} takes {:.2f} % longer.", value, 100 * gain);
  return head + fmt::format("{} a step against {} with {} ({:+.1f} %).", format_seconds(winner.step.seconds),
                            format_seconds(other.seconds), value, 100 * gain);
}

int64_t recomputing(const Plan& plan) {
  return std::count(plan.activation.begin(), plan.activation.end(), ActivationPolicy::recompute);
}

// Why no fewer layers recompute.
std::string activation_sentence(const SearchProblem& problem, const Budgets& budgets, const Candidate& winner) {
  const int64_t recompute = recomputing(winner.plan);
  const auto layers = static_cast<int64_t>(winner.plan.activation.size());
  if (problem.pins.activation) return fmt::format("activation: {} of {} layers recompute; pinned.", recompute, layers);
  if (recompute == 0) {
    return fmt::format(
        "activation: every layer keeps what backward reads, since all of it fits; {} of {} per GPU are "
        "used.",
        format_bytes(winner.device_bytes), format_bytes(budgets.device_bytes));
  }
  Plan fewer = winner.plan;
  fewer.activation = activation_policies(problem, static_cast<int>(recompute - 1));
  const int64_t bytes = plan_memory(problem, fewer).device_bytes();
  if (bytes > budgets.device_bytes) {
    return fmt::format(
        "activation: {} of {} layers recompute, the fewest that fit; {} would need {} per GPU, over the "
        "{} there.",
        recompute, layers, recompute - 1, format_bytes(bytes), format_bytes(budgets.device_bytes));
  }
  return fmt::format(
      "activation: {} of {} layers recompute; fewer would fit but not be faster, since computing is not "
      "what takes longest.",
      recompute, layers);
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
    } else if (choice.field == "update" && problem.train.max_grad_norm > 0) {
      why.push_back(fmt::format("update {}: clipping at max_grad_norm {} needs the norm of all gradients first.",
                                chosen, problem.train.max_grad_norm));
    } else if (const Trial* other = best_other(choice, winner.plan, trials)) {
      why.push_back(sentence(choice, chosen, *other, budgets, winner));
    }
  }
  why.push_back(activation_sentence(problem, budgets, winner));
  return why;
}

}  // namespace slidedp
