// How well a profile predicts what it was not fitted to, over all of a run's samples (leave_one_out.h).
#pragma once

#include <string>
#include <vector>

#include "model/calibration/leave_one_out.h"
#include "model/calibration/profile_record.h"

namespace slidedp {

struct PredictionErrors {
  ErrorSummary kernel;      // layer forward and backward, head: shapes left out
  ErrorSummary transfer;    // copies of one rank, sizes from 1 MiB up left out
  ErrorSummary concurrent;  // each rate of Adam beside copies, situations left out
};

PredictionErrors prediction_errors(const ProfileRun& run);

struct NamedError {
  std::string name;  // "unseen_kernel_median_error"
  double value = 0;  // 0.03: 3 %
};
// Those that there are samples for.
std::vector<NamedError> named_errors(const PredictionErrors& errors);
// One line for people; empty if there are none.
std::string errors_text(const PredictionErrors& errors);

}  // namespace slidedp
