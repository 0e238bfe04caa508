#include "tests/support/plan_matrix.h"

#include <algorithm>
#include <numeric>
#include <set>
#include <type_traits>

#include "model/base/error.h"

namespace slidedp::testing {
namespace {

std::string text_of(int64_t value) { return std::to_string(value); }
std::string text_of(const std::vector<ActivationPolicy>& pattern) {
  std::string text;
  for (const ActivationPolicy policy : pattern) text.append(text.empty() ? "" : "/").append(name(policy));
  return text;
}
template <typename Enum>
requires std::is_enum_v<Enum> std::string text_of(Enum value) { return std::string(name(value)); }

}  // namespace

PlanMatrix::PlanMatrix(MatrixBase base, size_t plans) : base_(std::move(base)) {
  make_dimensions();
  enumerate_cores();
  note_legal_pairs();
  constexpr int kCandidates = 20;
  for (size_t a = 0; a < numbers_; ++a) {
    for (size_t b = a + 1; b < numbers_; ++b) {
      if (pair(a, b) != Pair::missing) continue;
      std::vector<int> best;
      for (int i = 0; i < kCandidates; ++i) {
        std::vector<int> values = candidate({a, b});
        if (best.empty() || gain(values) > gain(best)) best = std::move(values);
      }
      cover(best);
      plans_.push_back(make(best));
    }
  }
  covering_ = plans_.size();
  for (size_t turn = 0; plans_.size() < plans; ++turn) add_random(plans_[turn % covering_].values);
}

template <typename T, typename Set>
void PlanMatrix::add(const char* name, bool constrained, bool rounding, const std::vector<T>& values, Set set) {
  Dimension dimension{name, constrained, rounding, {}};
  for (const T& value : values) {
    dimension.values.push_back({text_of(value), [set, value](MatrixPlan& to) { set(to, value); }});
  }
  first_.push_back(numbers_);
  numbers_ += dimension.values.size();
  dimensions_.push_back(std::move(dimension));
}

void PlanMatrix::make_dimensions() {
  using enum ActivationPolicy;
  using Patterns = std::vector<std::vector<ActivationPolicy>>;
  using Numbers = std::vector<int64_t>;
  const auto number = [this](const char* name, bool constrained, bool rounding, const Numbers& values,
                             int Plan::*field) {
    add(name, constrained, rounding, values,
        [field](MatrixPlan& to, int64_t value) { to.plan.*field = static_cast<int>(value); });
  };
  add("tied", true, true, Numbers{0, 1}, [this](MatrixPlan& to, int64_t value) {
    to.tied = value != 0;
    to.plan.model = (to.tied ? base_.tied : base_.untied).fingerprint();
  });
  number("ranks", true, true, {1, 2, 4, 8}, &Plan::ranks);
  number("waves", true, true, {1, 2, 4}, &Plan::waves);
  number("micro-batches", true, true, {1, 2, 4}, &Plan::micro_batches);
  add("delivery", true, false, std::vector{Delivery::replicated, Delivery::sharded, Delivery::broadcast},
      [](MatrixPlan& to, Delivery value) { to.plan.delivery = value; });
  add("reduction", true, true, std::vector{Reduction::cpu, Reduction::gpu},
      [](MatrixPlan& to, Reduction value) { to.plan.reduction = value; });
  add("update", true, false, std::vector{UpdatePolicy::eager, UpdatePolicy::deferred, UpdatePolicy::split},
      [](MatrixPlan& to, UpdatePolicy value) { to.plan.update = value; });
  add("clip", true, true, Numbers{0, 1},
      [](MatrixPlan& to, int64_t value) { to.train.max_grad_norm = value != 0 ? kClip : 0.0; });
  add("accumulator", true, true, std::vector{DType::fp32, DType::bf16},
      [](MatrixPlan& to, DType value) { to.plan.accumulator = value; });
  add("vocabulary kept", true, false, Numbers{0, 1},
      [](MatrixPlan& to, int64_t value) { to.plan.vocabulary_kept = value != 0; });
  add("vocabulary rows", false, false, std::vector{VocabularyRows::all, VocabularyRows::touched},
      [](MatrixPlan& to, VocabularyRows value) { to.plan.vocabulary_rows = value; });
  number("landing slots", true, false, {0, 1, 3}, &Plan::landing_slots);
  add("wire", false, true, std::vector{DType::fp32, DType::bf16},
      [](MatrixPlan& to, DType value) { to.plan.wire = value; });
  add("head chunk", false, true, Numbers{5, 16},
      [](MatrixPlan& to, int64_t value) { to.plan.head_chunk_tokens = value; });
  // Many chunks a unit, a few with a short tail, one.
  add("chunk", false, false, Numbers{300, 1000, 4096, 1 << 24},
      [](MatrixPlan& to, int64_t value) { to.plan.chunk_elements = value; });
  add("activation", false, false,
      Patterns{{keep, keep, keep, keep},
               {selective, selective, selective, selective},
               {recompute, recompute, recompute, recompute},
               {recompute, keep, recompute, keep},
               {selective, selective, keep, keep},
               {recompute, selective, keep, selective},
               {offload, offload, offload, offload},
               {offload, keep, offload, selective},
               {recompute, offload, offload, keep}},
      [](MatrixPlan& to, const std::vector<ActivationPolicy>& value) { to.plan.activation = value; });
  number("layer slots", false, false, {1, 2, 3, 4}, &Plan::layer_slots);
  number("gradient slots", false, false, {1, 2, 4}, &Plan::gradient_slots);
  number("vocabulary slots", false, false, {1, 2}, &Plan::vocabulary_slots);
  number("wire slots", false, false, {1, 2, 3}, &Plan::wire_slots);
  add("update threads", false, false, Numbers{1, 3},
      [](MatrixPlan& to, int64_t value) { to.plan.threads.update = static_cast<int>(value); });
  add("compute threads", false, false, Numbers{1, 2},
      [](MatrixPlan& to, int64_t value) { to.plan.threads.compute_per_rank = static_cast<int>(value); });
}

MatrixPlan PlanMatrix::make(const std::vector<int>& values) const {
  MatrixPlan made{false, base_.plan, base_.train, values};
  for (size_t d = 0; d < dimensions_.size(); ++d) {
    dimensions_[d].values[static_cast<size_t>(std::max(values[d], 0))].set(made);
  }
  Plan& plan = made.plan;
  // Zero, which is illegal, where the rows do not suffice.
  plan.micro_batch_rows = base_.train.batch_rows / plan.ranks / plan.waves / plan.micro_batches;
  return made;
}

bool PlanMatrix::legal(const MatrixPlan& plan) const {
  try {
    validate_plan(plan.plan, plan.tied ? base_.tied : base_.untied, plan.train);
    return true;
  } catch (const Error&) {
    return false;
  }
}

// All values of the constrained dimensions that validate_plan accepts together.
void PlanMatrix::enumerate_cores() {
  std::vector<int> values(dimensions_.size(), -1);
  const std::function<void(size_t)> enumerate = [&](size_t dimension) {
    if (dimension == dimensions_.size()) {
      if (legal(make(values))) cores_.push_back(values);
      return;
    }
    if (!dimensions_[dimension].constrained) return enumerate(dimension + 1);
    for (size_t value = 0; value < dimensions_[dimension].values.size(); ++value) {
      values[dimension] = static_cast<int>(value);
      enumerate(dimension + 1);
    }
    values[dimension] = -1;
  };
  enumerate(0);
}

// A pair is legal if a legal plan has it. Values of unconstrained dimensions go with everything.
void PlanMatrix::note_legal_pairs() {
  pairs_.assign(numbers_ * numbers_, Pair::illegal);
  for (const std::vector<int>& core : cores_) {
    std::vector<size_t> present;
    for (size_t d = 0; d < dimensions_.size(); ++d) {
      if (core[d] >= 0) present.push_back(number(d, core[d]));
    }
    for (size_t i = 0; i < present.size(); ++i) {
      for (size_t j = i + 1; j < present.size(); ++j) pair(present[i], present[j]) = Pair::missing;
    }
  }
  for (size_t a = 0; a < numbers_; ++a) {
    for (size_t b = a + 1; b < numbers_; ++b) {
      const Dimension &left = dimensions_[value_of(a).first], &right = dimensions_[value_of(b).first];
      if (&left != &right && !(left.constrained && right.constrained)) pair(a, b) = Pair::missing;
    }
  }
}

std::pair<size_t, int> PlanMatrix::value_of(size_t number) const {
  const auto dimension =
      static_cast<size_t>(std::upper_bound(first_.begin(), first_.end(), number) - first_.begin()) - 1;
  return {dimension, static_cast<int>(number - first_[dimension])};
}

void PlanMatrix::cover(const std::vector<int>& values) {
  for (size_t i = 0; i < values.size(); ++i) {
    for (size_t j = i + 1; j < values.size(); ++j) pair(number(i, values[i]), number(j, values[j])) = Pair::covered;
  }
}

// Pairs among the values that are set which no plan has yet.
int PlanMatrix::gain(const std::vector<int>& values) const {
  int missing = 0;
  for (size_t i = 0; i < values.size(); ++i) {
    for (size_t j = i + 1; j < values.size(); ++j) {
      if (values[i] < 0 || values[j] < 0) continue;
      missing += pair(number(i, values[i]), number(j, values[j])) == Pair::missing;
    }
  }
  return missing;
}

// A legal plan with this pair: a random core, then dimension after dimension, in random order, the value that covers
// most.
std::vector<int> PlanMatrix::candidate(std::pair<size_t, size_t> wanted) {
  std::vector<int> values;
  const auto has = [&](const std::vector<int>& core, size_t number) {
    const auto [dimension, value] = value_of(number);
    return core[dimension] < 0 || core[dimension] == value;
  };
  do {
    values = cores_[pick(cores_.size())];
  } while (!has(values, wanted.first) || !has(values, wanted.second));
  for (const size_t number : {wanted.first, wanted.second}) {
    const auto [dimension, value] = value_of(number);
    values[dimension] = value;
  }
  std::vector<size_t> order(dimensions_.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::shuffle(order.begin(), order.end(), random_);
  for (const size_t d : order) {
    if (values[d] >= 0) continue;
    const size_t count = dimensions_[d].values.size(), start = pick(count);
    std::pair<int, int> best{-1, 0};  // gain, value
    for (size_t i = 0; i < count; ++i) {
      values[d] = static_cast<int>((start + i) % count);
      best = std::max(best, {gain(values), values[d]}, [](const auto& a, const auto& b) { return a.first < b.first; });
    }
    values[d] = best.second;
  }
  return values;
}

// A random plan that shares what decides the sums with `group`; false if the matrix has it already.
bool PlanMatrix::add_random(const std::vector<int>& group) {
  const auto fits = [&](const std::vector<int>& core) {
    for (size_t d = 0; d < core.size(); ++d) {
      if (dimensions_[d].rounding && core[d] >= 0 && core[d] != group[d]) return false;
    }
    return true;
  };
  std::vector<int> values;
  do {
    values = cores_[pick(cores_.size())];
  } while (!fits(values));
  for (size_t d = 0; d < values.size(); ++d) {
    if (values[d] >= 0) continue;
    values[d] = dimensions_[d].rounding ? group[d] : static_cast<int>(pick(dimensions_[d].values.size()));
  }
  const bool known =
      std::any_of(plans_.begin(), plans_.end(), [&](const MatrixPlan& plan) { return plan.values == values; });
  if (!known) plans_.push_back(make(values));
  return !known;
}

size_t PlanMatrix::legal_pairs() const {
  return static_cast<size_t>(
      std::count_if(pairs_.begin(), pairs_.end(), [](Pair pair) { return pair != Pair::illegal; }));
}

// Looks at the plans themselves, not at what the search noted.
std::vector<std::string> PlanMatrix::missing_pairs() const {
  std::set<std::pair<size_t, size_t>> present;
  for (const MatrixPlan& plan : plans_) {
    for (size_t i = 0; i < plan.values.size(); ++i) {
      for (size_t j = i + 1; j < plan.values.size(); ++j) {
        present.insert({number(i, plan.values[i]), number(j, plan.values[j])});
      }
    }
  }
  std::vector<std::string> missing;
  for (size_t a = 0; a < numbers_; ++a) {
    for (size_t b = a + 1; b < numbers_; ++b) {
      if (pair(a, b) != Pair::illegal && !present.contains({a, b})) missing.push_back(text(a) + ", " + text(b));
    }
  }
  return missing;
}

std::vector<std::string> PlanMatrix::illegal_pairs() const {
  std::vector<std::string> illegal;
  for (size_t a = 0; a < numbers_; ++a) {
    for (size_t b = a + 1; b < numbers_; ++b) {
      if (value_of(a).first == value_of(b).first || pair(a, b) != Pair::illegal) continue;
      illegal.push_back(text(a) + ", " + text(b));
    }
  }
  return illegal;
}

std::string PlanMatrix::text(size_t number) const {
  const auto [dimension, value] = value_of(number);
  return dimensions_[dimension].name + " " + dimensions_[dimension].values[static_cast<size_t>(value)].name;
}

std::string PlanMatrix::describe(const MatrixPlan& plan) const {
  std::string all;
  for (size_t d = 0; d < plan.values.size(); ++d) {
    all.append(d == 0 ? "" : ", ").append(text(number(d, plan.values[d])));
  }
  return all;
}

std::string PlanMatrix::group(const MatrixPlan& plan) const {
  std::string shared;
  for (size_t d = 0; d < plan.values.size(); ++d) {
    if (!dimensions_[d].rounding) continue;
    shared.append(shared.empty() ? "" : ", ").append(text(number(d, plan.values[d])));
  }
  return shared;
}

}  // namespace slidedp::testing
