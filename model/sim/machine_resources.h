// A machine's resources, and which of them copies and the CPU's streams take, by how much.
#pragma once

#include <string>
#include <vector>

#include "model/sim/fair_share.h"
#include "model/spec/hardware_spec.h"

namespace slidedp {

struct Demand {
  ResourceId resource;
  double amount;  // units (bytes; seconds of compute units; core-seconds)
};

struct TaskCost {
  double latency_s = 0;  // fixed time before the work; demands nothing
  double solo_s = 0;     // time of the work when nothing else runs; >= amount / capacity of every demand of one rank
  std::vector<Demand> demands;
  double alone_s() const { return latency_s + solo_s; }
};

// Per host the root complex in each direction, the memory controller, the CPU's streaming capacity (all bytes/s) and
// the cores; per rank the compute units (capacity 1), both link directions and the duplex link. The fabric needs none:
// collectives of one rank run one after another on its comm lane, at the measured all-rank bus bandwidth. Links and the
// CPU's streams contend as ContentionSpec says.
enum class HostResource { root_h2d, root_d2h, dram, cpu_stream, cores };
enum class RankResource { compute, h2d_link, d2h_link, duplex };

class MachineResources {
 public:
  // `alike`: how many ranks do at the same time what one does here (StepGraph::alike). Without `memory_caps` the memory
  // controller and the CPU's streams have no end; contention stays.
  MachineResources(const HardwareSpec& hardware, int ranks, int alike, bool memory_caps = true);
  const std::vector<Resource>& all() const { return resources_; }
  ResourceId id(HostResource resource) const { return static_cast<int>(resource); }
  ResourceId id(RankResource resource, int rank) const;

  // Each adds what a task demands and makes its work take as long as the slowest demand. Throws Error that names the
  // hardware profile's key if that has no rate.

  // A copy of so many bytes over a rank's link; `memory_bytes` of them are the host's.
  void add_copy(TaskCost& cost, bool host_to_device, int rank, double link_bytes, double memory_bytes) const;
  // What a pool worker reads and writes; its core works on it for all of cost.solo_s.
  void add_host_stream(TaskCost& cost, double bytes) const;
  // On the CPU backend a device lane's task runs on so many threads of the host, which take cores for all of
  // cost.solo_s; on others it takes none.
  void add_lane_threads(TaskCost& cost, double threads) const;

 private:
  void add(TaskCost& cost, ResourceId id, double amount, const char* key, int times = 1) const;

  int alike_;
  bool lanes_take_cores_;
  double cores_;
  std::vector<Resource> resources_;  // the host's, then those of rank 0, rank 1, ...
};

// A rate that some task needs. Throws Error that names the hardware profile's key unless it is positive.
double needed(double rate, const char* key);

}  // namespace slidedp
