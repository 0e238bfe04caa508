// What a task demands from which resource of a machine. The only place that turns work into seconds.
#pragma once

#include <vector>

#include "model/graph/step_graph.h"
#include "model/sim/machine_resources.h"
#include "model/spec/hardware_spec.h"

namespace slidedp {

// In a graph of one rank that stands for several (StepGraph::alike) its tasks demand of the host what all of them do.
//
// Refers to the graph, which must outlive it; the hardware profile is copied.
class CostModel {
 public:
  CostModel(const StepGraph& graph, const HardwareSpec& hardware);
  const std::vector<Resource>& resources() const { return machine_.all(); }
  // Throws Error that names the hardware profile's key if the task needs a rate that the profile does not have.
  TaskCost cost(const Task& task) const;

 private:
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
  MachineResources machine_;
};

}  // namespace slidedp
