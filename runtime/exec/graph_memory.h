// The memory behind a step graph's buffers: device buffers from the devices' allocators, host buffers from one arena,
// state buffers from the host state.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "model/graph/step_graph.h"
#include "runtime/device/device.h"
#include "runtime/host/arena.h"
#include "runtime/host/host_state.h"

namespace slidedp {

class GraphMemory {
 public:
  // Allocates everything; throws Error that names the buffer and the budget. Devices and state must outlive it.
  GraphMemory(const StepGraph& graph, const std::vector<std::unique_ptr<Device>>& devices, HostState& state);
  ~GraphMemory();
  GraphMemory(const GraphMemory&) = delete;
  GraphMemory& operator=(const GraphMemory&) = delete;

  // First byte of the access in the step with this number (buffers that alternate have two halves).
  void* address(const Access& access, int64_t step) const;
  // Start of a buffer, e.g. the batch of one rank, in that step.
  void* base(BufferId buffer, int64_t step) const;
  // The only buffer of its kind.
  BufferId of_kind(BufferKind kind) const;
  // The host buffer of that kind that serves `rank` (batch_host, loss_host).
  BufferId of_rank(BufferKind kind, int rank) const;

 private:
  const StepGraph* graph_;
  const std::vector<std::unique_ptr<Device>>* devices_;
  Arena arena_;
  std::vector<DeviceMemory> device_memory_;
  std::vector<void*> base_;
};

}  // namespace slidedp
