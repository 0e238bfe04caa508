#include "profiler/probe.h"

#include <algorithm>

namespace slidedp {

int64_t ProbeContext::rank_memory_bytes() const {
  if (device_memory_bytes > 0) return device_memory_bytes;
  if (!on_host()) return device_total_bytes;
  constexpr int64_t kGrain = int64_t{64} << 20;
  return std::max(memory_bytes / 2 / ranks / kGrain, int64_t{1}) * kGrain;
}

Harness ProbeContext::harness(int measurements, double times) const {
  HarnessSettings settings;
  settings.time_limit_s = times * probe_seconds / rounds / std::max(measurements, 1);
  if (quick || rounds > 1) settings.min_repeats = 3;
  return Harness(settings, steady_seconds, stop);
}

Harness ProbeContext::warm_harness(int measurements, double times) const {
  HarnessSettings settings = harness(measurements, times).settings();
  settings.warm_up = 0;
  return Harness(settings, steady_seconds, stop);
}

}  // namespace slidedp
