#include "runtime/nn/kernels/cross_entropy.h"
#include "runtime/nn/kernels/device_math.cuh"

namespace slidedp::nn {
namespace {

constexpr int kThreads = 1024;
constexpr float kLog2E = 1.44269504088896341f;
constexpr int32_t kIgnored = -100;

// A sum of exponentials relative to the largest exponent so far: sum * 2^((x - maximum) * log2 e).
struct ExpSum {
  float maximum = -INFINITY;
  float sum = 0;
};

// Symmetric to the bit, so that every lane of a butterfly gets the same.
__device__ inline ExpSum merge(const ExpSum& a, const ExpSum& b) {
  // Written so that NaN is passed on.
  const float maximum = a.maximum > b.maximum || isnan(a.maximum) ? a.maximum : b.maximum;
  if (maximum == -INFINITY) return {maximum, 0.0f};
  const float left = __fmul_rn(a.sum, exp2f((a.maximum - maximum) * kLog2E));
  const float right = __fmul_rn(b.sum, exp2f((b.maximum - maximum) * kLog2E));
  return {maximum, __fadd_rn(left, right)};
}

__device__ inline ExpSum warp_merge(ExpSum value) {
  for (int step = kWarp / 2; step > 0; step /= 2) {
    const ExpSum other{__shfl_xor_sync(kFullWarp, value.maximum, step), __shfl_xor_sync(kFullWarp, value.sum, step)};
    value = merge(value, other);
  }
  return value;
}

// Over the block; every thread gets the same bits.
__device__ inline ExpSum block_merge(ExpSum value) {
  __shared__ ExpSum scratch[kThreads / kWarp];
  __shared__ ExpSum result;
  value = warp_merge(value);
  if (threadIdx.x % kWarp == 0) scratch[threadIdx.x / kWarp] = value;
  __syncthreads();
  if (threadIdx.x < kWarp) {
    value = warp_merge(scratch[threadIdx.x]);
    if (threadIdx.x == 0) result = value;
  }
  __syncthreads();
  return result;
}

// The 8 logits from column `at`; what lies beyond the vocabulary is -infinity.
__device__ inline void load_logits(const uint16_t* row, int64_t at, int64_t vocabulary, float (&values)[8]) {
  unpack<8>(load<8>(row + at), values);
  if (at + 8 <= vocabulary) return;
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    if (at + j >= vocabulary) values[j] = -INFINITY;
  }
}

__global__ void __launch_bounds__(kThreads)
    softmax_gradient(uint16_t* logits, const int32_t* targets, int64_t vocabulary, int64_t stride, double* losses) {
  static_assert(kThreads / kWarp == kWarp);
  uint16_t* row = logits + blockIdx.x * stride;
  const int64_t target = targets[blockIdx.x];
  if (target == kIgnored) {
    const float zeros[8] = {};
    for (int64_t at = threadIdx.x * 8; at < vocabulary; at += kThreads * 8) store<8>(row + at, zeros);
    if (threadIdx.x == 0) losses[blockIdx.x] = 0;
    return;
  }
  const bool valid = target >= 0 && target < vocabulary;
  const float target_logit = valid ? from_bf16_bits(row[target]) : __int_as_float(0x7fc00000);
  ExpSum mine;
  for (int64_t at = threadIdx.x * 8; at < vocabulary; at += kThreads * 8) {
    float values[8];
    load_logits(row, at, vocabulary, values);
    ExpSum here;
#pragma unroll
    for (int j = 0; j < 8; ++j) here.maximum = values[j] > here.maximum ? values[j] : here.maximum;
#pragma unroll
    for (int j = 0; j < 8; ++j) here.sum += exp2f((values[j] - here.maximum) * kLog2E);
    mine = merge(mine, here);
  }
  // Also the barrier between reading the target's logit and writing over it.
  const ExpSum total = block_merge(mine);
  const float inverse = valid ? 1.0f / total.sum : target_logit;
  for (int64_t at = threadIdx.x * 8; at < vocabulary; at += kThreads * 8) {
    float values[8];
    load_logits(row, at, vocabulary, values);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      values[j] = exp2f((values[j] - total.maximum) * kLog2E) * inverse - (at + j == target ? 1.0f : 0.0f);
    }
    store<8>(row + at, values);
  }
  if (threadIdx.x == 0) {
    losses[blockIdx.x] = log(static_cast<double>(total.sum)) + (static_cast<double>(total.maximum) - target_logit);
  }
}

__global__ void __launch_bounds__(kThreads) sum_kernel(const double* losses, int64_t tokens, double* sum) {
  __shared__ double shared[kThreads];
  double mine = 0;
  for (int64_t t = threadIdx.x; t < tokens; t += kThreads) mine += losses[t];
  shared[threadIdx.x] = mine;
  __syncthreads();
  for (int step = kThreads / 2; step > 0; step /= 2) {
    if (static_cast<int>(threadIdx.x) < step) shared[threadIdx.x] += shared[threadIdx.x + step];
    __syncthreads();
  }
  if (threadIdx.x == 0) *sum = shared[0];
}

}  // namespace

void cross_entropy(uint16_t* logits, const int32_t* targets, int64_t tokens, int64_t vocabulary, int64_t stride,
                   double* losses, cudaStream_t stream) {
  if (tokens == 0) return;
  softmax_gradient<<<static_cast<unsigned>(tokens), kThreads, 0, stream>>>(logits, targets, vocabulary, stride, losses);
  check_launch("cross_entropy");
}

void sum_losses(const double* losses, int64_t tokens, double* sum, cudaStream_t stream) {
  sum_kernel<<<1, kThreads, 0, stream>>>(losses, tokens, sum);
  check_launch("sum_losses");
}

}  // namespace slidedp::nn
