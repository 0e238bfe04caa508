#include "profiler/probe.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>

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

int64_t ProbeContext::rank_memory_bytes() const {
  if (device_memory_bytes > 0) return device_memory_bytes;
  if (!on_host()) return device_total_bytes;
  constexpr int64_t kGrain = int64_t{64} << 20;
  return std::max(memory_bytes / 2 / ranks / kGrain, int64_t{1}) * kGrain;
}

Harness ProbeContext::harness(int measurements) const {
  HarnessSettings settings;
  settings.time_limit_s = probe_seconds / std::max(measurements, 1);
  if (quick) settings.min_repeats = 3;
  return Harness(settings, steady_seconds, stop);
}

std::vector<const Measurement*> select(std::span<const Measurement> all, const std::string& value_name) {
  std::vector<const Measurement*> chosen;
  for (const Measurement& measurement : all) {
    if (measurement.value_name == value_name) chosen.push_back(&measurement);
  }
  return chosen;
}

const Measurement& find(std::span<const Measurement> all, const std::string& value_name,
                        const std::map<std::string, double>& parameters) {
  for (const Measurement* measurement : select(all, value_name)) {
    const bool match = std::all_of(parameters.begin(), parameters.end(), [&](const auto& wanted) {
      const auto found = measurement->parameters.find(wanted.first);
      return found != measurement->parameters.end() && found->second == wanted.second;
    });
    if (match) return *measurement;
  }
  throw std::logic_error("no measurement named " + value_name + " with the wanted parameters");
}

std::vector<FitSample> fit_samples(std::span<const Measurement* const> measurements, const std::string& work) {
  std::vector<FitSample> samples;
  for (const Measurement* measurement : measurements) {
    const double amount = measurement->parameters.at(work);
    for (double seconds : measurement->repeats) samples.push_back({amount, seconds});
  }
  return samples;
}

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
