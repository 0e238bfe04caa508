// A value that went into the hardware profile.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "model/calibration/fit.h"

namespace slidedp {

struct Finding {
  std::string field;  // YAML path
  double value = 0;
  std::string unit;  // "GB/s", "s", "B"; empty for a number without one
  double standard_error =
      0;                  // in the value's unit, of these repeats alone until fit_profile() has looked at the rounds
  bool exact = false;     // read, not timed: no rounds, no noise
  std::string note = {};  // a warning in one sentence; mostly empty
  // Of the first field of a fit: how it went, and the correlation of its two fields.
  std::optional<FitSummary> fit = std::nullopt;
  std::string correlated_with = {};
  double correlation = 0;
};

// A value that is what it is: cores, bytes of memory.
Finding fact(const std::string& field, double value, const std::string& unit, double standard_error = 0);
// A value from a median; `relative_spread`: relative_error() of its repeats.
Finding finding(const std::string& field, double value, const std::string& unit, double relative_spread);
// Findings of a fitted link or kernel, fields PREFIX.latency_s and PREFIX.gbps or PREFIX.peak_gflops and .half_gflop.
std::vector<Finding> findings(const std::string& prefix, const LinkFit&);
std::vector<Finding> findings(const std::string& prefix, const KernelFit&);

// For people: "9.81 GB/s", and "se 0.8 %, fit rms 3.9 % of 46 samples".
std::string value_text(const Finding&);
std::string spread_text(const Finding&);

}  // namespace slidedp
