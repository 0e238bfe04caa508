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
  const auto gbps = [](const Measurement& m) { return m.parameters.at("bytes") / median(m.repeats) / kGiga; };
  const Measurement* fastest = &find(measured, "read", all_cores);
  for (const Measurement& m : measured) {
    // Older databases have no in-place stream.
    const bool candidate = m.value_name == "triad" || m.value_name == "in_place";
    if (candidate && m.parameters.at("threads") == facts.cores && gbps(m) > gbps(*fastest)) fastest = &m;
  }
  const Measurement& best = *fastest;
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

namespace {

// The largest rates that were seen: caps of what the law says of more threads, ranks and links than were measured.
Found take_memory_caps(std::span<const ContentionSample> samples, HardwareSpec& spec) {
  double streams = 0, all = 0;
  for (const ContentionSample& sample : samples) {
    const bool alone = !sample.running.h2d && !sample.running.d2h;
    if (alone) streams = std::max(streams, sample.measured.adam_gbps);
    all = std::max(all, sample.measured.sum());
  }
  Found found;
  const auto raise = [&](double& cap, double seen, const char* field) {
    if (seen <= cap) return;
    cap = seen;
    found.push_back({field, cap, "GB/s", 0});
  };
  raise(spec.host.cpu_stream_gbps, streams, "host.cpu_stream_gbps");
  raise(spec.host.dram_gbps, all, "host.dram_gbps");
  return found;
}

}  // namespace

Found fill_host_contention(const FillFacts&, Measured measured, HardwareSpec& spec) {
  const std::vector<ContentionSample> samples = contention_samples(measured);
  Found caps = take_memory_caps(samples, spec);
  const ContentionFit fit = fit_contention(samples, spec);
  spec = with_contention(spec, fit);
  Found found;
  const auto add = [&](const std::string& field, double value, const char* unit, double error) {
    found.push_back({field, value, unit, error});
  };
  const ContentionLaw& error = fit.standard_error;
  add("host.adam_elements_per_s", fit.adam_elements_per_s, "elements/s", error.adam_elements_per_s);
  const auto add_copies = [&](const std::string& direction, const CopyContention& copies,
                              const CopyContention& errors) {
    const std::string prefix = "contention." + direction + ".";
    add(prefix + "headroom", copies.headroom, "", errors.headroom);
    add(prefix + "beside_streams", copies.beside_streams, "", errors.beside_streams);
    add(prefix + "beside_copies", copies.beside_copies, "", errors.beside_copies);
  };
  add_copies("h2d", fit.contention.h2d, error.contention.h2d);
  add_copies("d2h", fit.contention.d2h, error.contention.d2h);
  const StreamContention &streams = fit.contention.streams, &off = error.contention.streams;
  add("contention.streams.beside_streams", streams.beside_streams, "", off.beside_streams);
  add("contention.streams.beside_h2d", streams.beside_h2d, "", off.beside_h2d);
  add("contention.streams.beside_d2h", streams.beside_d2h, "", off.beside_d2h);
  FitSummary& summary = found.front().fit.emplace();
  summary.what = "host.contention";
  summary.samples = static_cast<int>(measured.size());
  summary.residual_rms_log = fit.residual_rms_log;
  constexpr double kMostResidual = 0.08;
  if (fit.residual_rms_log > kMostResidual) {
    summary.structured = true;
    found.front().note = "host.contention: the law describes the rates badly; was the machine idle otherwise?";
  }
  for (Finding& cap : caps) cap.standard_error = fit.residual_rms_log * cap.value;  // as that of any rate
  std::move(caps.begin(), caps.end(), std::back_inserter(found));
  return found;
}

}  // namespace slidedp
