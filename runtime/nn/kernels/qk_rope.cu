#include <algorithm>
#include <stdexcept>

#include "runtime/nn/kernels/device_math.cuh"
#include "runtime/nn/kernels/qk_rope.h"

namespace slidedp::nn {
namespace {

constexpr int kThreads = 256;
constexpr int kForwardHeads = 4;   // heads of one token that a group of lanes handles with one load of cos and sin
constexpr int kBackwardHeads = 2;  // the same; more would not fit into registers
// Blocks of the backward pass, part of the order of its sums. A multiple of 132 multiprocessors (H100, H200).
constexpr int64_t kBackwardBlocks = 1056;

// How a head is spread over lanes: each lane holds `kVector` elements of the first half and their partners in the
// second; a group of `lanes` (a power of two) holds the head.
struct Split {
  int vector, lanes;
};

Split split_head(int head_dim) {
  const int half = head_dim / 2;
  int vector = 8;
  while (half % vector != 0) vector /= 2;
  int lanes = 1;
  while (lanes * vector < half) lanes *= 2;
  return {vector, lanes};
}

template <int kVector>
struct Angles {
  float cos[kVector], sin[kVector];
  __device__ void load_row(const Rotation& rotation, int64_t token, int half, int at) {
    const int position = rotation.positions[token];
    const bool valid = position >= 0 && position < rotation.table_positions;
    const int64_t row = valid ? position * static_cast<int64_t>(half) + at : 0;
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      cos[j] = valid ? rotation.cos[row + j] : __int_as_float(0x7fc00000);
      sin[j] = valid ? rotation.sin[row + j] : __int_as_float(0x7fc00000);
    }
  }
};

struct ForwardParams {
  HeadShape shape;
  Rotation rotation;
  HeadNorm norm;
  const uint16_t* in;
  uint16_t* out;
  int64_t in_stride, out_stride;
  float* rstd;
  uint32_t lanes, groups;  // lanes a head; groups of kForwardHeads heads a token
  uint32_t items;          // groups of all tokens
};

template <int kVector, bool kNorm>
__global__ void __launch_bounds__(kThreads) forward(ForwardParams p) {
  const int half = p.shape.head_dim / 2, all = p.shape.heads + p.shape.kv_heads;
  // 32 bits, since 64-bit divisions would show: the caller checks.
  const uint32_t item = blockIdx.x * (kThreads / p.lanes) + threadIdx.x / p.lanes;
  const int at = threadIdx.x % p.lanes * kVector;
  // Lanes without work stay for the sums.
  const bool active = item < p.items && at < half;
  const int64_t token = active ? item / p.groups : 0;
  const int first = active ? static_cast<int>(item % p.groups) * kForwardHeads : all;
  Raw<kVector> low[kForwardHeads], high[kForwardHeads];
#pragma unroll
  for (int h = 0; h < kForwardHeads; ++h) {
    if (first + h >= all) continue;
    const uint16_t* head = p.in + token * p.in_stride + static_cast<int64_t>(first + h) * p.shape.head_dim + at;
    low[h] = load<kVector>(head);
    high[h] = load<kVector>(head + half);
  }
  Angles<kVector> angles;
  if (active) angles.load_row(p.rotation, token, half, at);
#pragma unroll
  for (int h = 0; h < kForwardHeads; ++h) {
    const int head = first + h;
    const bool here = head < all;
    float a[kVector] = {}, b[kVector] = {};
    if (here) {
      unpack<kVector>(low[h], a);
      unpack<kVector>(high[h], b);
    }
    if constexpr (kNorm) {
      float squares = 0;
#pragma unroll
      for (int j = 0; j < kVector; ++j) squares += a[j] * a[j] + b[j] * b[j];
      const float scale = 1.0f / sqrtf(group_sum(squares, p.lanes) / p.shape.head_dim + p.norm.eps);
      if (here) {
        if (p.rstd != nullptr && at == 0) p.rstd[token * all + head] = scale;
        const uint16_t* weight = (head < p.shape.heads ? p.norm.query : p.norm.key) + at;
        float gain[kVector];
        unpack<kVector>(load<kVector>(weight), gain);
#pragma unroll
        for (int j = 0; j < kVector; ++j) a[j] *= scale * gain[j];
        unpack<kVector>(load<kVector>(weight + half), gain);
#pragma unroll
        for (int j = 0; j < kVector; ++j) b[j] *= scale * gain[j];
      }
    }
    if (!here) continue;
    float rotated_a[kVector], rotated_b[kVector];
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      rotated_a[j] = a[j] * angles.cos[j] - b[j] * angles.sin[j];
      rotated_b[j] = b[j] * angles.cos[j] + a[j] * angles.sin[j];
    }
    uint16_t* to = p.out + token * p.out_stride + static_cast<int64_t>(head) * p.shape.head_dim + at;
    store<kVector>(to, rotated_a);
    store<kVector>(to + half, rotated_b);
  }
}

struct BackwardParams {
  HeadShape shape;
  Rotation rotation;
  HeadNorm norm;
  const float* rstd;
  HeadGradients gradients;
  uint16_t* qkv;
  float* partials;
  int lanes, groups;
  int64_t tokens_per_block;
};

// Where the gradient of one head of a token comes from.
__device__ inline const uint16_t* head_gradient(const BackwardParams& p, int64_t token, int head) {
  const int heads = p.shape.heads, kv_heads = p.shape.kv_heads;
  const int64_t dim = p.shape.head_dim;
  if (head < heads) return p.gradients.query + (token * heads + head) * dim;
  if (head < heads + kv_heads) return p.gradients.key + (token * kv_heads + head - heads) * dim;
  return p.gradients.value + (token * kv_heads + head - heads - kv_heads) * dim;
}

// One lane's elements of one head: gradient of the rotated head in, gradient of the projected head out; the lane's
// share of the weight gradient is added to `sums`.
template <int kVector, bool kNorm>
__device__ inline void head_backward(const BackwardParams& p, const Angles<kVector>& angles, int64_t token, int head,
                                     int at, bool here, const float (&low)[kVector], const float (&high)[kVector],
                                     float (&a)[kVector], float (&b)[kVector], float (&sums)[2][2][kVector]) {
  const int half = p.shape.head_dim / 2, rotated_heads = p.shape.heads + p.shape.kv_heads;
  const bool rotated = here && head < rotated_heads;
  if (rotated) {
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      const float first = a[j], second = b[j];
      a[j] = first * angles.cos[j] + second * angles.sin[j];
      b[j] = second * angles.cos[j] - first * angles.sin[j];
    }
  }
  if constexpr (!kNorm) return;
  const bool query = head < p.shape.heads;
  float gain_low[kVector] = {}, gain_high[kVector] = {};
  float dot = 0, scale = 0;
  if (rotated) {
    const uint16_t* weight = (query ? p.norm.query : p.norm.key) + at;
    unpack<kVector>(load<kVector>(weight), gain_low);
    unpack<kVector>(load<kVector>(weight + half), gain_high);
    scale = p.rstd[token * rotated_heads + head];
#pragma unroll
    for (int j = 0; j < kVector; ++j) dot += a[j] * gain_low[j] * low[j] + b[j] * gain_high[j] * high[j];
  }
  const float projection = group_sum(dot, p.lanes) * scale * scale * scale / p.shape.head_dim;
  if (!rotated) return;
#pragma unroll
  for (int j = 0; j < kVector; ++j) {
    const float low_share = a[j] * low[j] * scale, high_share = b[j] * high[j] * scale;
    sums[0][0][j] += query ? low_share : 0.0f;
    sums[0][1][j] += query ? high_share : 0.0f;
    sums[1][0][j] += query ? 0.0f : low_share;
    sums[1][1][j] += query ? 0.0f : high_share;
    a[j] = scale * a[j] * gain_low[j] - low[j] * projection;
    b[j] = scale * b[j] * gain_high[j] - high[j] * projection;
  }
}

// The block's weight gradients: every thread writes its sums, then each element is added over the block's groups in
// their order.
template <int kVector>
__device__ void write_partials(const BackwardParams& p, const float (&sums)[2][2][kVector]) {
  __shared__ float shared[kThreads * 4 * kVector];
  const int half = p.shape.head_dim / 2, dim = p.shape.head_dim;
  const int group = threadIdx.x / p.lanes, at = threadIdx.x % p.lanes * kVector;
  const int row = 4 * p.lanes * kVector;  // floats a group: two weights, two halves
#pragma unroll
  for (int part = 0; part < 4; ++part) {
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      shared[group * row + part * p.lanes * kVector + at + j] = sums[part / 2][part % 2][j];
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < 2 * dim; i += kThreads) {
    const int part = i / half, inside = i % half;
    float sum = 0;
    for (int g = 0; g < kThreads / p.lanes; ++g) sum += shared[g * row + part * p.lanes * kVector + inside];
    p.partials[blockIdx.x * static_cast<int64_t>(2 * dim) + i] = sum;
  }
}

template <int kVector, bool kNorm>
__global__ void __launch_bounds__(kThreads, 2) backward(BackwardParams p) {
  const int half = p.shape.head_dim / 2, all = p.shape.heads + 2 * p.shape.kv_heads;
  const int rotated_heads = p.shape.heads + p.shape.kv_heads;
  const int64_t begin = blockIdx.x * p.tokens_per_block, end = min(begin + p.tokens_per_block, p.shape.tokens);
  const int at = threadIdx.x % p.lanes * kVector;
  const int groups_per_block = kThreads / p.lanes;
  const int items = end > begin ? static_cast<int>(end - begin) * p.groups : 0;
  float sums[2][2][kVector] = {};
  // All threads of a block make the same number of turns, so that the sums over lanes see whole warps.
  for (int turn = 0; turn < items; turn += groups_per_block) {
    const int item = turn + static_cast<int>(threadIdx.x) / p.lanes;
    const bool active = item < items && at < half;
    const int64_t token = begin + (active ? item / p.groups : 0);
    const int first = active ? item % p.groups * kBackwardHeads : all;
    Raw<kVector> gradient_low[kBackwardHeads], gradient_high[kBackwardHeads];
    Raw<kVector> projected_low[kBackwardHeads], projected_high[kBackwardHeads];
#pragma unroll
    for (int h = 0; h < kBackwardHeads; ++h) {
      const int head = first + h;
      if (head >= all) continue;
      const uint16_t* gradient = head_gradient(p, token, head) + at;
      gradient_low[h] = load<kVector>(gradient);
      gradient_high[h] = load<kVector>(gradient + half);
      if (!kNorm || head >= rotated_heads) continue;
      const uint16_t* projected = p.qkv + (token * all + head) * p.shape.head_dim + at;
      projected_low[h] = load<kVector>(projected);
      projected_high[h] = load<kVector>(projected + half);
    }
    Angles<kVector> angles;
    if (active) angles.load_row(p.rotation, token, half, at);
#pragma unroll
    for (int h = 0; h < kBackwardHeads; ++h) {
      const int head = first + h;
      const bool here = head < all;
      float a[kVector] = {}, b[kVector] = {}, low[kVector] = {}, high[kVector] = {};
      if (here) {
        unpack<kVector>(gradient_low[h], a);
        unpack<kVector>(gradient_high[h], b);
        if (kNorm && head < rotated_heads) {
          unpack<kVector>(projected_low[h], low);
          unpack<kVector>(projected_high[h], high);
        }
      }
      head_backward<kVector, kNorm>(p, angles, token, head, at, here, low, high, a, b, sums);
      if (!here) continue;
      uint16_t* to = p.qkv + (token * all + head) * p.shape.head_dim + at;
      store<kVector>(to, a);
      store<kVector>(to + half, b);
    }
  }
  if constexpr (kNorm) write_partials<kVector>(p, sums);
}

int groups_of(int heads, int per_group) { return (heads + per_group - 1) / per_group; }

template <bool kNorm>
void launch_forward(const ForwardParams& p, int vector, cudaStream_t stream) {
  const unsigned per_block = kThreads / p.lanes, grid = (p.items + per_block - 1) / per_block;
  if (vector == 8) forward<8, kNorm><<<grid, kThreads, 0, stream>>>(p);
  if (vector == 4) forward<4, kNorm><<<grid, kThreads, 0, stream>>>(p);
  if (vector == 2) forward<2, kNorm><<<grid, kThreads, 0, stream>>>(p);
  if (vector == 1) forward<1, kNorm><<<grid, kThreads, 0, stream>>>(p);
}

template <bool kNorm>
void launch_backward(const BackwardParams& p, int vector, cudaStream_t stream) {
  const auto grid = static_cast<unsigned>(qk_rope_partial_rows(p.shape.tokens));
  if (vector == 8) backward<8, kNorm><<<grid, kThreads, 0, stream>>>(p);
  if (vector == 4) backward<4, kNorm><<<grid, kThreads, 0, stream>>>(p);
  if (vector == 2) backward<2, kNorm><<<grid, kThreads, 0, stream>>>(p);
  if (vector == 1) backward<1, kNorm><<<grid, kThreads, 0, stream>>>(p);
}

}  // namespace

void check_head_dim(int head_dim) {
  if (head_dim < 2 || head_dim % 2 != 0 || split_head(head_dim).lanes > kWarp) {
    throw std::logic_error("the rotation kernel cannot take heads of this size");
  }
}

void qk_rope(const HeadShape& shape, const Rotation& rotation, const HeadNorm& norm, const uint16_t* in,
             int64_t in_stride, uint16_t* out, int64_t out_stride, float* rstd, cudaStream_t stream) {
  check_head_dim(shape.head_dim);
  if (shape.tokens == 0) return;
  const Split split = split_head(shape.head_dim);
  const int groups = groups_of(shape.heads + shape.kv_heads, kForwardHeads);
  const int64_t items = shape.tokens * groups;
  if (items > 0x7fffffff) throw std::logic_error("the rotation kernel takes fewer than 2^31 groups of heads");
  const ForwardParams p{shape,
                        rotation,
                        norm,
                        in,
                        out,
                        in_stride,
                        out_stride,
                        rstd,
                        static_cast<uint32_t>(split.lanes),
                        static_cast<uint32_t>(groups),
                        static_cast<uint32_t>(items)};
  norm.query != nullptr ? launch_forward<true>(p, split.vector, stream)
                        : launch_forward<false>(p, split.vector, stream);
  check_launch("qk_rope");
}

int64_t qk_rope_partial_rows(int64_t tokens) { return std::min(tokens, kBackwardBlocks); }

void qk_rope_backward(const HeadShape& shape, const Rotation& rotation, const HeadNorm& norm, const float* rstd,
                      const HeadGradients& gradients, uint16_t* qkv, float* partials, cudaStream_t stream) {
  check_head_dim(shape.head_dim);
  if (shape.tokens == 0) return;
  const Split split = split_head(shape.head_dim);
  const int64_t blocks = qk_rope_partial_rows(shape.tokens);
  const BackwardParams p{shape,
                         rotation,
                         norm,
                         rstd,
                         gradients,
                         qkv,
                         partials,
                         split.lanes,
                         groups_of(shape.heads + 2 * shape.kv_heads, kBackwardHeads),
                         (shape.tokens + blocks - 1) / blocks};
  norm.query != nullptr ? launch_backward<true>(p, split.vector, stream)
                        : launch_backward<false>(p, split.vector, stream);
  check_launch("qk_rope_backward");
}

}  // namespace slidedp::nn
