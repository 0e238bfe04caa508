#include "runtime/device/backends.h"

#include "model/base/error.h"
#include "runtime/comm/local/local_collective.h"
#include "runtime/device/cpu/cpu_device.h"
#include "runtime/nn/aten_compute.h"
#include "runtime/nn/counting_allocator.h"
#ifdef SLIDEDP_WITH_CUDA
#include "runtime/comm/local/cuda/cuda_operations.h"
#include "runtime/comm/nccl/nccl_collective.h"
#include "runtime/device/cuda/cuda_device.h"
#include "runtime/device/cuda/gpus.h"
#include "runtime/nn/cuda/cuda_compute.h"
#endif

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

void check_request(const std::string& name, int ranks) {
  require_compiled_in(name);
  if (ranks < 1) fail("A backend needs at least one rank, not " + std::to_string(ranks) + ".");
}

Backend make_cpu_backend(int ranks, const BackendOptions& options) {
  Backend backend;
  std::vector<Device*> devices;
  for (int rank = 0; rank < ranks; ++rank) {
    backend.devices.push_back(std::make_unique<CpuDevice>(rank, options.memory_budget));
    devices.push_back(backend.devices.back().get());
  }
  backend.collective = std::make_unique<LocalCollective>(std::move(devices));
  return backend;
}

#ifdef SLIDEDP_WITH_CUDA
struct ChosenGpus {
  std::vector<int> by_rank;
  std::vector<std::string> names;  // each once
};

bool shares_gpu(int ranks, const BackendOptions& options) { return options.share_gpu && ranks > 1; }

ChosenGpus choose(int ranks, const BackendOptions& options) {
  const bool shared = shares_gpu(ranks, options);
  const CudaMachine machine = look_at_gpus(shared ? 1 : ranks);
  ChosenGpus chosen{choose_gpus(machine, {ranks, options.memory_needed, shared}), {}};
  for (const Gpu& gpu : machine.gpus) chosen.names.push_back(gpu.name);
  if (ranks > 1 && !shared) nccl_api();
  return chosen;
}

Backend make_cuda_backend(int ranks, const BackendOptions& options) {
  const bool shared = shares_gpu(ranks, options);
  const ChosenGpus gpus = choose(ranks, options);
  Backend backend;
  for (size_t i = 0; i < gpus.names.size(); ++i) {
    backend.facts.push_back({"gpu " + std::to_string(i), gpus.names[i]});
  }
  std::vector<CudaDevice*> devices;
  for (int rank = 0; rank < ranks; ++rank) {
    auto device = std::make_unique<CudaDevice>(
        CudaDeviceOptions{rank, gpus.by_rank[static_cast<size_t>(rank)], options.memory_budget, shared});
    devices.push_back(device.get());
    backend.devices.push_back(std::move(device));
  }
  if (ranks > 1 && !shared) {
    backend.collective = std::make_unique<NcclCollective>(std::move(devices));
  } else {
    backend.collective =
        std::make_unique<LocalCollective>(std::vector<Device*>(devices.begin(), devices.end()), make_cuda_operations());
  }
  return backend;
}
#endif

}  // namespace

std::vector<std::string> backend_names() {
#ifdef SLIDEDP_WITH_CUDA
  return {"cpu", "cuda"};
#else
  return {"cpu"};
#endif
}

DeviceFacts device_facts(const std::string& backend) {
  require_compiled_in(backend);
#ifdef SLIDEDP_WITH_CUDA
  if (backend == "cuda") {
    const CudaMachine machine = look_at_gpus(1);
    choose_gpus(machine, {});
    const Gpu& gpu = machine.gpus.front();
    return {gpu.name, machine.visible, gpu.total_bytes, gpu.free_bytes};
  }
#endif
  return {};
}

void check_backend(const std::string& name, int ranks, const BackendOptions& options) {
  check_request(name, ranks);
#ifdef SLIDEDP_WITH_CUDA
  if (name == "cuda") choose(ranks, options);
#else
  static_cast<void>(options);
#endif
}

Backend make_backend(const std::string& name, int ranks, const BackendOptions& options) {
  check_request(name, ranks);
#ifdef SLIDEDP_WITH_CUDA
  if (name == "cuda") return make_cuda_backend(ranks, options);
#endif
  return make_cpu_backend(ranks, options);
}

Backend make_backend(const ModelSpec& model, const ModelLayout& layout, const Plan& plan,
                     const BackendOptions& options) {
  require_compiled_in(plan.backend);
  Backend backend = make_backend(plan.backend, plan.ranks, options);
  for (const auto& device : backend.devices) {
#ifdef SLIDEDP_WITH_CUDA
    if (const auto* gpu = dynamic_cast<const CudaDevice*>(device.get())) {
      auto compute =
          make_cuda_compute(model, layout, plan, gpu->ordinal(), gpu->compute_stream(),
                            {options.deterministic, [] { return static_cast<void*>(current_cuda_stream()); }});
      // The ranks' shapes are alike, so the first one speaks for all.
      if (backend.compute.empty()) backend.facts.push_back({"attention", compute->attention_report()});
      backend.compute.push_back(std::move(compute));
      continue;
    }
#endif
    backend.compute.push_back(make_aten_compute(model, layout, plan));
  }
  return backend;
}

MemoryUse temporary_memory(const std::string& backend) {
  require_compiled_in(backend);
#ifdef SLIDEDP_WITH_CUDA
  if (backend == "cuda") {
    const CudaTemporaries use = cuda_temporaries();
    return {0, use.in_use, use.peak};
  }
#endif
  const AllocatorUse use = counted_memory();
  return {0, use.in_use, use.peak};
}

void reset_temporary_peak(const std::string& backend) {
  require_compiled_in(backend);
#ifdef SLIDEDP_WITH_CUDA
  if (backend == "cuda") return reset_cuda_temporaries_peak();
#endif
  reset_counted_peak();
}

}  // namespace slidedp
