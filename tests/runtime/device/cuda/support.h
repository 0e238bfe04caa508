// Helpers of the CUDA device tests.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "model/base/error.h"
#include "runtime/device/cuda/cuda_device.h"
#include "runtime/device/cuda/cuda_error.h"
#include "runtime/host/arena.h"
#include "tests/runtime/device/cuda/kernels.h"
#include "tests/runtime/device/support.h"
#include "tests/support/gpu.h"

namespace slidedp::test {

template <typename F>
std::string error_of(F&& function) {
  try {
    function();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

// Pinned host memory that a kernel may read while the host writes it. Sets itself at the end, so that a failed
// assertion does not hang.
class PinnedFlag {
 public:
  PinnedFlag() {
    check_cuda(cudaHostAlloc(&flag_, sizeof(int32_t), cudaHostAllocPortable | cudaHostAllocMapped), "cudaHostAlloc");
    *static_cast<volatile int32_t*>(flag_) = 0;
  }
  ~PinnedFlag() {
    set();
    cudaDeviceSynchronize();  // a kernel may still read it
    cudaFreeHost(flag_);
  }
  PinnedFlag(const PinnedFlag&) = delete;
  PinnedFlag& operator=(const PinnedFlag&) = delete;
  void set() { *static_cast<volatile int32_t*>(flag_) = 1; }
  const int32_t* data() const { return static_cast<const int32_t*>(flag_); }

 private:
  void* flag_ = nullptr;
};

// Keeps the stream busy until the flag is set.
inline void hold(Device& device, Stream& stream, const PinnedFlag& flag) {
  device.launch(stream, [data = flag.data()] { spin_until_set(data, current_cuda_stream()); });
}

// Registered host memory on pages of its own.
template <typename T>
class PinnedVector {
 public:
  PinnedVector(Device& device, int64_t count)
      : device_(&device), arena_(count * static_cast<int64_t>(sizeof(T)), "pinned test data") {
    device.register_host(arena_.data(), arena_.bytes());
  }
  ~PinnedVector() { device_->unregister_host(arena_.data()); }
  PinnedVector(const PinnedVector&) = delete;
  PinnedVector& operator=(const PinnedVector&) = delete;
  T* data() { return static_cast<T*>(arena_.data()); }
  T& operator[](int64_t i) { return data()[i]; }

 private:
  Device* device_;
  Arena arena_;
};

// Pageable copies that wait: for preparing and reading a test's data.
template <typename T>
DeviceMemory upload(Device& device, const std::vector<T>& values) {
  DeviceMemory memory = device.allocate(static_cast<int64_t>(values.size() * sizeof(T)), "test data");
  check_cuda(cudaMemcpy(memory.data(), values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice), "upload");
  check_cuda(cudaDeviceSynchronize(), "upload");
  return memory;
}
template <typename T>
std::vector<T> download(const DeviceMemory& memory) {
  std::vector<T> values(static_cast<size_t>(memory.bytes()) / sizeof(T));
  check_cuda(cudaMemcpy(values.data(), memory.data(), values.size() * sizeof(T), cudaMemcpyDeviceToHost), "download");
  return values;
}

}  // namespace slidedp::test
