#include <algorithm>

#include "runtime/comm/local/cuda/sum.h"

namespace slidedp {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kMostBlocks = 1024;

struct Sources {
  const void* data[kMostSources];
  int count;
};

__device__ float to_float(float value) { return value; }
__device__ float to_float(uint16_t value) { return __uint_as_float(static_cast<uint32_t>(value) << 16); }

__device__ void store(float sum, float* to) { *to = sum; }

// Nearest, ties to even. A NaN of this GPU has all low bits set, which the addition would carry into the sign.
__device__ void store(float sum, uint16_t* to) {
  const uint32_t bits = __float_as_uint(sum);
  *to = sum != sum ? uint16_t{0x7fc0} : static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

// For tests on one GPU; simple rather than fast. `to` may be one of the sources.
template <typename T>
__global__ void __launch_bounds__(kThreads) sum_kernel(Sources sources, T* to, int64_t elements) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < elements; i += step) {
    float sum = to_float(static_cast<const T*>(sources.data[0])[i]);
    for (int source = 1; source < sources.count; ++source) {
      sum = __fadd_rn(sum, to_float(static_cast<const T*>(sources.data[source])[i]));
    }
    store(sum, to + i);
  }
}

}  // namespace

cudaError_t sum_in_order_on_gpu(const void* const* sources, int count, void* to, int64_t elements, bool bf16,
                                cudaStream_t stream) {
  if (count < 1 || count > kMostSources) return cudaErrorInvalidValue;
  if (elements == 0) return cudaSuccess;
  Sources all{};
  all.count = count;
  std::copy_n(sources, count, all.data);
  const auto blocks = static_cast<unsigned>(std::min(kMostBlocks, (elements + kThreads - 1) / kThreads));
  if (bf16) {
    sum_kernel<<<blocks, kThreads, 0, stream>>>(all, static_cast<uint16_t*>(to), elements);
  } else {
    sum_kernel<<<blocks, kThreads, 0, stream>>>(all, static_cast<float*>(to), elements);
  }
  return cudaGetLastError();
}

}  // namespace slidedp
