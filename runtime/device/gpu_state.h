// Clocks, power and temperature of the first visible GPU, from NVIDIA's management library where there is one.
#pragma once

#include <optional>

namespace slidedp {

struct GpuState {
  double sm_clock_mhz = 0, memory_clock_mhz = 0;
  double power_w = 0, power_limit_w = 0;
  double temperature_c = 0;
  double slowdown_reasons = 0;  // bits of nvmlClocksThrottleReasons: 4 = power cap, 32 and 64 = heat
};

// nullopt: no library, no GPU, or the library does not say.
std::optional<GpuState> gpu_state();

}  // namespace slidedp
