// The memory behind a step graph's buffers: device buffers from the devices' allocators, host buffers from one arena,
// state buffers from the host state. What devices copy from or to on the host is registered with them: the arena, and
// of the state the weights (hi).
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "model/graph/step_graph.h"
#include "runtime/device/device.h"
#include "runtime/host/arena.h"
#include "runtime/host/host_state.h"

namespace slidedp {

// Registers host memory with the devices while it lives.
class RegisteredHostMemory {
 public:
  RegisteredHostMemory() = default;
  // Throws Error if the system refuses. Nothing is registered for 0 bytes.
  RegisteredHostMemory(Device& device, void* data, int64_t bytes);
  RegisteredHostMemory(RegisteredHostMemory&& other) noexcept { swap(other); }
  RegisteredHostMemory& operator=(RegisteredHostMemory&& other) noexcept {
    RegisteredHostMemory(std::move(other)).swap(*this);
    return *this;
  }
  ~RegisteredHostMemory();

 private:
  void swap(RegisteredHostMemory& other) noexcept {
    std::swap(device_, other.device_);
    std::swap(data_, other.data_);
  }
  Device* device_ = nullptr;
  void* data_ = nullptr;
};

class GraphMemory {
 public:
  // Allocates everything; throws Error that names the buffer and the budget. Devices and state must outlive it.
  GraphMemory(const StepGraph& graph, const std::vector<std::unique_ptr<Device>>& devices, HostState& state);
  GraphMemory(const GraphMemory&) = delete;
  GraphMemory& operator=(const GraphMemory&) = delete;

  // What did not go as wished, in sentences for the user: host memory that is not pinned.
  const std::vector<std::string>& notes() const { return notes_; }

  // First byte of the access in the step with this number (buffers that alternate have two halves).
  void* address(const Access& access, int64_t step) const;
  // Start of a buffer, e.g. the batch of one rank, in that step.
  void* base(BufferId buffer, int64_t step) const;
  // The only buffer of its kind.
  BufferId of_kind(BufferKind kind) const;
  // The host buffer of that kind that serves `rank` (batch_host, loss_host).
  BufferId of_rank(BufferKind kind, int rank) const;

 private:
  void register_host(Device& device, void* data, int64_t bytes);

  const StepGraph* graph_;
  Arena arena_;
  std::vector<RegisteredHostMemory> registered_;
  std::vector<std::string> notes_;
  std::vector<DeviceMemory> device_memory_;
  std::vector<void*> base_;
};

}  // namespace slidedp
