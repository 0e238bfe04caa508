// Fit of how copies and the CPU's streams slow each other (HardwareSpec: contention, host.adam_elements_per_s).
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

// As the simulator shares one rank's links, the memory and (on the CPU backend) the cores.
TogetherRates predict_together(const HardwareSpec& hardware, const Together& running);
// The same without the caps of the CPU's streams and of host DRAM.
TogetherRates predict_uncapped(const HardwareSpec& hardware, const Together& running);

struct ContentionSample {
  Together running;
  TogetherRates measured;  // > 0 for what runs
};

struct ContentionLaw {
  ContentionSpec contention;
  double adam_elements_per_s = 0;  // of one thread that nothing slows
};

struct ContentionFit : ContentionLaw {
  // Of a value that no sample feels: larger than the value, or than 1.
  ContentionLaw standard_error;
  double residual_rms_log = 0;  // of all measured rates; 0.05 means about 5 %
};

// The law that fits all samples best, alone and together, residuals in log rate, over the link rates of `hardware`.
// What the samples say nothing about stays as if nothing contended; Adam's rate then is the hardware's. Caps do not
// count: they are the largest rates seen, which the samples themselves decide; host.dram_gbps is the unit of the law's
// values. Throws Error for no samples or a rate that is not positive.
ContentionFit fit_contention(std::span<const ContentionSample> samples, const HardwareSpec& hardware);

// `hardware` with the fitted law.
HardwareSpec with_contention(HardwareSpec hardware, const ContentionLaw& law);

}  // namespace slidedp
