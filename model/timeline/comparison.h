// Prediction beside measurement, task kind by task kind, as text.
#pragma once

#include <span>
#include <string>

#include "model/timeline/timeline.h"

namespace slidedp {

// Steps of one graph. Refers to both.
struct StepSet {
  const StepGraph& graph;
  std::span<const Timeline> timelines;  // at least one
};

// A table with a row per task kind that occurs (kind, count, predicted and measured busy seconds, predicted and
// measured exposed seconds), a row of the sums and the step time; all values are means per step. Busy adds up over
// tasks and ranks, exposed is the mean over ranks (totals_by_kind). The count is the measured one.
std::string comparison_table(const StepSet& predicted, const StepSet& measured);

}  // namespace slidedp
