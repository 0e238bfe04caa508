// How well the laws predict what they were not fitted to: each shape, size or situation in turn is left out of the fit,
// predicted, and compared with the median of what was measured there.
#pragma once

#include <span>
#include <vector>

#include "model/calibration/contention_fit.h"
#include "model/calibration/fit.h"
#include "model/calibration/layer_fit.h"

namespace slidedp {

// Each |predicted / measured - 1|. Where there is nothing to fit without (fewer than three different works), none.
std::vector<double> unseen_layer_errors(std::span<const LayerSample> samples);
std::vector<double> unseen_kernel_errors(std::span<const FitSample> samples);
// Sizes from `least_bytes` up are left out and predicted; the others are only fitted.
std::vector<double> unseen_transfer_errors(std::span<const FitSample> samples, double least_bytes);
// Of every rate of every sample of Adam beside copies.
std::vector<double> unseen_concurrent_errors(std::span<const ContentionSample> samples, const HardwareSpec& hardware);

struct ErrorSummary {
  int count = 0;
  double median = 0, p95 = 0;  // p95: the smallest error that at most a twentieth of them exceed
};
ErrorSummary summarize(std::vector<double> errors);

}  // namespace slidedp
