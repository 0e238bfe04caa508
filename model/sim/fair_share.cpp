#include "model/sim/fair_share.h"

#include <algorithm>
#include <cmath>

namespace slidedp {

double Resource::least_capacity() const {
  double kept = 1;
  for (const Loss& loss : losses) kept -= loss.share;
  return capacity * kept;
}

FairShare::FairShare(std::span<const Resource> resources) : states_(resources.size()) {
  for (const Resource& resource : resources) {
    for (const Loss& loss : resource.losses) {
      effects_.push_back(
          {static_cast<ResourceId>(full_.size()), loss.beside, loss.share * resource.capacity, loss.exponent});
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
    const double part = std::min(1.0, states_[by].rising / full_[by]);
    const double felt = part == 1 || effect.exponent == 1 ? part : std::pow(part, effect.exponent);
    capacities_[static_cast<size_t>(effect.on)] -= effect.most * felt;
  }
}

void FairShare::settle(std::span<const Load> loads, double speed) {
  for (const Load& load : loads) {
    State& state = states_[static_cast<size_t>(load.resource)];
    state.fixed += speed * load.rate;
    state.rising -= load.rate;
    --state.users;
  }
}

void FairShare::share(std::span<const std::span<const Load>> tasks, std::span<double> speeds) {
  for (int resource : touched_) states_[static_cast<size_t>(resource)] = State{};
  touched_.clear();
  rising_.clear();
  for (size_t i = 0; i < tasks.size(); ++i) {
    rising_.push_back(static_cast<int>(i));
    for (const Load& load : tasks[i]) {
      State& state = states_[static_cast<size_t>(load.resource)];
      if (state.users++ == 0) touched_.push_back(load.resource);
      state.rising += load.rate;
    }
  }
  reduce_capacities();
  double level = 0;
  while (!rising_.empty()) {
    double next = 1;
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
      if (full >= 0 && std::none_of(loads.begin(), loads.end(), [&](const Load& l) { return l.resource == full; })) {
        return false;
      }
      speeds[static_cast<size_t>(task)] = level;
      settle(loads, level);
      return true;
    };
    rising_.erase(std::remove_if(rising_.begin(), rising_.end(), stays), rising_.end());
  }
}

}  // namespace slidedp
