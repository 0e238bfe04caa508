#include "runtime/device/backends.h"

#include "model/base/error.h"
#include "runtime/comm/local/local_collective.h"
#include "runtime/device/cpu/cpu_device.h"
#include "runtime/nn/aten_compute.h"
#include "runtime/nn/counting_allocator.h"

namespace slidedp {
namespace {

void require_compiled_in(const std::string& name) {
  std::string available;
  for (const std::string& known : backend_names()) {
    if (known == name) return;
    available += (available.empty() ? "" : ", ") + known;
  }
  fail("This build has no backend '" + name + "'; available: " + available +
       ". Choose one of them, or use a build that has it.");
}

}  // namespace

std::vector<std::string> backend_names() { return {"cpu"}; }

Backend make_backend(const std::string& name, int ranks, int64_t memory_budget) {
  require_compiled_in(name);
  if (ranks < 1) fail("A backend needs at least one rank, not " + std::to_string(ranks) + ".");
  Backend backend;
  std::vector<Device*> devices;
  for (int rank = 0; rank < ranks; ++rank) {
    backend.devices.push_back(std::make_unique<CpuDevice>(rank, memory_budget));
    devices.push_back(backend.devices.back().get());
  }
  backend.collective = std::make_unique<LocalCollective>(std::move(devices));
  return backend;
}

Backend make_backend(const ModelSpec& model, const ModelLayout& layout, const Plan& plan, int64_t memory_budget) {
  Backend backend = make_backend(plan.backend, plan.ranks, memory_budget);
  for (int rank = 0; rank < plan.ranks; ++rank) {
    backend.compute.push_back(make_aten_compute(model, layout, plan));
  }
  return backend;
}

MemoryUse temporary_memory(const std::string& backend) {
  require_compiled_in(backend);
  const AllocatorUse use = counted_memory();
  return {0, use.in_use, use.peak};
}

void reset_temporary_peak(const std::string& backend) {
  require_compiled_in(backend);
  reset_counted_peak();
}

}  // namespace slidedp
