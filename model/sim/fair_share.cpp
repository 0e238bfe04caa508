#include "model/sim/fair_share.h"

#include <algorithm>

namespace slidedp {

double Resource::least_capacity() const {
  double kept = 1;
  for (const Loss& loss : losses) kept -= loss.share;
  return capacity * kept;
}

FairShare::FairShare(std::span<const Resource> resources) : states_(resources.size()) {
  for (const Resource& resource : resources) {
    for (const Loss& loss : resource.losses) {
      effects_.push_back({static_cast<ResourceId>(full_.size()), loss.beside, loss.share * resource.capacity});
    }
    full_.push_back(resource.capacity);
  }
  capacities_ = full_;
}

// By what all tasks want at full speed.
void FairShare::reduce_capacities() {
  for (const Effect& effect : effects_) {
    const auto on = static_cast<size_t>(effect.on);
    capacities_[on] = full_[on];
  }
  for (const Effect& effect : effects_) {
    const auto by = static_cast<size_t>(effect.by);
    if (states_[by].users == 0) continue;
    capacities_[static_cast<size_t>(effect.on)] -= effect.most * std::min(1.0, states_[by].wanted / full_[by]);
  }
}

void FairShare::settle(std::span<const Load> loads, double weight, double speed) {
  for (const Load& load : loads) {
    State& state = states_[static_cast<size_t>(load.resource)];
    state.fixed += speed * load.rate;
    state.rising -= weight * load.rate;
    --state.users;
  }
}

void FairShare::share(std::span<const std::span<const Load>> tasks, std::span<double> speeds,
                      std::span<const double> weights) {
  for (int resource : touched_) states_[static_cast<size_t>(resource)] = State{};
  touched_.clear();
  rising_.clear();
  const auto weight = [&](int task) { return weights.empty() ? 1.0 : weights[static_cast<size_t>(task)]; };
  for (size_t i = 0; i < tasks.size(); ++i) {
    rising_.push_back(static_cast<int>(i));
    for (const Load& load : tasks[i]) {
      State& state = states_[static_cast<size_t>(load.resource)];
      if (state.users++ == 0) touched_.push_back(load.resource);
      state.wanted += load.rate;
      state.rising += weight(static_cast<int>(i)) * load.rate;
    }
  }
  reduce_capacities();
  double level = 0;
  while (!rising_.empty()) {
    double heaviest = 0;
    for (int task : rising_) heaviest = std::max(heaviest, weight(task));
    double next = 1 / heaviest;  // where the first tasks reach full speed
    int full = -1;
    for (int resource : touched_) {
      const State& state = states_[static_cast<size_t>(resource)];
      if (state.users == 0) continue;
      const double reached = (capacities_[static_cast<size_t>(resource)] - state.fixed) / state.rising;
      if (reached < next) {
        next = reached;
        full = resource;
      }
    }
    level = std::max(level, next);  // levels never fall; guards against rounding when two resources fill together
    const auto stays = [&](int task) {
      const std::span<const Load> loads = tasks[static_cast<size_t>(task)];
      const bool stopped =
          full < 0 ? weight(task) == heaviest
                   : std::any_of(loads.begin(), loads.end(), [&](const Load& l) { return l.resource == full; });
      if (!stopped) return false;
      const double speed = full < 0 ? 1.0 : std::min(weight(task) * level, 1.0);
      speeds[static_cast<size_t>(task)] = speed;
      settle(loads, weight(task), speed);
      return true;
    };
    rising_.erase(std::remove_if(rising_.begin(), rising_.end(), stays), rising_.end());
  }
}

}  // namespace slidedp
