// Machines put together from the public figures of a GPU and of a host, for planning without owning them. Two kinds of
// YAML file hold vendors' numbers only, each with its source: schema "slidedp.gpu/1" (configs/hardware/gpu) and schema
// "slidedp.host/1" (configs/hardware/host); the keys are the field names below. What share of those numbers a program
// reaches is estimated, here and nowhere else.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>

#include "model/spec/hardware_spec.h"

namespace slidedp {

struct CatalogueGpu {
  std::string name;
  int64_t memory_bytes = 0;  // as sold (ECC kept in the same memory taken off)
  double memory_gbps = 0;    // peak
  double bf16_tflops = 0;    // peak of the tensor cores, dense, with fp32 accumulation
  // GeForce: tensor cores that accumulate in fp32 at half their rate. They then draw little power and clock above the
  // boost clock that bf16_tflops is stated for.
  bool half_rate_tensor_cores = false;
  int pcie_generation = 0;
  int pcie_lanes = 16;
  double nvlink_gbps = 0;  // one GPU to its peers, each direction; 0: peers are reached over PCIe
  int nvlink_gpus = 0;     // how many GPUs NVLink joins at most
  double c2c_gbps = 0;     // NVLink-C2C to a CPU on the same module, each direction; takes the place of PCIe
  bool operator==(const CatalogueGpu&) const = default;
};

// All numbers are of the whole host, all sockets together.
struct CatalogueHost {
  std::string name;
  int cores = 0;
  int64_t memory_bytes = 0;  // as installed
  int memory_channels = 0;
  int channel_bytes = 8;   // a transfer of one channel
  double memory_mtps = 0;  // 1e6 transfers/s of one channel
  int pcie_generation = 0;
  int pcie_lanes = 0;  // that GPUs can use
  int c2c_gpus = 0;    // GPUs that sit on the CPUs' modules, joined by NVLink-C2C
  bool operator==(const CatalogueHost&) const = default;

  double memory_gbps() const { return memory_channels * channel_bytes * memory_mtps / 1e3; }  // peak
};

// What of the public figures is reached. All are estimates: `measured` in remarks refers to one H200 with 16 vCPUs of a
// Sapphire Rapids (results/h200-profile). slidedp-profile replaces them by measurements.
struct CatalogueEstimates {
  // Shares of the tensor cores' peak, as measured: Hopper and its power limit stand for all data centre GPUs.
  double layer_fwd = 0.63, layer_bwd = 0.59, head = 0.68;
  // The same for half-rate tensor cores. Large bf16 matrix products reach 1.08 (RTX 4090) and 1.21 (RTX 5090) of the
  // stated peak (github.com/xzwgit/gpu-flops-bench), on the H200 0.69 to 0.83: a third more is taken.
  double half_rate_layer_fwd = 0.85, half_rate_layer_bwd = 0.80, half_rate_head = 0.92;
  // Seconds that a kernel class takes beside its work at peak (half_gflop / peak). Measured: 48, 159, 130, 114 us.
  double layer_fwd_s = 5e-5, layer_bwd_s = 1.6e-4, head_s = 1.3e-4, embedding_s = 1e-4;
  double elementwise = 0.80;                   // of the GPU's memory peak. Measured: 0.78 (casts) to 0.85 (copies)
  double launch_latency_s = 8e-6;              // measured
  double device_memory = 0.985;                // of a GPU's memory that a program sees. Measured: 0.991 (139.8 of 141)
  int64_t context_bytes = int64_t{704} << 20;  // measured

  double pcie = 0.86;  // of a link's raw rate. Measured: 0.88 on PCIe 5; about 0.83 is usual on PCIe 4
  // Of NVLink-C2C's rate: 375 and 297 of 450 GB/s in "Harnessing Integrated CPU-GPU System Memory for HPC: a first look
  // into Grace Hopper" (2024).
  double c2c_h2d = 0.83, c2c_d2h = 0.66;
  double duplex = 0.86;                                   // of both directions' sum, at the same time. Measured
  double h2d_latency_s = 5.5e-6, d2h_latency_s = 3.2e-6;  // measured
  double nvlink = 0.80;                                   // bus bandwidth of NCCL, of NVLink's rate in one direction
  // The same over PCIe, of the link's rate: every byte crosses the host's root and, without peer-to-peer access, its
  // memory, and the copies between host and devices use the same links.
  double pcie_collective = 0.50;
  double collective_latency_s = 2e-5;

  double dram = 0.85;         // of the DRAM's peak, all traffic together: what STREAM reaches with all cores
  double cpu_stream = 0.75;   // of the DRAM's peak, by Adam on all cores
  double host_memory = 0.97;  // of the installed memory that is left beside kernel and services. Measured: 0.98
  // One core, measured on Sapphire Rapids. The caps above bind long before all cores run at these rates.
  double adam_elements_per_s = 8.2e8, split_weights_elements_per_s = 8.4e8, split_moments_elements_per_s = 1.2e9;
  double norm_elements_per_s = 3.2e9, source_gbps = 13;
  // Contention (ContentionSpec), beside all that the cores stream or, for streams, beside copies as fast as that.
  // Measured on Sapphire Rapids: a copy takes 54.0 / 42.2 (h2d) and 54.9 / 47.9 times as long beside Adam on all cores,
  // and that 1
  // + 0.25 (h2d) and 1 + 0.48 times the copies' part of its own rate: the means. Copies beside copies:
  // pcie.duplex_gbps.
  double copy_beside_streams = 0.21, stream_beside_copies = 0.37;
};
inline constexpr CatalogueEstimates kCatalogueEstimates;

// Strict; both throw Error with file:line.
CatalogueGpu load_catalogue_gpu(const std::filesystem::path& file);
CatalogueHost load_catalogue_host(const std::filesystem::path& file);

// `gpus` such GPUs in that host. GPUs share the host's PCIe lanes evenly, without switches. Throws Error that says why
// the two do not go together.
HardwareSpec compose_hardware(const CatalogueGpu& gpu, const CatalogueHost& host, int gpus);

}  // namespace slidedp
