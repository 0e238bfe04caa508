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
  // Parts of h2d.gbps and d2h.gbps that are lost while the CPU's cores stream all that they can (cpu_stream_gbps);
  // beside cores that stream a share of it, that share of the loss. For machines of which only this is known: a
  // measured one has 0 here, and host.h2d_cost and the like.
  double h2d_loss = 0, d2h_loss = 0;
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
  // Per worker thread, alone; the caps above bound several threads together.
  double adam_elements_per_s = 0;  // one gradient source
  double norm_elements_per_s = 0;  // one gradient source
  double source_gbps = 0;          // each further gradient source, bytes read by one thread
  // Per thread, the two passes of a split update, one gradient source. 0: not measured; then each moves its
  // bytes at Adam's rate.
  double split_weights_elements_per_s = 0, split_moments_elements_per_s = 0;
  // Parts of cpu_stream_gbps that are lost while copies in one direction run at root_h2d_gbps or root_d2h_gbps; beside
  // slower copies, their share of it. Both directions add. As pcie.h2d_loss.
  double stream_loss_h2d = 0, stream_loss_d2h = 0;
  // What a byte that a device reads (h2d) or writes (d2h) costs the memory controller, over one that the cores stream.
  double h2d_cost = 1, d2h_cost = 1;
  // How fast copies and the cores' streams go, of what each does alone, when they share a full memory controller: in
  // proportion to these, the streams' being 1. (Devices' writes are posted and go first; their reads wait.)
  double h2d_weight = 1, d2h_weight = 1;
  bool operator==(const HostSpec&) const = default;

  // Elements per second of one worker thread in an update or one part of it.
  double update_elements_per_s(UpdatePart part) const;
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
  Uncertainty uncertainty;  // of a measured profile
  bool operator==(const HardwareSpec&) const = default;
};

struct NamedValue {
  std::string field;  // YAML path
  double value = 0;
};
// Every number of the profile, in the file's order.
std::vector<NamedValue> named_values(const HardwareSpec&);

HardwareSpec load_hardware_spec(const std::filesystem::path& file);  // strict; throws Error with file:line
std::string to_yaml(const HardwareSpec&);                            // round trip exact

}  // namespace slidedp
