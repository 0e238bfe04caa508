#include <algorithm>

#include "runtime/device/cuda/gather_rows.h"

namespace slidedp {
namespace {

constexpr int kWarp = 32;
constexpr int kWarpsPerBlock = 8;
// The link is the limit, not the GPU: few blocks leave the rest of it to the compute lane, and this many 16-byte reads
// in flight (64 blocks x 256 threads x 4) cover the link's latency.
constexpr int64_t kMostBlocks = 64;

// One warp a row, so that the row's index crosses the link once. Unit: what one lane moves at a time.
template <typename Unit>
__global__ void __launch_bounds__(kWarp* kWarpsPerBlock)
    gather_rows_kernel(Unit* to, const Unit* from, const int32_t* rows, int64_t count, int64_t units) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kWarpsPerBlock + threadIdx.x / kWarp;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kWarpsPerBlock;
  constexpr int kInFlight = 4;
  for (int64_t row = first; row < count; row += step) {
    const int32_t index = __shfl_sync(0xffffffffu, lane == 0 ? rows[row] : 0, 0);
    const Unit* source = from + static_cast<int64_t>(index) * units;
    Unit* target = to + row * units;
    for (int64_t begin = lane; begin < units; begin += kWarp * kInFlight) {
      Unit moved[kInFlight];
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) {
        if (begin + i * kWarp < units) moved[i] = source[begin + i * kWarp];
      }
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) {
        if (begin + i * kWarp < units) target[begin + i * kWarp] = moved[i];
      }
    }
  }
}

template <typename Unit>
cudaError_t launch(void* device, const void* host_base, const int32_t* rows, int64_t count, int64_t row_bytes,
                   cudaStream_t stream) {
  const int64_t blocks = std::min(kMostBlocks, (count + kWarpsPerBlock - 1) / kWarpsPerBlock);
  gather_rows_kernel<Unit><<<static_cast<unsigned>(blocks), kWarp * kWarpsPerBlock, 0, stream>>>(
      static_cast<Unit*>(device), static_cast<const Unit*>(host_base), rows, count,
      row_bytes / static_cast<int64_t>(sizeof(Unit)));
  return cudaGetLastError();
}

}  // namespace

cudaError_t gather_rows(void* device, const void* host_base, const int32_t* rows, int64_t count, int64_t row_bytes,
                        cudaStream_t stream) {
  if (count == 0 || row_bytes == 0) return cudaSuccess;
  const auto alignment =
      reinterpret_cast<uintptr_t>(device) | reinterpret_cast<uintptr_t>(host_base) | static_cast<uintptr_t>(row_bytes);
  if (alignment % 16 == 0) return launch<uint4>(device, host_base, rows, count, row_bytes, stream);
  if (alignment % 4 == 0) return launch<uint32_t>(device, host_base, rows, count, row_bytes, stream);
  return launch<uint8_t>(device, host_base, rows, count, row_bytes, stream);
}

}  // namespace slidedp
