#include "model/spec/catalogue.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <optional>

#include "model/base/format.h"
#include "model/spec/spec_fields.h"

namespace slidedp {
namespace {

constexpr const CatalogueEstimates& kReach = kCatalogueEstimates;

std::optional<Problem> check_generation(int generation) {
  // The generations that code 128 bits in 130.
  if (generation >= 3 && generation <= 5) return std::nullopt;
  return Problem{"pcie_generation", fmt::format("is {}, but must be 3, 4 or 5", generation)};
}

std::optional<Problem> check_gpu(const CatalogueGpu& gpu) {
  if (!std::has_single_bit(static_cast<unsigned>(gpu.pcie_lanes)) || gpu.pcie_lanes > 16) {
    return Problem{"pcie_lanes", fmt::format("is {}, but must be 1, 2, 4, 8 or 16", gpu.pcie_lanes)};
  }
  if (gpu.nvlink_gbps > 0 && gpu.nvlink_gpus < 2) {
    return Problem{"nvlink_gbps", "needs nvlink_gpus of at least 2: how many GPUs NVLink joins"};
  }
  return check_generation(gpu.pcie_generation);
}

std::optional<Problem> check_host(const CatalogueHost& host) { return check_generation(host.pcie_generation); }

// One direction of a PCIe link: 8 GT/s a lane in generation 3, doubled by each further one.
double raw_pcie_gbps(int generation, int lanes) { return std::ldexp(8.0, generation - 3) * 128 / 130 / 8 * lanes; }

void check_c2c(const CatalogueGpu& gpu, const CatalogueHost& host, int gpus) {
  if (host.c2c_gpus == 0) {
    failf(
        "{} sits on one module with its CPU (c2c_gbps), which {} does not have (c2c_gpus is 0): choose a host such as "
        "configs/hardware/host/grace.yaml.",
        gpu.name, host.name);
  }
  if (gpus > host.c2c_gpus) {
    failf("{} has room for {} of {}, not for {}: lower the number of GPUs.", host.name, host.c2c_gpus, gpu.name, gpus);
  }
}

int lanes_per_gpu(const CatalogueGpu& gpu, const CatalogueHost& host, int gpus) {
  const int share = host.pcie_lanes / gpus;
  if (share == 0) {
    failf("{} has {} PCIe lanes for GPUs, too few for {}: lower the number of GPUs.", host.name, host.pcie_lanes, gpus);
  }
  return std::min(gpu.pcie_lanes, static_cast<int>(std::bit_floor(static_cast<unsigned>(share))));
}

// The link between a GPU and the host, each direction alone, as copies see it.
PcieSpec link_rates(const CatalogueGpu& gpu, const CatalogueHost& host, int gpus) {
  PcieSpec pcie;
  pcie.h2d.latency_s = kReach.h2d_latency_s;
  pcie.d2h.latency_s = kReach.d2h_latency_s;
  if (gpu.c2c_gbps > 0) {
    check_c2c(gpu, host, gpus);
    pcie.h2d.gbps = kReach.c2c_h2d * gpu.c2c_gbps;
    pcie.d2h.gbps = kReach.c2c_d2h * gpu.c2c_gbps;
    return pcie;
  }
  const int generation = std::min(gpu.pcie_generation, host.pcie_generation);
  pcie.h2d.gbps = pcie.d2h.gbps = kReach.pcie * raw_pcie_gbps(generation, lanes_per_gpu(gpu, host, gpus));
  return pcie;
}

DeviceSpec compose_device(const CatalogueGpu& gpu) {
  const auto visible = static_cast<int64_t>(kReach.device_memory * static_cast<double>(gpu.memory_bytes));
  return {gpu.name, "cuda", visible, kReach.context_bytes};
}

PcieSpec compose_pcie(const CatalogueGpu& gpu, const CatalogueHost& host, int gpus) {
  PcieSpec pcie = link_rates(gpu, host, gpus);
  pcie.duplex_gbps = kReach.duplex * (pcie.h2d.gbps + pcie.d2h.gbps);
  pcie.root_h2d_gbps = gpus * pcie.h2d.gbps;
  pcie.root_d2h_gbps = gpus * pcie.d2h.gbps;
  return pcie;
}

// One GPU has nobody to exchange data with.
CollectiveSpec compose_collectives(const CatalogueGpu& gpu, const PcieSpec& pcie, int gpus) {
  if (gpus == 1) return {};
  const bool nvlink = gpu.nvlink_gbps > 0 && gpus <= gpu.nvlink_gpus;
  const LinkRate bus{kReach.collective_latency_s,
                     nvlink ? kReach.nvlink * gpu.nvlink_gbps : kReach.pcie_collective * pcie.h2d.gbps};
  return {bus, bus, bus};
}

KernelSpec compose_kernels(const CatalogueGpu& gpu) {
  const auto rate = [&](double full, double half, double beside_s) {
    const double peak_gflops = (gpu.half_rate_tensor_cores ? half : full) * gpu.bf16_tflops * 1e3;
    return KernelRate{peak_gflops, beside_s * peak_gflops};
  };
  KernelSpec kernels;
  kernels.layer_fwd = rate(kReach.layer_fwd, kReach.half_rate_layer_fwd, kReach.layer_fwd_s);
  kernels.layer_bwd = rate(kReach.layer_bwd, kReach.half_rate_layer_bwd, kReach.layer_bwd_s);
  kernels.head = rate(kReach.head, kReach.half_rate_head, kReach.head_s);
  kernels.elementwise_gbps = kReach.elementwise * gpu.memory_gbps;
  const double embedding = kernels.elementwise_gbps / 4;  // 1e9 elements/s, each read and written in bf16
  kernels.embedding = {embedding, kReach.embedding_s * embedding};
  kernels.launch_latency_s = kReach.launch_latency_s;
  return kernels;
}

HostSpec compose_host(const CatalogueHost& host) {
  HostSpec spec;
  spec.cores = host.cores;
  spec.memory_bytes = static_cast<int64_t>(kReach.host_memory * static_cast<double>(host.memory_bytes));
  spec.dram_gbps = kReach.dram * host.memory_gbps();
  spec.cpu_stream_gbps = kReach.cpu_stream * host.memory_gbps();
  spec.adam_elements_per_s = kReach.adam_elements_per_s;
  spec.split_weights_elements_per_s = kReach.split_weights_elements_per_s;
  spec.split_moments_elements_per_s = kReach.split_moments_elements_per_s;
  spec.norm_elements_per_s = kReach.norm_elements_per_s;
  spec.source_gbps = kReach.source_gbps;
  return spec;
}

ContentionSpec compose_contention(const HostSpec& host) {
  const auto of_streams = [&](double value) { return value * host.dram_gbps / host.cpu_stream_gbps; };
  ContentionSpec spec;
  spec.h2d.beside_streams = spec.d2h.beside_streams = of_streams(kReach.copy_beside_streams);
  spec.streams.beside_h2d = spec.streams.beside_d2h = of_streams(kReach.stream_beside_copies);
  return spec;
}

}  // namespace

CatalogueGpu load_catalogue_gpu(const std::filesystem::path& file) {
  return read_yaml<CatalogueGpu>(
      file, kGpuSchema, check_gpu,
      {{kHardwareSchema,
        "this file is a whole machine, host and all: give it without --host, or give a GPU's file, such "
        "as those in configs/hardware/gpu"},
       {kHostSchema,
        "this file is a host: give it with --host, and a GPU's file, such as those in "
        "configs/hardware/gpu, with --hardware"}});
}

CatalogueHost load_catalogue_host(const std::filesystem::path& file) {
  const char* advice = "give a host's file, such as those in configs/hardware/host, with --host";
  return read_yaml<CatalogueHost>(file, kHostSchema, check_host, {{kHardwareSchema, advice}, {kGpuSchema, advice}});
}

HardwareSpec compose_hardware(const CatalogueGpu& gpu, const CatalogueHost& host, int gpus) {
  if (gpus < 1) failf("A machine of {} GPUs cannot be planned for: it needs at least 1.", gpus);
  HardwareSpec spec;
  spec.name = fmt::format("{} x {}, {}", gpus, gpu.name, host.name);
  spec.measured = false;
  spec.gpus = gpus;
  spec.device = compose_device(gpu);
  spec.pcie = compose_pcie(gpu, host, gpus);
  spec.collectives = compose_collectives(gpu, spec.pcie, gpus);
  spec.kernels = compose_kernels(gpu);
  spec.host = compose_host(host);
  spec.contention = compose_contention(spec.host);
  if (const auto problem = check_hardware(spec)) {
    failf("{}: key \"{}\" {}; look at the figures of the GPU and the host.", spec.name, problem->key, problem->message);
  }
  return spec;
}

}  // namespace slidedp
