// Fit of how copies and the CPU's streams share the memory controller (HardwareSpec: host.cpu_stream_gbps, dram_gbps,
// h2d_cost, d2h_cost, h2d_weight, d2h_weight).
#pragma once

#include <span>

#include "model/spec/hardware_spec.h"

namespace slidedp {

// What runs at once on one rank: large copies without a pause in up to two directions, and Adam with one bf16 gradient
// source on so many threads.
struct Together {
  bool h2d = false, d2h = false;
  int adam_threads = 0;
};

// 1e9 bytes/s of each; 0 for what does not run. Adam: of host memory, read and written.
struct TogetherRates {
  double h2d_gbps = 0, d2h_gbps = 0, adam_gbps = 0;
  double sum() const { return h2d_gbps + d2h_gbps + adam_gbps; }
};

// Bytes of host memory that an update of one element reads and writes: hi, lo, m and v both ways, one bf16 gradient.
inline constexpr double kAdamBytes = 2 * 12 + 2;

// As the simulator shares one rank's links, the memory controller, the CPU's streams and (on the CPU backend) the
// cores.
TogetherRates predict_together(const HardwareSpec& hardware, const Together& running);

struct ContentionSample {
  Together running;
  TogetherRates measured;  // > 0 for what runs
};

// The fields of HostSpec that contention decides, by their names there.
struct ContentionLaw {
  double cpu_stream_gbps = 0, dram_gbps = 0;
  double adam_elements_per_s = 0;  // of one of several threads
  double h2d_cost = 1, d2h_cost = 1;
  double h2d_weight = 1, d2h_weight = 1;
};

struct ContentionFit : ContentionLaw {
  // Of a value that no sample feels: larger than the value.
  ContentionLaw standard_error;
  double residual_rms_log = 0;  // of all measured rates; 0.05 means about 5 %
  // Whether the caps and Adam's rate were fitted: there are samples of Adam alone. Otherwise they are the hardware's.
  bool caps = false;
};

// The law that fits all samples best, alone and together, residuals in log rate, over the link rates of `hardware`
// (without losses). A cost or weight that the samples say nothing about is 1. Throws Error for no samples or a rate
// that is not positive.
ContentionFit fit_contention(std::span<const ContentionSample> samples, const HardwareSpec& hardware);

// `hardware` with the fitted law, which takes the place of its losses.
HardwareSpec with_contention(HardwareSpec hardware, const ContentionLaw& law);

}  // namespace slidedp
