#include "runtime/exec/graph_memory.h"

#include <stdexcept>

#include "model/base/error.h"
#include "model/graph/dependencies.h"
#include "runtime/host/machine_facts.h"

namespace slidedp {
namespace {

void* state_data(const Buffer& buffer, HostState& state) {
  const UnitState unit = state.unit(buffer.unit);
  switch (buffer.kind) {
    case BufferKind::state_hi:
      return unit.hi.data();
    case BufferKind::state_lo:
      return unit.lo.data();
    case BufferKind::state_m:
      return unit.m.data();
    case BufferKind::state_v:
      return unit.v.data();
    default:
      return nullptr;
  }
}

bool is_state(const Buffer& buffer) {
  return buffer.kind == BufferKind::state_hi || buffer.kind == BufferKind::state_lo ||
         buffer.kind == BufferKind::state_m || buffer.kind == BufferKind::state_v;
}

}  // namespace

RegisteredHostMemory::RegisteredHostMemory(Device& device, void* data, int64_t bytes) {
  if (bytes == 0) return;
  device.register_host(data, bytes);
  device_ = &device;
  data_ = data;
}

RegisteredHostMemory::~RegisteredHostMemory() {
  if (device_ != nullptr) device_->unregister_host(data_);
}

GraphMemory::GraphMemory(const StepGraph& graph, const std::vector<std::unique_ptr<Device>>& devices, HostState& state)
    : graph_(&graph) {
  int64_t host_bytes = 0;
  for (const Buffer& buffer : graph.buffers) {
    if (buffer.on_host() && !is_state(buffer)) host_bytes += Arena::footprint(buffer.bytes);
  }
  arena_ = Arena(host_bytes, "gradient landing buffers, offloaded activations and step data");
  const Arena* arena = &arena_;
  touch({&arena, 1}, usable_cores(), nullptr);
  std::vector<std::vector<int64_t>> device_sizes(devices.size());
  for (const Buffer& buffer : graph.buffers) {
    if (!buffer.on_host()) device_sizes[static_cast<size_t>(buffer.rank)].push_back(buffer.bytes);
  }
  for (size_t rank = 0; rank < devices.size(); ++rank) devices[rank]->reserve(device_sizes[rank]);
  for (const Buffer& buffer : graph.buffers) {
    if (!buffer.on_host()) {
      device_memory_.push_back(devices[static_cast<size_t>(buffer.rank)]->allocate(buffer.bytes, buffer.name));
      base_.push_back(device_memory_.back().data());
    } else if (is_state(buffer)) {
      base_.push_back(state_data(buffer, state));
    } else {
      base_.push_back(arena_.take(buffer.bytes));
    }
  }
  register_host(*devices.front(), arena_.data(), arena_.bytes());
  for (const std::span<uint16_t> weights : state.weights()) {
    register_host(*devices.front(), weights.data(), std::ssize(weights) * 2);
  }
}

// Memory that the system does not let the devices pin works too, only slower.
void GraphMemory::register_host(Device& device, void* data, int64_t bytes) {
  try {
    registered_.emplace_back(device, data, bytes);
  } catch (const Error& error) {
    notes_.push_back(std::string(error.what()) + " This run goes on with copies several times slower than the link.");
  }
}

void* GraphMemory::base(BufferId id, int64_t step) const {
  const Buffer& buffer = graph_->buffers[static_cast<size_t>(id)];
  const int64_t half = alternates(buffer.kind) && step % 2 != 0 ? buffer.bytes / 2 : 0;
  return static_cast<std::byte*>(base_[static_cast<size_t>(id)]) + half;
}

void* GraphMemory::address(const Access& access, int64_t step) const {
  return static_cast<std::byte*>(base(access.buffer, step)) + access.begin;
}

BufferId GraphMemory::of_kind(BufferKind kind) const { return of_rank(kind, -1); }

BufferId GraphMemory::of_rank(BufferKind kind, int rank) const {
  for (size_t id = 0; id < graph_->buffers.size(); ++id) {
    const Buffer& buffer = graph_->buffers[id];
    if (buffer.kind == kind && buffer.owner == rank) return static_cast<BufferId>(id);
  }
  throw std::logic_error("the graph has no buffer of that kind for this rank");
}

}  // namespace slidedp
