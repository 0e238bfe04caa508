#include "runtime/device/cuda/gpus.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdlib>

#include "model/base/format.h"
#include "runtime/device/cuda/cuda_error.h"

namespace slidedp {
namespace {

constexpr int kOldestMajor = 8;

std::string version_text(int version) { return fmt::format("{}.{}", version / 1000, version % 1000 / 10); }

Gpu look_at(int ordinal) {
  Gpu gpu;
  cudaDeviceProp properties{};
  check_cuda(cudaGetDeviceProperties(&properties, ordinal), "cudaGetDeviceProperties");
  gpu.name = properties.name;
  gpu.major = properties.major;
  gpu.minor = properties.minor;
  if (gpu.major < kOldestMajor) return gpu;  // will be refused
  size_t free = 0, total = 0;
  check_cuda(cudaSetDevice(ordinal), fmt::format("Using GPU {} ({})", ordinal, gpu.name).c_str());
  check_cuda(cudaMemGetInfo(&free, &total), "cudaMemGetInfo");
  gpu.free_bytes = static_cast<int64_t>(free);
  gpu.total_bytes = static_cast<int64_t>(total);
  return gpu;
}

void check_driver(const CudaMachine& machine) {
  if (machine.driver_version == 0) {
    fail(
        "No NVIDIA driver is installed (or none that this process may use), so the cuda backend cannot run; install "
        "one, or use a plan for the cpu backend.");
  }
  // Within a major version older drivers run newer programs.
  if (machine.driver_version / 1000 < machine.runtime_version / 1000) {
    failf("The NVIDIA driver knows CUDA up to {}, but this program was built with CUDA {}; install a newer driver.",
          version_text(machine.driver_version), version_text(machine.runtime_version));
  }
}

void check_count(const CudaMachine& machine, const GpuRequest& request) {
  const std::string mask =
      machine.visible_devices ? fmt::format(" (CUDA_VISIBLE_DEVICES is \"{}\")", *machine.visible_devices) : "";
  if (!machine.problem.empty() || machine.visible == 0) {
    failf("This process sees no GPU{}{}; the cuda backend needs one a rank.", mask,
          machine.problem.empty() ? "" : ": " + machine.problem);
  }
  if (!request.share && machine.visible < request.ranks) {
    failf(
        "The plan has {} ranks, but this process sees {} GPU{}{}; plan again with --pin ranks={}, or for a test let "
        "the ranks share one with --share-gpu.",
        request.ranks, machine.visible, machine.visible == 1 ? "" : "s", mask, machine.visible);
  }
}

void check_gpu(const Gpu& gpu, int ordinal, int64_t wanted, int ranks) {
  if (gpu.major < kOldestMajor) {
    failf("GPU {} ({}) has compute capability {}.{}, but SlideDP needs 8.0 (Ampere) or newer.", ordinal, gpu.name,
          gpu.major, gpu.minor);
  }
  if (wanted > gpu.free_bytes) {
    failf(
        "GPU {} ({}) has {} free of {}, but the plan needs {}{}; another process may hold memory (see nvidia-smi): end "
        "it, or plan again with a smaller --gpu-memory.",
        ordinal, gpu.name, format_bytes(gpu.free_bytes), format_bytes(gpu.total_bytes), format_bytes(wanted),
        ranks > 1 ? fmt::format(" for the {} ranks that share it", ranks) : "");
  }
}

}  // namespace

CudaMachine look_at_gpus(int gpus) {
  // One hardware queue for each stream, up to CUDA's most: streams that share one wait for each other.
  setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 1);
  CudaMachine machine;
  if (const char* mask = std::getenv("CUDA_VISIBLE_DEVICES")) machine.visible_devices = mask;
  if (cudaDriverGetVersion(&machine.driver_version) != cudaSuccess) machine.driver_version = 0;
  cudaRuntimeGetVersion(&machine.runtime_version);
  const cudaError_t status = cudaGetDeviceCount(&machine.visible);
  if (status != cudaSuccess) {
    machine.visible = 0;
    machine.problem = describe(status);
  }
  cudaGetLastError();
  for (int i = 0; i < std::min(gpus, machine.visible); ++i) machine.gpus.push_back(look_at(i));
  return machine;
}

std::vector<int> choose_gpus(const CudaMachine& machine, const GpuRequest& request) {
  check_driver(machine);
  check_count(machine, request);
  const int used = request.share ? 1 : request.ranks;
  const int ranks_each = request.share ? request.ranks : 1;
  for (int i = 0; i < used; ++i) {
    check_gpu(machine.gpus.at(static_cast<size_t>(i)), i, request.bytes_per_rank * ranks_each, ranks_each);
  }
  std::vector<int> ordinals;
  for (int rank = 0; rank < request.ranks; ++rank) ordinals.push_back(request.share ? 0 : rank);
  return ordinals;
}

}  // namespace slidedp
