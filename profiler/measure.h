// The measurement harness: warm-up, repeats until the median is steady or the time is up, all raw values kept.
#pragma once

#include <atomic>
#include <functional>
#include <vector>

#include "model/calibration/measurement.h"

namespace slidedp {

struct HarnessSettings {
  int warm_up = 1;
  int min_repeats = 5;  // taken even when the time is up: a median of fewer says nothing
  int max_repeats = 25;
  double tolerance = kSteady;  // relative_error() below which a median is steady
  double time_limit_s = 1.0;   // per measurement
};

// Seconds of some steady clock.
using Clock = std::function<double()>;
double steady_seconds();

class Harness {
 public:
  // `stop`, if given, is looked at between repeats: once true, measuring throws Error with ExitCode::interrupted.
  explicit Harness(HarnessSettings settings, Clock clock = steady_seconds, const std::atomic<bool>* stop = nullptr);

  // `once` takes one value.
  Measurement measure(Measurement what, const std::function<double()>& once) const;
  // `once` takes one value of each of `what`, in order; steady when all are.
  std::vector<Measurement> measure(std::vector<Measurement> what,
                                   const std::function<std::vector<double>()>& once) const;
  const HarnessSettings& settings() const { return settings_; }
  void check_stop() const;

 private:
  HarnessSettings settings_;
  Clock clock_;
  const std::atomic<bool>* stop_;
};

}  // namespace slidedp
