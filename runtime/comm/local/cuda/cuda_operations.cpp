#include "runtime/comm/local/cuda/cuda_operations.h"

#include <cuda_runtime_api.h>

#include "runtime/comm/local/cuda/sum.h"
#include "runtime/device/cuda/cuda_device.h"
#include "runtime/device/cuda/cuda_error.h"

namespace slidedp {
namespace {

class CudaOperations final : public LocalOperations {
 public:
  std::shared_ptr<void> mark() override {
    cudaEvent_t event = nullptr;
    check_cuda(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreate");
    std::shared_ptr<void> point(event, [](void* point) {
      cudaEventDestroy(static_cast<cudaEvent_t>(point));
      cudaGetLastError();
    });
    check_cuda(cudaEventRecord(event, current_cuda_stream()), "cudaEventRecord");
    return point;
  }

  void follow(const std::shared_ptr<void>& point) override {
    if (point == nullptr) return;
    check_cuda(cudaStreamWaitEvent(current_cuda_stream(), static_cast<cudaEvent_t>(point.get()), 0),
               "cudaStreamWaitEvent");
  }

  void copy(void* to, const void* from, int64_t bytes) override {
    check_cuda(cudaMemcpyAsync(to, from, static_cast<size_t>(bytes), cudaMemcpyDeviceToDevice, current_cuda_stream()),
               "cudaMemcpyAsync");
  }

  void sum(std::span<const void* const> sources, void* to, int64_t elements, DType type) override {
    check_cuda(sum_in_order_on_gpu(sources.data(), static_cast<int>(sources.size()), to, elements, type == DType::bf16,
                                   current_cuda_stream()),
               "the sum kernel");
  }
};

}  // namespace

std::shared_ptr<LocalOperations> make_cuda_operations() { return std::make_shared<CudaOperations>(); }

}  // namespace slidedp
