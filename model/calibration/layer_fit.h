// Fit of a decoder layer's law (LayerRate) to times at many shapes, also of several models.
#pragma once

#include <span>
#include <string>

#include "model/calibration/fit.h"
#include "model/cost/layer_work.h"

namespace slidedp {

struct LayerSample {
  LayerWork work;
  double seconds = 0;  // > 0
  double weight = 1;   // in the fit, as so many samples
};

struct LayerFit {
  LayerRate rate;
  LayerRate standard_error;  // of a rate of 0: 0
  double correlation = 0;    // of peak_gflops and half_gflop; 0 if degenerate
  // Where the samples do not tell attention or the other kernels' bytes from the products (fewer than eight shapes, or
  // a relative error above one half), its rate is 0; without both it is fit_kernel()'s.
  FitSummary summary;
  KernelFit products() const { return {rate.products, standard_error.products, correlation, summary}; }
};

// Residuals in log time, robust. Throws Error (naming `what`) for no samples or one that cannot be.
LayerFit fit_layer(std::span<const LayerSample> samples, const std::string& what);

}  // namespace slidedp
