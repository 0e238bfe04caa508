#include <algorithm>
#include <stdexcept>

#include "runtime/nn/kernels/device_math.cuh"
#include "runtime/nn/kernels/rms_norm.h"

namespace slidedp::nn {
namespace {

constexpr int kMaxThreads = 512;
constexpr int kMaxWarps = kMaxThreads / kWarp;
// Blocks of the backward pass: each owns a contiguous range of rows, so their number is part of the order of the sums
// and depends on the shape alone. One wave on a card of so many multiprocessors (H100, H200).
constexpr int64_t kMultiprocessors = 132;

// One block a row; a thread holds up to kVectors vectors of it.
template <int kVectors>
__global__ void __launch_bounds__(kMaxThreads)
    forward(const uint16_t* x, const uint16_t* weight, float eps, int width, float* rstd, uint16_t* out) {
  __shared__ float scratch[kMaxWarps];
  const int64_t row = blockIdx.x;
  const int vectors = width / 8;
  uint4 raw[kVectors];
  float squares = 0;
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int at = threadIdx.x + i * blockDim.x;
    if (at >= vectors) continue;
    raw[i] = load<8>(x + row * width + at * 8);
    float values[8];
    unpack<8>(raw[i], values);
#pragma unroll
    for (int j = 0; j < 8; ++j) squares += values[j] * values[j];
  }
  const float scale = 1.0f / sqrtf(block_sum(squares, scratch) / width + eps);
  if (rstd != nullptr && threadIdx.x == 0) rstd[row] = scale;
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int at = threadIdx.x + i * blockDim.x;
    if (at >= vectors) continue;
    float values[8], gain[8];
    unpack<8>(raw[i], values);
    unpack<8>(load<8>(weight + at * 8), gain);
#pragma unroll
    for (int j = 0; j < 8; ++j) values[j] *= scale * gain[j];
    store<8>(out + row * width + at * 8, values);
  }
}

// A block goes through its rows; a thread keeps its columns' share of the weight gradient in registers and loads the
// next row while the block adds up this one.
template <int kVectors>
__global__ void __launch_bounds__(kMaxThreads)
    backward(const uint16_t* x, const uint16_t* weight, const float* rstd, const uint16_t* gradient, int64_t rows,
             int64_t rows_per_block, int width, uint16_t* dx, bool add, float* partials, bool continued) {
  __shared__ float scratch[2][kMaxWarps];
  const int vectors = width / 8;
  const int64_t begin = blockIdx.x * rows_per_block, end = min(begin + rows_per_block, rows);
  float sums[kVectors][8];
  uint4 next_x[kVectors], next_gradient[kVectors];
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int at = threadIdx.x + i * blockDim.x;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      sums[i][j] = continued && at < vectors ? partials[blockIdx.x * static_cast<int64_t>(width) + at * 8 + j] : 0.0f;
    }
    if (at >= vectors || begin >= end) continue;
    next_x[i] = load<8>(x + begin * width + at * 8);
    next_gradient[i] = load<8>(gradient + begin * width + at * 8);
  }
  for (int64_t row = begin; row < end; ++row) {
    uint4 this_x[kVectors], this_gradient[kVectors], residual[kVectors];
    float dot = 0;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int at = threadIdx.x + i * blockDim.x;
      if (at >= vectors) continue;
      this_x[i] = next_x[i];
      this_gradient[i] = next_gradient[i];
      if (add) residual[i] = load<8>(dx + row * width + at * 8);
      if (row + 1 < end) {
        next_x[i] = load<8>(x + (row + 1) * width + at * 8);
        next_gradient[i] = load<8>(gradient + (row + 1) * width + at * 8);
      }
      float values[8], slopes[8], gain[8];
      unpack<8>(this_x[i], values);
      unpack<8>(this_gradient[i], slopes);
      unpack<8>(load<8>(weight + at * 8), gain);
#pragma unroll
      for (int j = 0; j < 8; ++j) dot += slopes[j] * gain[j] * values[j];
    }
    const float scale = rstd[row];
    const float projection = block_sum(dot, scratch[row & 1]) * scale * scale * scale / width;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int at = threadIdx.x + i * blockDim.x;
      if (at >= vectors) continue;
      float values[8], slopes[8], gain[8], result[8];
      unpack<8>(this_x[i], values);
      unpack<8>(this_gradient[i], slopes);
      unpack<8>(load<8>(weight + at * 8), gain);
      if (add) {
        unpack<8>(residual[i], result);
      } else {
#pragma unroll
        for (int j = 0; j < 8; ++j) result[j] = 0.0f;
      }
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        result[j] += scale * slopes[j] * gain[j] - values[j] * projection;
        sums[i][j] += slopes[j] * values[j] * scale;
      }
      store<8>(dx + row * width + at * 8, result);
    }
  }
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int at = threadIdx.x + i * blockDim.x;
    if (at >= vectors) continue;
#pragma unroll
    for (int j = 0; j < 8; ++j) partials[blockIdx.x * static_cast<int64_t>(width) + at * 8 + j] = sums[i][j];
  }
}

struct Shape {
  int vectors_per_thread, threads;
};

Shape block_shape(int64_t width) {
  if (width % kVectorElements != 0 || width > kMaxNormWidth) {
    throw std::logic_error("the norm kernel takes widths that are multiples of 8, up to 16384");
  }
  const int vectors = static_cast<int>(width / kVectorElements);
  int per_thread = 1;
  while (per_thread * kMaxThreads < vectors) per_thread *= 2;
  const int threads = (vectors + per_thread - 1) / per_thread;
  return {per_thread, (threads + kWarp - 1) / kWarp * kWarp};
}

}  // namespace

void rms_norm(const uint16_t* x, const uint16_t* weight, float eps, int64_t rows, int64_t width, float* rstd,
              uint16_t* out, cudaStream_t stream) {
  if (rows == 0) return;
  const Shape shape = block_shape(width);
  const auto grid = static_cast<unsigned>(rows);
  const int columns = static_cast<int>(width);
  switch (shape.vectors_per_thread) {
    case 1:
      forward<1><<<grid, shape.threads, 0, stream>>>(x, weight, eps, columns, rstd, out);
      break;
    case 2:
      forward<2><<<grid, shape.threads, 0, stream>>>(x, weight, eps, columns, rstd, out);
      break;
    default:
      forward<4><<<grid, shape.threads, 0, stream>>>(x, weight, eps, columns, rstd, out);
  }
  check_launch("rms_norm");
}

int64_t rms_norm_partial_rows(int64_t rows, int64_t width) {
  const Shape shape = block_shape(width);
  // What registers allow: about 60, 80 and 128 a thread.
  const int resident = shape.vectors_per_thread == 1 ? 1024 : shape.vectors_per_thread == 2 ? 640 : 512;
  return std::min(rows, kMultiprocessors * std::max(1, resident / shape.threads));
}

void rms_norm_backward(const uint16_t* x, const uint16_t* weight, const float* rstd, const uint16_t* gradient,
                       int64_t rows, int64_t width, uint16_t* dx, bool add, float* partials, bool continued,
                       cudaStream_t stream) {
  if (rows == 0) return;
  const Shape shape = block_shape(width);
  const int64_t blocks = rms_norm_partial_rows(rows, width), rows_per_block = (rows + blocks - 1) / blocks;
  const auto grid = static_cast<unsigned>(blocks);
  const int columns = static_cast<int>(width);
  const auto launch = [&](auto kernel) {
    kernel<<<grid, shape.threads, 0, stream>>>(x, weight, rstd, gradient, rows, rows_per_block, columns, dx, add,
                                               partials, continued);
  };
  if (shape.vectors_per_thread == 1) launch(backward<1>);
  if (shape.vectors_per_thread == 2) launch(backward<2>);
  if (shape.vectors_per_thread == 4) launch(backward<4>);
  check_launch("rms_norm_backward");
}

}  // namespace slidedp::nn
