// Fits of rate laws to measured samples: residuals in log time, bounded parameters, robust loss (Ceres).
#pragma once

#include <span>
#include <string>

#include "model/spec/hardware_spec.h"

namespace slidedp {

struct FitSample {
  double work = 0;     // bytes or flops, > 0
  double seconds = 0;  // > 0
};

struct FitSummary {
  std::string what;  // was fitted: "copy.h2d"
  int samples = 0;
  double residual_rms_log = 0;  // of all samples, outliers included; 0.05 means about 5 %
  // Robust standard deviation (from the median absolute deviation) that the standard errors are scaled by.
  double residual_sigma_log = 0;
  bool converged = false;
  // The samples do not determine both parameters (one size, sizes too alike, or noise that hides the rate): the fixed
  // cost was set to zero and only the rate was fitted.
  bool degenerate = false;
  // The law misses the sizes' own medians by more than the scatter of their repeats explains (lack-of-fit test at
  // 0.1 %), and by more than 1 % rms: the residuals have a structure that the law does not describe.
  bool structured = false;
  std::string note;  // one sentence; empty when there is nothing to say
};

struct LinkFit {
  LinkRate rate;
  LinkRate standard_error;
  double correlation = 0;  // of latency_s and gbps; 0 if degenerate
  FitSummary summary;
};

struct KernelFit {
  KernelRate rate;
  KernelRate standard_error;
  double correlation = 0;  // of peak_gflops and half_gflop; 0 if degenerate
  FitSummary summary;
};

// seconds = latency_s + bytes / (gbps * 1e9). Throws Error (naming `what`) for no samples or a sample that is not
// positive and finite. The result is deterministic and does not depend on the order of the samples.
LinkFit fit_link(std::span<const FitSample> samples, const std::string& what);

// seconds = (flops + half) / peak; see KernelRate.
KernelFit fit_kernel(std::span<const FitSample> samples, const std::string& what);

}  // namespace slidedp
