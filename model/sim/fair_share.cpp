#include "model/sim/fair_share.h"

#include <algorithm>
#include <utility>

namespace slidedp {

FairShare::FairShare(std::vector<double> capacities)
    : capacities_(std::move(capacities)), states_(capacities_.size()) {}

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
