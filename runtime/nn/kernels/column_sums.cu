#include <algorithm>

#include "runtime/nn/kernels/column_sums.h"
#include "runtime/nn/kernels/device_math.cuh"

namespace slidedp::nn {
namespace {

constexpr int64_t kMaxParts = 128;
constexpr int kRowLanes = 8;  // rows that a block of 256 threads reads at once
constexpr int kColumnsPerBlock = kWarp * 8;

// Thread (lane, row lane): 8 columns of every eighth row of the block's part.
__global__ void __launch_bounds__(kWarp* kRowLanes)
    partials_kernel(const uint16_t* values, int64_t rows, int64_t rows_per_part, int64_t width, float* partials) {
  __shared__ float shared[kRowLanes][kColumnsPerBlock];
  const int lane = threadIdx.x % kWarp, row_lane = threadIdx.x / kWarp;
  const int64_t column = blockIdx.x * static_cast<int64_t>(kColumnsPerBlock) + lane * 8;
  const int64_t begin = blockIdx.y * rows_per_part, end = min(begin + rows_per_part, rows);
  float sums[8] = {};
  if (column < width) {
    for (int64_t row = begin + row_lane; row < end; row += kRowLanes) {
      float row_values[8];
      unpack<8>(load<8>(values + row * width + column), row_values);
#pragma unroll
      for (int j = 0; j < 8; ++j) sums[j] += row_values[j];
    }
  }
#pragma unroll
  for (int j = 0; j < 8; ++j) shared[row_lane][lane * 8 + j] = sums[j];
  __syncthreads();
  const int64_t mine = blockIdx.x * static_cast<int64_t>(kColumnsPerBlock) + threadIdx.x;
  if (mine >= width) return;
  float sum = 0;
  for (int r = 0; r < kRowLanes; ++r) sum += shared[r][threadIdx.x];
  partials[blockIdx.y * width + mine] = sum;
}

// 32 columns a block; each of its 8 warps adds every eighth row, then the warps' sums are added in order.
__global__ void __launch_bounds__(kWarp* kRowLanes)
    store_kernel(const float* partials, int64_t rows, int64_t width, int64_t stride, GradientRange range) {
  __shared__ double shared[kRowLanes][kWarp];
  const int lane = threadIdx.x % kWarp, row_lane = threadIdx.x / kWarp;
  const int64_t column = blockIdx.x * static_cast<int64_t>(kWarp) + lane;
  double sum = 0;
  if (column < width) {
    for (int64_t row = row_lane; row < rows; row += kRowLanes) sum += partials[row * stride + column];
  }
  shared[row_lane][lane] = sum;
  __syncthreads();
  if (row_lane != 0 || column >= width) return;
  for (int r = 1; r < kRowLanes; ++r) sum += shared[r][lane];
  store_gradient(range, column, static_cast<float>(sum));
}

}  // namespace

int64_t column_partial_rows(int64_t rows) { return std::min(kMaxParts, (rows + kRowLanes - 1) / kRowLanes); }

void column_partials(const uint16_t* values, int64_t rows, int64_t width, float* partials, cudaStream_t stream) {
  const int64_t parts = column_partial_rows(rows), rows_per_part = (rows + parts - 1) / parts;
  const dim3 grid(static_cast<unsigned>((width + kColumnsPerBlock - 1) / kColumnsPerBlock),
                  static_cast<unsigned>(parts));
  partials_kernel<<<grid, kWarp * kRowLanes, 0, stream>>>(values, rows, rows_per_part, width, partials);
  check_launch("column_partials");
}

void store_column_sums(const float* partials, int64_t rows, int64_t width, int64_t stride, GradientRange range,
                       cudaStream_t stream) {
  const auto grid = static_cast<unsigned>((width + kWarp - 1) / kWarp);
  store_kernel<<<grid, kWarp * kRowLanes, 0, stream>>>(partials, rows, width, stride, range);
  check_launch("store_column_sums");
}

}  // namespace slidedp::nn
