#include "model/calibration/finding.h"

#include <cmath>

#include "model/base/format.h"

namespace slidedp {
namespace {

// relative_error() is 1.57 interquartile ranges over sqrt(n); a median's standard error is sqrt(pi / 2) standard
// deviations over sqrt(n), and a normal distribution's interquartile range is 1.349 standard deviations.
constexpr double kErrorOfNotch = 1.2533 / 1.349 / 1.57;

// The two fields of one fit, the more important one first.
std::vector<Finding> pair_of(Finding first, Finding second, const FitSummary& summary, double correlation) {
  first.fit = summary;
  first.note = summary.note;
  first.correlated_with = second.field;
  first.correlation = correlation;
  return {std::move(first), std::move(second)};
}

}  // namespace

Finding fact(const std::string& field, double value, const std::string& unit, double standard_error) {
  return {field, value, unit, standard_error, true};
}

Finding finding(const std::string& field, double value, const std::string& unit, double relative_spread) {
  return {field, value, unit, kErrorOfNotch * relative_spread * std::abs(value)};
}

std::vector<Finding> findings(const std::string& prefix, const LinkFit& fit) {
  return pair_of({prefix + ".gbps", fit.rate.gbps, "GB/s", fit.standard_error.gbps},
                 {prefix + ".latency_s", fit.rate.latency_s, "s", fit.standard_error.latency_s}, fit.summary,
                 fit.correlation);
}

std::vector<Finding> findings(const std::string& prefix, const KernelFit& fit) {
  return pair_of({prefix + ".peak_gflops", fit.rate.peak_gflops, "Gflop/s", fit.standard_error.peak_gflops},
                 {prefix + ".half_gflop", fit.rate.half_gflop, "Gflop", fit.standard_error.half_gflop}, fit.summary,
                 fit.correlation);
}

std::string value_text(const Finding& finding) {
  if (finding.unit == "s") return format_seconds(finding.value);
  if (finding.unit == "B") return format_bytes(std::llround(finding.value));
  return fmt::format("{:.4g}{}{}", finding.value, finding.unit.empty() ? "" : " ", finding.unit);
}

std::string spread_text(const Finding& finding) {
  std::string text;
  // A value near 0 has no relative error.
  if (finding.standard_error > 0) {
    text = finding.standard_error < std::abs(finding.value)
               ? fmt::format("se {:.1f} %", 100 * finding.standard_error / std::abs(finding.value))
               : fmt::format("se {:.2g}{}{}", finding.standard_error, finding.unit.empty() ? "" : " ", finding.unit);
  }
  if (finding.fit) {
    text += fmt::format("{}fit rms {:.1f} % of {} samples", text.empty() ? "" : ", ",
                        100 * finding.fit->residual_rms_log, finding.fit->samples);
  }
  return text;
}

}  // namespace slidedp
