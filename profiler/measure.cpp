#include "profiler/measure.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <stdexcept>

#include "model/base/error.h"

namespace slidedp {

double steady_seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

Harness::Harness(HarnessSettings settings, Clock clock, const std::atomic<bool>* stop)
    : settings_(settings), clock_(std::move(clock)), stop_(stop) {}

void Harness::check_stop() const {
  if (stop_ != nullptr && stop_->load()) {
    throw Error("Interrupted: nothing was written.", ExitCode::interrupted);
  }
}

Measurement Harness::measure(Measurement what, const std::function<double()>& once) const {
  std::vector<Measurement> one;
  one.push_back(std::move(what));
  return measure(std::move(one), [&once] { return std::vector<double>{once()}; }).front();
}

std::vector<Measurement> Harness::measure(std::vector<Measurement> what,
                                          const std::function<std::vector<double>()>& once) const {
  const double end = clock_() + settings_.time_limit_s;
  for (int i = 0; i < settings_.warm_up; ++i) {
    check_stop();
    once();
  }
  const auto steady = [this](const Measurement& m) { return relative_error(m.repeats) < settings_.tolerance; };
  for (int taken = 0; taken < settings_.max_repeats;) {
    check_stop();
    const std::vector<double> values = once();
    if (values.size() != what.size()) throw std::logic_error("a repeat gave another number of values than announced");
    for (size_t i = 0; i < values.size(); ++i) what[i].repeats.push_back(values[i]);
    if (++taken < settings_.min_repeats) continue;
    if (std::all_of(what.begin(), what.end(), steady) || clock_() >= end) break;
  }
  for (Measurement& measurement : what) measurement.steady = steady(measurement);
  return what;
}

}  // namespace slidedp
