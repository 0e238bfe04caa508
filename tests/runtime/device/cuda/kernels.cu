#include "tests/runtime/device/cuda/kernels.h"

namespace slidedp::test {
namespace {

__global__ void scale_kernel(int32_t* data, int64_t count, int32_t factor, int32_t term) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += step) {
    data[i] = data[i] * factor + term;
  }
}

__global__ void spin_kernel(const volatile int32_t* flag) {
  while (*flag == 0) __nanosleep(1000);
}

__global__ void write_kernel(volatile int32_t* nowhere) { *nowhere = 1; }

}  // namespace

void scale(int32_t* data, int64_t count, int32_t factor, int32_t term, cudaStream_t stream) {
  scale_kernel<<<64, 256, 0, stream>>>(data, count, factor, term);
}

void spin_until_set(const int32_t* flag, cudaStream_t stream) { spin_kernel<<<1, 1, 0, stream>>>(flag); }

void write_nowhere(cudaStream_t stream) { write_kernel<<<1, 1, 0, stream>>>(reinterpret_cast<int32_t*>(64)); }

void launch_badly(cudaStream_t stream) { write_kernel<<<1, 4096, 0, stream>>>(nullptr); }

}  // namespace slidedp::test
