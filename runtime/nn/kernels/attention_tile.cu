#include "runtime/nn/kernels/attention_tile.h"
#include "runtime/nn/kernels/device_math.cuh"

namespace slidedp::nn {
namespace {

constexpr int kThreads = 256;

// One block a row.
__global__ void __launch_bounds__(kThreads)
    softmax(ScoreTile tile, const float* scores, uint16_t* probabilities, float* log_sum_exp) {
  __shared__ float scratch[2][kThreads / kWarp];
  const int64_t batch = blockIdx.x / tile.rows, row = blockIdx.x % tile.rows;
  const int64_t at = blockIdx.x * tile.stride, visible = min(tile.first_query + row + 1, tile.keys);
  float maximum = -INFINITY;
  for (int64_t key = threadIdx.x; key < visible; key += kThreads) maximum = fmaxf(maximum, scores[at + key]);
  for (int step = kWarp / 2; step > 0; step /= 2) {
    maximum = fmaxf(maximum, __shfl_xor_sync(kFullWarp, maximum, step));
  }
  if (threadIdx.x % kWarp == 0) scratch[0][threadIdx.x / kWarp] = maximum;
  __syncthreads();
  for (int warp = 0; warp < kThreads / kWarp; ++warp) maximum = fmaxf(maximum, scratch[0][warp]);
  float sum = 0;
  for (int64_t key = threadIdx.x; key < visible; key += kThreads) {
    sum += expf((scores[at + key] - maximum) * tile.scale);
  }
  sum = block_sum(sum, scratch[1]);
  const float inverse = 1.0f / sum;
  for (int64_t key = threadIdx.x; key < tile.keys; key += kThreads) {
    const float value = key < visible ? expf((scores[at + key] - maximum) * tile.scale) * inverse : 0.0f;
    probabilities[at + key] = to_bf16_bits(value);
  }
  if (threadIdx.x == 0) log_sum_exp[batch * tile.row_stats_stride + row] = maximum * tile.scale + logf(sum);
}

__global__ void __launch_bounds__(kThreads)
    softmax_backward(ScoreTile tile, const float* scores, const float* gradients, const float* log_sum_exp,
                     const float* dot, uint16_t* probabilities, uint16_t* score_gradients) {
  const int64_t batch = blockIdx.x / tile.rows, row = blockIdx.x % tile.rows;
  const int64_t at = blockIdx.x * tile.stride, visible = min(tile.first_query + row + 1, tile.keys);
  const float normaliser = log_sum_exp[batch * tile.row_stats_stride + row];
  const float row_dot = dot[batch * tile.row_stats_stride + row];
  for (int64_t key = threadIdx.x; key < tile.keys; key += kThreads) {
    float probability = 0, gradient = 0;
    if (key < visible) {
      probability = expf(scores[at + key] * tile.scale - normaliser);
      gradient = tile.scale * probability * (gradients[at + key] - row_dot);
    }
    probabilities[at + key] = to_bf16_bits(probability);
    score_gradients[at + key] = to_bf16_bits(gradient);
  }
}

// One warp a (token, head).
__global__ void __launch_bounds__(kThreads) dots(const uint16_t* out, const uint16_t* out_gradient, int64_t tokens,
                                                 int64_t heads, int64_t head_dim, float* dot) {
  const int64_t item = (blockIdx.x * static_cast<int64_t>(kThreads) + threadIdx.x) / kWarp;
  if (item >= tokens * heads) return;
  float sum = 0;
  for (int64_t i = threadIdx.x % kWarp; i < head_dim; i += kWarp) {
    sum += from_bf16_bits(out[item * head_dim + i]) * from_bf16_bits(out_gradient[item * head_dim + i]);
  }
  sum = warp_sum(sum);
  if (threadIdx.x % kWarp == 0) dot[item % heads * tokens + item / heads] = sum;
}

}  // namespace

void softmax_rows(const ScoreTile& tile, const float* scores, uint16_t* probabilities, float* log_sum_exp,
                  cudaStream_t stream) {
  const auto grid = static_cast<unsigned>(tile.batch * tile.rows);
  softmax<<<grid, kThreads, 0, stream>>>(tile, scores, probabilities, log_sum_exp);
  check_launch("softmax_rows");
}

void softmax_rows_backward(const ScoreTile& tile, const float* scores, const float* gradients, const float* log_sum_exp,
                           const float* dot, uint16_t* probabilities, uint16_t* score_gradients, cudaStream_t stream) {
  const auto grid = static_cast<unsigned>(tile.batch * tile.rows);
  softmax_backward<<<grid, kThreads, 0, stream>>>(tile, scores, gradients, log_sum_exp, dot, probabilities,
                                                  score_gradients);
  check_launch("softmax_rows_backward");
}

void output_dots(const uint16_t* out, const uint16_t* out_gradient, int64_t tokens, int64_t heads, int64_t head_dim,
                 float* dot, cudaStream_t stream) {
  const auto grid = static_cast<unsigned>((tokens * heads * kWarp + kThreads - 1) / kThreads);
  dots<<<grid, kThreads, 0, stream>>>(out, out_gradient, tokens, heads, head_dim, dot);
  check_launch("output_dots");
}

}  // namespace slidedp::nn
