// Whether a machine became slower or faster while it was measured: the first round beside the last.
#pragma once

#include <span>
#include <string>

#include "model/calibration/measurement.h"

namespace slidedp {

struct Drift {
  double ratio = 1;  // of the last round's medians to the first's, the median over all measurements
  // Half-width of that ratio's error bar; a ratio within it of 1 is noise.
  double error = 0;
  bool seen = false;  // beyond noise and 2 %
};

// Of one probe's measurements. Nothing is seen with one round or in values that are not times or rates.
Drift drift_of(std::span<const Measurement> measured);
// One sentence, empty if nothing was seen.
std::string drift_note(const std::string& probe, const Drift& drift);

}  // namespace slidedp
