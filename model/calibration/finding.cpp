#include "model/calibration/finding.h"

#include <cmath>

#include "model/base/format.h"

namespace slidedp {
namespace {

std::string value_text(double value, const std::string& unit) {
  if (unit == "s") return format_seconds(value);
  if (unit == "B") return format_bytes(std::llround(value));
  return fmt::format("{:.4g}{}{}", value, unit.empty() ? "" : " ", unit);
}

std::string fit_text(double value, double standard_error) {
  return value > 0 ? fmt::format("se {:.1f} %", 100 * standard_error / value) : "at its bound";
}

std::string residual_text(const FitSummary& summary) {
  return fmt::format(", fit rms {:.1f} % of {} samples", 100 * summary.residual_rms_log, summary.samples);
}

}  // namespace

Finding finding(const std::string& field, double value, const std::string& unit, double relative_spread) {
  std::string spread = relative_spread > 0 ? fmt::format("+- {:.1f} %", 100 * relative_spread) : "";
  return {field, value, value_text(value, unit), spread, ""};
}

std::vector<Finding> findings(const std::string& prefix, const LinkFit& fit) {
  const std::string residual = residual_text(fit.summary);
  return {{prefix + ".gbps", fit.rate.gbps, value_text(fit.rate.gbps, "GB/s"),
           fit_text(fit.rate.gbps, fit.standard_error.gbps) + residual, fit.summary.note},
          {prefix + ".latency_s", fit.rate.latency_s, value_text(fit.rate.latency_s, "s"),
           fit_text(fit.rate.latency_s, fit.standard_error.latency_s), ""}};
}

std::vector<Finding> findings(const std::string& prefix, const KernelFit& fit) {
  const std::string residual = residual_text(fit.summary);
  return {{prefix + ".peak_gflops", fit.rate.peak_gflops, value_text(fit.rate.peak_gflops, "Gflop/s"),
           fit_text(fit.rate.peak_gflops, fit.standard_error.peak_gflops) + residual, fit.summary.note},
          {prefix + ".half_gflop", fit.rate.half_gflop, value_text(fit.rate.half_gflop, "Gflop"),
           fit_text(fit.rate.half_gflop, fit.standard_error.half_gflop), ""}};
}

}  // namespace slidedp
