// A value that went into the hardware profile.
#pragma once

#include <string>
#include <vector>

#include "model/calibration/fit.h"

namespace slidedp {

struct Finding {
  std::string field;  // YAML path
  double value = 0;
  std::string text;    // for people: "9.81 GB/s"
  std::string spread;  // for people: "se 0.8 %", "+- 1.2 %"
  std::string note;    // a warning in one sentence; mostly empty
};

Finding finding(const std::string& field, double value, const std::string& unit, double relative_spread);
// Findings of a fitted link or kernel, fields PREFIX.latency_s and PREFIX.gbps or PREFIX.peak_gflops and .half_gflop.
std::vector<Finding> findings(const std::string& prefix, const LinkFit&);
std::vector<Finding> findings(const std::string& prefix, const KernelFit&);

}  // namespace slidedp
