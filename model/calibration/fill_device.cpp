// The machine's facts, copies, collectives, kernels and launches.
#include <algorithm>
#include <iterator>

#include "model/base/format.h"
#include "model/calibration/fill_probes.h"

namespace slidedp {
namespace {

constexpr double kGiga = 1e9;

double gbps(const Measurement& m) { return m.parameters.at("bytes") / median(m.repeats) / kGiga; }

Found fill_link(Measured measured, const char* key, const char* field, LinkRate& rate) {
  const LinkFit fit = fit_link(fit_samples(select(measured, "seconds"), "bytes"), key);
  rate = fit.rate;
  return findings(field, fit);
}

Found fill_collective(const FillFacts& facts, Measured measured, const std::string& name, LinkRate& rate) {
  std::vector<const Measurement*> planned = select(measured, "seconds");
  std::erase_if(planned,
                [&](const Measurement* m) { return m->parameters.at("ranks") != collective_ranks(facts.ranks); });
  const LinkFit fit = fit_link(fit_samples(planned, "bus_bytes"), "collective." + name);
  rate = fit.rate;
  return findings("collectives." + name, fit);
}

Found fill_kernel(Measured measured, const char* value_name, const char* key, const char* field, KernelRate& rate) {
  const KernelFit fit = fit_kernel(fit_samples(select(measured, value_name), "flops"), key);
  rate = fit.rate;
  return findings(field, fit);
}

// On the CPU backend copies pass through the host's own memory controller; on others DMA does.
void raise_dram(HardwareSpec& spec, double rate, Found& found, double spread) {
  if (rate <= spec.host.dram_gbps) return;
  correct_dram_cap(spec, rate);
  found.push_back(finding("host.dram_gbps", rate, "GB/s", spread));
}

}  // namespace

Found fill_machine(const FillFacts& facts, Measured measured, HardwareSpec& spec) {
  const auto value = [&](const char* name) { return static_cast<int64_t>(find(measured, name).repeats.front()); };
  spec.gpus = facts.ranks;
  spec.host.cores = static_cast<int>(value("cores"));
  spec.host.memory_bytes = value("host memory");
  spec.device.memory_bytes = value("device memory");
  return {fact("host.cores", spec.host.cores, ""),
          fact("host.memory_bytes", static_cast<double>(spec.host.memory_bytes), "B"),
          fact("device.memory_bytes", static_cast<double>(spec.device.memory_bytes), "B")};
}

Found fill_copy_h2d(const FillFacts&, Measured measured, HardwareSpec& spec) {
  return fill_link(measured, "copy.h2d", "pcie.h2d", spec.pcie.h2d);
}

Found fill_copy_d2h(const FillFacts&, Measured measured, HardwareSpec& spec) {
  return fill_link(measured, "copy.d2h", "pcie.d2h", spec.pcie.d2h);
}

Found fill_copy_duplex(const FillFacts&, Measured measured, HardwareSpec& spec) {
  const Measurement& m = find(measured, "seconds");
  const double spread = relative_error(m.repeats);
  spec.pcie.duplex_gbps = gbps(m);
  Found found{finding("pcie.duplex_gbps", spec.pcie.duplex_gbps, "GB/s", spread)};
  raise_dram(spec, spec.pcie.duplex_gbps, found, spread);
  return found;
}

Found fill_copy_root(const FillFacts&, Measured measured, HardwareSpec& spec) {
  Found found;
  const auto take = [&](const char* direction, double& rate) {
    const Measurement& m = find(measured, direction);
    const double spread = relative_error(m.repeats);
    rate = gbps(m);
    found.push_back(finding(fmt::format("pcie.root_{}_gbps", direction), rate, "GB/s", spread));
    raise_dram(spec, rate, found, spread);
  };
  take("h2d", spec.pcie.root_h2d_gbps);
  take("d2h", spec.pcie.root_d2h_gbps);
  return found;
}

Found fill_all_gather(const FillFacts& facts, Measured measured, HardwareSpec& spec) {
  return fill_collective(facts, measured, "all_gather", spec.collectives.all_gather);
}

Found fill_reduce_scatter(const FillFacts& facts, Measured measured, HardwareSpec& spec) {
  return fill_collective(facts, measured, "reduce_scatter", spec.collectives.reduce_scatter);
}

Found fill_broadcast(const FillFacts& facts, Measured measured, HardwareSpec& spec) {
  return fill_collective(facts, measured, "broadcast", spec.collectives.broadcast);
}

std::vector<LayerSample> layer_samples(Measured measured, const std::string& value_name) {
  std::vector<LayerSample> samples;
  for (const Measurement* m : select(measured, value_name)) {
    const auto number = [&](const char* name) {
      const auto found = m->parameters.find(name);
      return found == m->parameters.end() ? 0.0 : found->second;
    };
    const double attention = number("attention_flops");
    const LayerWork work{m->parameters.at("flops") - attention, attention, number("layer_bytes")};
    // Plans are mostly made for the model whose shapes were measured.
    constexpr double kOwnWeight = 3;
    const double weight = number("own_model") != 0 ? kOwnWeight : 1;
    for (const double seconds : m->repeats) samples.push_back({work, seconds, weight});
  }
  return samples;
}

Found fill_kernel_layer(const FillFacts&, Measured measured, HardwareSpec& spec) {
  Found found;
  const auto take = [&](const char* value_name, const std::string& pass, KernelRate& products, double& attention,
                        double& gbps) {
    const LayerFit fit = fit_layer(layer_samples(measured, value_name), std::string("kernel.layer ") + value_name);
    products = fit.rate.products;
    attention = fit.rate.attention_gflops;
    gbps = fit.rate.gbps;
    Found of_pass = findings("kernels.layer_" + pass, fit.products());
    std::move(of_pass.begin(), of_pass.end(), std::back_inserter(found));
    found.push_back(
        {"kernels.attention_" + pass + "_gflops", attention, "Gflop/s", fit.standard_error.attention_gflops});
    found.push_back({"kernels.layer_" + pass + "_gbps", gbps, "GB/s", fit.standard_error.gbps});
  };
  KernelSpec& kernels = spec.kernels;
  take("forward", "fwd", kernels.layer_fwd, kernels.attention_fwd_gflops, kernels.layer_fwd_gbps);
  take("backward", "bwd", kernels.layer_bwd, kernels.attention_bwd_gflops, kernels.layer_bwd_gbps);
  return found;
}

Found fill_kernel_head(const FillFacts&, Measured measured, HardwareSpec& spec) {
  return fill_kernel(measured, "seconds", "kernel.head", "kernels.head", spec.kernels.head);
}

Found fill_kernel_embedding(const FillFacts&, Measured measured, HardwareSpec& spec) {
  return fill_kernel(measured, "backward", "kernel.embedding", "kernels.embedding", spec.kernels.embedding);
}

Found fill_kernel_cast(const FillFacts&, Measured measured, HardwareSpec& spec) {
  const Measurement& m = find(measured, "seconds");
  spec.kernels.elementwise_gbps = gbps(m);
  return {finding("kernels.elementwise_gbps", spec.kernels.elementwise_gbps, "GB/s", relative_error(m.repeats))};
}

Found fill_launch_latency(const FillFacts&, Measured measured, HardwareSpec& spec) {
  const Measurement& m = find(measured, "hop");
  spec.kernels.launch_latency_s = median(m.repeats);
  return {finding("kernels.launch_latency_s", spec.kernels.launch_latency_s, "s", relative_error(m.repeats))};
}

Found fill_device_context(const FillFacts&, Measured measured, HardwareSpec& spec) {
  // Other shapes load other kernels, some MiB more.
  constexpr int64_t kGrain = int64_t{64} << 20;
  const std::vector<double>& seen = find(measured, "context").repeats;
  spec.device.context_bytes = round_up(static_cast<int64_t>(*std::max_element(seen.begin(), seen.end())), kGrain);
  return {fact("device.context_bytes", static_cast<double>(spec.device.context_bytes), "B", kGrain / 2.0)};
}

}  // namespace slidedp
