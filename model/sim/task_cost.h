// What a task demands from which resource of a machine. The only place that turns work into seconds.
#pragma once

#include <string>
#include <vector>

#include "model/graph/step_graph.h"
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
  double weight = 1;  // in sharing full resources, see FairShare
  double alone_s() const { return latency_s + solo_s; }
};

// The machine's resources. Per rank the compute units (capacity 1), both link directions and the duplex link; per host
// the root complex in each direction, the memory controller, the CPU's streaming capacity (all bytes/s) and the cores.
// The fabric needs none: collectives of one rank run one after another on its comm lane, at the measured all-rank bus
// bandwidth. DMA and the CPU's streams share the memory controller, with costs and weights of their own; where only
// losses are known, link directions lose to CPU streaming and CPU streaming to the root in each direction.
//
// In a graph of one rank that stands for several (StepGraph::alike) its tasks demand of the host what all of them do.
//
// Refers to the graph, which must outlive it; the hardware profile is copied.
class CostModel {
 public:
  CostModel(const StepGraph& graph, const HardwareSpec& hardware);
  const std::vector<Resource>& resources() const { return resources_; }
  // Throws Error that names the hardware profile's key if the task needs a rate that the profile does not have.
  TaskCost cost(const Task& task) const;

 private:
  enum class Shared { root_h2d, root_d2h, dram, cpu_stream, cores };
  enum class PerRank { compute, h2d_link, d2h_link, duplex };
  ResourceId id(Shared resource) const { return static_cast<int>(resource); }
  ResourceId id(PerRank resource, int rank) const;

  void copy(const Task& task, TaskCost& cost) const;
  void collective(const Task& task, TaskCost& cost) const;
  void kernel(const Task& task, TaskCost& cost) const;
  void host_stream(const Task& task, TaskCost& cost) const;
  struct KernelClass {
    const KernelRate& rate;
    const char* key;
  };
  KernelClass kernel_class(const Task& task) const;
  double flops_seconds(const Task& task) const;
  // Solo seconds of one pool worker.
  double worker_s(const Task& task) const;

  const StepGraph* graph_;
  HardwareSpec hardware_;
  bool cpu_backend_ = false;
  std::vector<Resource> resources_;  // the shared ones, then those of rank 0, rank 1, ...
};

}  // namespace slidedp
