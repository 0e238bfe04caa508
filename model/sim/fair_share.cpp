#include "model/sim/fair_share.h"

#include <algorithm>

namespace slidedp {

FairShare::FairShare(std::span<const Resource> resources)
    : resources_(resources.begin(), resources.end()), states_(resources.size()) {}

void FairShare::contend() {
  const auto own = [this](int resource) {
    const auto id = static_cast<size_t>(resource);
    return 1 + resources_[id].contention.per_unit_of_own * states_[id].wanted;
  };
  const auto alone = [&](int resource) {
    const auto id = static_cast<size_t>(resource);
    return std::min(resources_[id].capacity, states_[id].wanted / own(resource));
  };
  for (int resource : touched_) {
    const Contention& contention = resources_[static_cast<size_t>(resource)].contention;
    if (!contention.any()) continue;
    double left = contention.headroom;
    for (const Beside& beside : contention.beside) {
      left /= 1 + beside.per_unit * alone(beside.other);
    }
    State& state = states_[static_cast<size_t>(resource)];
    state.left = std::min(left, 1.0);
    state.limit = std::min(left / own(resource), 1.0);
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
  limit_.assign(tasks.size(), 1);
  for (size_t i = 0; i < tasks.size(); ++i) {
    rising_.push_back(static_cast<int>(i));
    for (const Load& load : tasks[i]) {
      State& state = states_[static_cast<size_t>(load.resource)];
      if (state.users++ == 0) touched_.push_back(load.resource);
      state.wanted += load.rate;
      state.rising += load.rate;
    }
  }
  contend();
  for (size_t i = 0; i < tasks.size(); ++i) {
    for (const Load& load : tasks[i]) {
      limit_[i] = std::min(limit_[i], states_[static_cast<size_t>(load.resource)].limit);
    }
  }
  double level = 0;
  while (!rising_.empty()) {
    double next = 1;
    for (int task : rising_) next = std::min(next, limit_[static_cast<size_t>(task)]);
    int full = -1;
    for (int id : touched_) {
      const State& state = states_[static_cast<size_t>(id)];
      if (state.users == 0) continue;
      const double capacity = resources_[static_cast<size_t>(id)].capacity * state.left;
      const double reached = (capacity - state.fixed) / state.rising;
      if (reached < next) {
        next = reached;
        full = id;
      }
    }
    level = std::max(level, next);  // levels never fall; guards against rounding when two resources fill together
    const auto stays = [&](int task) {
      const std::span<const Load> loads = tasks[static_cast<size_t>(task)];
      const bool stopped =
          full < 0 ? limit_[static_cast<size_t>(task)] <= level
                   : std::any_of(loads.begin(), loads.end(), [&](const Load& l) { return l.resource == full; });
      if (!stopped) return false;
      const double speed = std::min(level, limit_[static_cast<size_t>(task)]);
      speeds[static_cast<size_t>(task)] = speed;
      settle(loads, speed);
      return true;
    };
    rising_.erase(std::remove_if(rising_.begin(), rising_.end(), stays), rising_.end());
  }
}

}  // namespace slidedp
