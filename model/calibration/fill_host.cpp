// The host's memory and the CPU optimizer, alone and beside copies.
#include <algorithm>
#include <array>
#include <limits>
#include <map>
#include <utility>

#include "model/base/format.h"
#include "model/calibration/contention_fit.h"
#include "model/calibration/fill_probes.h"

namespace slidedp {
namespace {

constexpr double kGiga = 1e9;
constexpr double kWireBytes = 2;  // bf16

double elements_per_s(const Measurement& m) { return m.parameters.at("elements") / median(m.repeats); }

}  // namespace

Found fill_host_dram(const FillFacts& facts, Measured measured, HardwareSpec& spec) {
  const std::map<std::string, double> all_cores{{"threads", facts.cores}};
  const Measurement& read = find(measured, "read", all_cores);
  const Measurement& written = find(measured, "triad", all_cores);
  const auto gbps = [](const Measurement& m) { return m.parameters.at("bytes") / median(m.repeats) / kGiga; };
  const Measurement& best = gbps(read) > gbps(written) ? read : written;
  spec.host.cpu_stream_gbps = gbps(best);
  spec.host.dram_gbps = gbps(best);
  const double spread = relative_error(best.repeats);
  return {finding("host.cpu_stream_gbps", spec.host.cpu_stream_gbps, "GB/s", spread),
          finding("host.dram_gbps", spec.host.dram_gbps, "GB/s", spread)};
}

Found fill_host_adam(const FillFacts& facts, Measured measured, HardwareSpec& spec) {
  const Measurement& alone = find(measured, "seconds", {{"threads", 1}});
  const Measurement& together = find(measured, "seconds", {{"threads", facts.cores}});
  HostSpec& host = spec.host;
  host.adam_elements_per_s = elements_per_s(alone);
  Found found{
      finding("host.adam_elements_per_s", host.adam_elements_per_s, "elements/s", relative_error(alone.repeats))};
  const double traffic_gbps = elements_per_s(together) * kAdamBytes / kGiga;
  if (traffic_gbps > host.cpu_stream_gbps) {
    host.cpu_stream_gbps = traffic_gbps;
    found.push_back(finding("host.cpu_stream_gbps", traffic_gbps, "GB/s", relative_error(together.repeats)));
  }
  if (traffic_gbps > host.dram_gbps) {
    host.dram_gbps = traffic_gbps;
    found.push_back(finding("host.dram_gbps", traffic_gbps, "GB/s", relative_error(together.repeats)));
  }
  return found;
}

Found fill_host_split(const FillFacts&, Measured measured, HardwareSpec& spec) {
  Found found;
  const auto take = [&](UpdatePart part, double& rate, const std::string& field) {
    const Measurement& m = find(measured, "seconds", {{"part", static_cast<double>(part)}});
    rate = elements_per_s(m);
    found.push_back(finding(field, rate, "elements/s", relative_error(m.repeats)));
  };
  take(UpdatePart::weights, spec.host.split_weights_elements_per_s, "host.split_weights_elements_per_s");
  take(UpdatePart::moments, spec.host.split_moments_elements_per_s, "host.split_moments_elements_per_s");
  return found;
}

Found fill_host_norm(const FillFacts&, Measured measured, HardwareSpec& spec) {
  const Measurement& m = find(measured, "seconds");
  spec.host.norm_elements_per_s = elements_per_s(m);
  return {finding("host.norm_elements_per_s", spec.host.norm_elements_per_s, "elements/s", relative_error(m.repeats))};
}

Found fill_host_sources(const FillFacts&, Measured measured, HardwareSpec& spec) {
  const Measurement& one = find(measured, "seconds", {{"sources", 1}});
  const Measurement& four = find(measured, "seconds", {{"sources", 4}});
  std::vector<double> further;
  for (size_t i = 0; i < one.repeats.size(); ++i) further.push_back((four.repeats[i] - one.repeats[i]) / 3);
  const double bytes = one.parameters.at("elements") * kWireBytes;
  const double seconds = median(further);
  // The rate at which the whole update moves its own bytes: no further source can be believed to be free.
  const double adam_gbps = one.parameters.at("elements") * kAdamBytes / median(one.repeats) / kGiga;
  const double gbps = seconds > 0 ? bytes / seconds / kGiga : std::numeric_limits<double>::infinity();
  constexpr double kMostOverAdam = 4;
  spec.host.source_gbps = std::min(gbps, kMostOverAdam * adam_gbps);
  Finding found = finding("host.source_gbps", spec.host.source_gbps, "GB/s", relative_error(further));
  if (gbps > kMostOverAdam * adam_gbps) {
    found.note =
        "host.sources: the cost of a further source is below the noise, so its rate is capped at four times "
        "that of the update itself";
  }
  return {found};
}

std::vector<ContentionSample> contention_samples(Measured measured) {
  std::map<std::array<double, 3>, ContentionSample> samples;
  for (const Measurement& m : measured) {
    const double h2d = m.parameters.at("h2d"), d2h = m.parameters.at("d2h"), threads = m.parameters.at("threads");
    // Copies alone are stored with the planned threads or with none, whoever measured them.
    ContentionSample& sample = samples[{threads, h2d, d2h}];
    sample.running.h2d = h2d != 0;
    sample.running.d2h = d2h != 0;
    if (m.value_name == "adam") sample.running.adam_threads = static_cast<int>(threads);
    double& rate = m.value_name == "h2d"   ? sample.measured.h2d_gbps
                   : m.value_name == "d2h" ? sample.measured.d2h_gbps
                                           : sample.measured.adam_gbps;
    rate = median(m.repeats);
  }
  std::vector<ContentionSample> result;
  for (const auto& [key, sample] : samples) result.push_back(sample);
  return result;
}

Found fill_host_contention(const FillFacts&, Measured measured, HardwareSpec& spec) {
  const ContentionFit fit = fit_contention(contention_samples(measured), spec);
  spec = with_contention(spec, fit);
  Found found;
  const auto add = [&](const char* field, double value, const char* unit, double error) {
    found.push_back({field, value, unit, error});
  };
  const ContentionLaw& error = fit.standard_error;
  add("host.cpu_stream_gbps", fit.cpu_stream_gbps, "GB/s", error.cpu_stream_gbps);
  add("host.dram_gbps", fit.dram_gbps, "GB/s", error.dram_gbps);
  add("host.adam_elements_per_s", fit.adam_elements_per_s, "elements/s", error.adam_elements_per_s);
  add("host.h2d_cost", fit.h2d_cost, "", error.h2d_cost);
  add("host.d2h_cost", fit.d2h_cost, "", error.d2h_cost);
  add("host.h2d_weight", fit.h2d_weight, "", error.h2d_weight);
  add("host.d2h_weight", fit.d2h_weight, "", error.d2h_weight);
  FitSummary& summary = found.front().fit.emplace();
  summary.what = "host.contention";
  summary.samples = static_cast<int>(measured.size());
  summary.residual_rms_log = fit.residual_rms_log;
  constexpr double kMostResidual = 0.08;
  if (fit.residual_rms_log > kMostResidual) {
    summary.structured = true;
    found.back().note = "host.contention: the law describes the rates badly; was the machine idle otherwise?";
  }
  return found;
}

}  // namespace slidedp
