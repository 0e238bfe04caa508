#include "model/calibration/drift.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "model/base/format.h"

namespace slidedp {
namespace {

constexpr double kLeast = 0.02;

std::vector<double> of_round(const Measurement& m, int round) {
  std::vector<double> values;
  for (size_t i = 0; i < m.repeats.size(); ++i) {
    if (m.round_of(i) == round) values.push_back(m.repeats[i]);
  }
  return values;
}

}  // namespace

Drift drift_of(std::span<const Measurement> measured) {
  std::vector<double> logs, errors;
  for (const Measurement& m : measured) {
    if (m.unit != "s" && m.unit != "GB/s") continue;
    const int last = m.rounds.empty() ? 0 : *std::max_element(m.rounds.begin(), m.rounds.end());
    const std::vector<double> before = of_round(m, 0), after = of_round(m, last);
    if (last == 0 || before.empty() || after.empty()) continue;
    const double ratio = median(after) / median(before);
    if (!(ratio > 0)) continue;
    logs.push_back(m.unit == "s" ? std::log(ratio) : -std::log(ratio));
    errors.push_back(std::hypot(relative_error(before), relative_error(after)));
  }
  if (logs.empty()) return {};
  // Measurements of one probe drift together but scatter apart: their own spread counts as well as their repeats'.
  const double middle = median(logs);
  std::vector<double> deviations;
  for (const double log : logs) deviations.push_back(log - middle);
  Drift drift;
  drift.ratio = std::exp(middle);
  drift.error = std::max(median(errors), 2 * robust_sigma(deviations)) / std::sqrt(static_cast<double>(logs.size()));
  drift.seen = std::abs(middle) > std::max(drift.error, kLeast);
  return drift;
}

std::string drift_note(const std::string& probe, const Drift& drift) {
  if (!drift.seen) return "";
  return fmt::format(
      "{}: the last round took {:.0f} % {} than the first (noise {:.0f} %): the machine warmed up, slowed "
      "down, or was not idle",
      probe, 100 * std::abs(drift.ratio - 1), drift.ratio > 1 ? "longer" : "less", 100 * drift.error);
}

}  // namespace slidedp
