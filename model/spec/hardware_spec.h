// A machine's rates, measured by slidedp-profile or taken from a catalogue. YAML, schema "slidedp.hardware/1"; the keys
// are the field names below, so `--set pcie.h2d_gbps=*2` names a field. `_gbps` is 1e9 bytes/s, latencies are seconds.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "model/base/types.h"
#include "model/spec/uncertainty.h"

namespace slidedp {

// Time of a transfer alone = latency_s + bytes / (gbps * 1e9).
struct LinkRate {
  double latency_s = 0;
  double gbps = 0;
  bool operator==(const LinkRate&) const = default;
};

// Time of a kernel of `flops` = flops / (peak * flops / (flops + half)) = (flops + half) / peak, where peak is
// peak_gflops * 1e9 and half is half_gflop * 1e9: the work at which half of the peak is reached.
struct KernelRate {
  double peak_gflops = 0;
  double half_gflop = 0;
  bool operator==(const KernelRate&) const = default;
};

// Time of a decoder layer's pass = that of its matrix products as a KernelRate, + attention flops / attention_gflops +
// bytes of all its other kernels / gbps (model/cost/layer_work.h counts them). 0: not measured apart; then attention
// counts at the products' peak, and the bytes' time is in that peak.
struct LayerRate {
  KernelRate products;
  double attention_gflops = 0, gbps = 0;
};

struct PcieSpec {
  LinkRate h2d, d2h;                            // one rank alone, one direction
  double duplex_gbps = 0;                       // one rank, both directions at once, sum
  double root_h2d_gbps = 0, root_d2h_gbps = 0;  // all ranks at once, sum over ranks
  bool operator==(const PcieSpec&) const = default;
};

// Bus bandwidth as nccl-tests defines it: all-gather and reduce-scatter move (ranks-1)/ranks of the full buffer.
struct CollectiveSpec {
  LinkRate all_gather, reduce_scatter, broadcast;
  bool operator==(const CollectiveSpec&) const = default;
};

struct KernelSpec {
  KernelRate layer_fwd, layer_bwd, head, embedding;  // flops as model/cost counts them; embedding: flops = elements
  double elementwise_gbps = 0;                       // cast and other memory-bound device work, bytes read + written
  double launch_latency_s = 0;
  // See LayerRate; 0: not measured apart.
  double attention_fwd_gflops = 0, attention_bwd_gflops = 0;
  double layer_fwd_gbps = 0, layer_bwd_gbps = 0;
  LayerRate forward() const { return {layer_fwd, attention_fwd_gflops, layer_fwd_gbps}; }
  LayerRate backward() const { return {layer_bwd, attention_bwd_gflops, layer_bwd_gbps}; }
  bool operator==(const KernelSpec&) const = default;
};

struct DeviceSpec {
  std::string name;
  std::string backend;        // "cpu" or "cuda"
  int64_t memory_bytes = 0;   // per rank; on the CPU backend a budget that the device allocator enforces
  int64_t context_bytes = 0;  // taken by the driver's context and library workspaces before the first slot
  bool operator==(const DeviceSpec&) const = default;
};

struct HostSpec {
  int cores = 0;
  int64_t memory_bytes = 0;
  double dram_gbps = 0;        // memory controller: cap of all traffic, CPU and DMA
  double cpu_stream_gbps = 0;  // cap of what all CPU cores together can stream
  // Per worker thread, of one that nothing slows; contention and the caps above bound several threads together.
  double adam_elements_per_s = 0;  // one gradient source
  double norm_elements_per_s = 0;  // one gradient source
  double source_gbps = 0;          // each further gradient source, bytes read by one thread
  // Per thread, the two passes of a split update, one gradient source. 0: not measured; then each moves its
  // bytes at Adam's rate.
  double split_weights_elements_per_s = 0, split_moments_elements_per_s = 0;
  bool operator==(const HostSpec&) const = default;

  // Elements per second of one worker thread in an update or one part of it.
  double update_elements_per_s(UpdatePart part) const;
};

// How copies and the CPU's streams (Adam, norms, accumulation) slow each other, below the caps of PcieSpec and
// HostSpec, as they queue at the memory. The time that work takes, of what it takes alone, is the product of 1 + value
// * (part of host.dram_gbps that runs beside); of a copy over its headroom, but never less than alone: the memory could
// serve it so much faster than the link does. What runs beside counts as what it would take if only it ran; all ranks'
// copies in one direction count together. The law is the project's own; results/h200-profile shows how well it
// describes rates.
struct CopyContention {
  double headroom = 1;
  double beside_streams = 0, beside_copies = 0;  // copies: in the other direction
  bool operator==(const CopyContention&) const = default;
};
// Of one thread's stream. Streams beside it: what all threads want that nothing slows, its own among them.
struct StreamContention {
  double beside_streams = 0, beside_h2d = 0, beside_d2h = 0;
  bool operator==(const StreamContention&) const = default;
};
struct ContentionSpec {
  CopyContention h2d, d2h;
  StreamContention streams;
  bool operator==(const ContentionSpec&) const = default;
};

struct HardwareSpec {
  std::string name;
  bool measured = false;  // false: a catalogue entry; predictions say "estimate"
  int gpus = 1;           // ranks available
  DeviceSpec device;
  PcieSpec pcie;
  CollectiveSpec collectives;
  KernelSpec kernels;
  HostSpec host;
  ContentionSpec contention;
  Uncertainty uncertainty;  // of a measured profile
  bool operator==(const HardwareSpec&) const = default;
};

// Sets host.dram_gbps; what runs together is as slow as before. (A machine with other memory: just set the field.)
void correct_dram_cap(HardwareSpec& spec, double gbps);

struct NamedValue {
  std::string field;  // YAML path
  double value = 0;
};
// Every number of the profile, in the file's order.
std::vector<NamedValue> named_values(const HardwareSpec&);

HardwareSpec load_hardware_spec(const std::filesystem::path& file);  // strict; throws Error with file:line
std::string to_yaml(const HardwareSpec&);                            // round trip exact

}  // namespace slidedp
