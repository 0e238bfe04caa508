#include "runtime/device/cuda/task_trail.h"

#include <cudaTypedefs.h>

#include <utility>

namespace slidedp {
namespace {

// libcuda is never linked: it does not exist on machines without a driver.
PFN_cuStreamWriteValue32_v11070 find_write_value() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found{};
  const cudaError_t status =
      cudaGetDriverEntryPointByVersion("cuStreamWriteValue32", &function, 12000, cudaEnableDefault, &found);
  if (status == cudaSuccess && found == cudaDriverEntryPointSuccess) {
    return reinterpret_cast<PFN_cuStreamWriteValue32_v11070>(function);
  }
  cudaGetLastError();
  return nullptr;
}

PFN_cuStreamWriteValue32_v11070 write_value() {
  static const auto function = find_write_value();
  return function;
}

}  // namespace

TaskTrail::TaskTrail(cudaStream_t stream) : stream_(stream) {
  if (write_value() == nullptr) return;
  void* word = nullptr;
  if (cudaHostAlloc(&word, sizeof(uint32_t), cudaHostAllocMapped) != cudaSuccess ||
      cudaHostGetDevicePointer(&done_on_device_, word, 0) != cudaSuccess) {
    cudaGetLastError();
    cudaFreeHost(word);
    return;
  }
  done_ = static_cast<uint32_t*>(word);
  *done_ = 0;
}

TaskTrail::~TaskTrail() {
  cudaFreeHost(done_);
  cudaGetLastError();
}

uint32_t TaskTrail::begin(std::shared_ptr<const std::string> name) {
  const std::lock_guard lock(mutex_);
  ++begun_;
  if (done_ == nullptr) return begun_;
  while (!tasks_.empty() && is_done(tasks_.front().number)) tasks_.pop_front();
  tasks_.push_back({begun_, std::move(name)});
  return begun_;
}

void TaskTrail::end(uint32_t number) {
  if (done_ == nullptr) return;
  // A failure here shows in the next call that matters.
  write_value()(stream_, reinterpret_cast<CUdeviceptr>(done_on_device_), number, CU_STREAM_WRITE_VALUE_DEFAULT);
}

// Numbers wrap around in long runs.
bool TaskTrail::is_done(uint32_t number) const {
  const uint32_t done = std::atomic_ref<uint32_t>(*done_).load(std::memory_order_acquire);
  return static_cast<int32_t>(done - number) >= 0;
}

std::string TaskTrail::under_way() const {
  const std::lock_guard lock(mutex_);
  for (const Task& task : tasks_) {
    if (!is_done(task.number)) return *task.name;
  }
  return {};
}

}  // namespace slidedp
