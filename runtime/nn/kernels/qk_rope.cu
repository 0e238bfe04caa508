#include <cuda_pipeline_primitives.h>

#include <algorithm>
#include <stdexcept>

#include "runtime/nn/kernels/device_math.cuh"
#include "runtime/nn/kernels/qk_rope.h"

namespace slidedp::nn {
namespace {

// Both passes are bound by memory, and a thread has much to keep in registers: angles, gains, sums. So what it needs
// next waits in shared memory: every thread fetches its own elements of later tokens with asynchronous copies, deep
// enough that 60 to 90 KB are under way on a multiprocessor, whatever the rest of the loop waits for.
constexpr int kForwardThreads = 320, kBackwardThreads = 384;  // most of a block
// Blocks that a multiprocessor holds at once, and of all of 132 (H100, H200); a block goes through its share of the
// tokens. In the backward pass their number is part of the order of the sums.
constexpr int kForwardResident = 3, kForwardBlocks = 132 * kForwardResident;
constexpr int kBackwardResident = 2, kBackwardBlocks = 132 * kBackwardResident;
constexpr size_t kDefaultSharedBytes = 48 << 10;  // what a kernel may have unasked

// How the heads of a token are spread over a block. A lane holds `vector` elements of a head's first half and their
// partners in the second; `lanes` (a power of two) hold the head, and always the same head, so that its sums stay with
// them. Where a token has more heads than a block takes, blocks take one of `slices` of them each.
struct Spread {
  int vector, lanes, slice_heads, slices, threads;
};

Spread spread(int head_dim, int heads, int most_threads) {
  const int half = head_dim / 2;
  Spread s{8, 1, 0, 0, 0};
  while (half % s.vector != 0) s.vector /= 2;
  while (s.lanes * s.vector < half) s.lanes *= 2;
  const int most = most_threads / std::min(s.lanes, kWarp);
  s.slices = (heads + most - 1) / most;
  s.slice_heads = (heads + s.slices - 1) / s.slices;
  s.threads = (s.slice_heads * s.lanes + kWarp - 1) / kWarp * kWarp;
  if (s.slices > kBackwardBlocks) throw std::logic_error("the rotation kernel cannot take so many heads");
  return s;
}

// What a thread works on: elements `at` and half a head later of `head`, of every `stride`-th token.
struct Work {
  int head, at;
  bool active;  // others stay for the sums over lanes
  int first, stride;
  __device__ Work(const Spread& s, int half, int heads, int tokens) {
    const int slice = blockIdx.x % s.slices, group = threadIdx.x / s.lanes;
    head = slice * s.slice_heads + group;
    at = threadIdx.x % s.lanes * s.vector;
    active = group < s.slice_heads && head < heads && at < half;
    stride = gridDim.x / s.slices;
    first = blockIdx.x / s.slices;
    if (first >= stride) first = tokens;  // left over by the division
  }
};

// A lane's place in a row of a matrix, which goes from token to token.
class Cursor {
 public:
  __device__ Cursor(const uint16_t* first_row, int64_t row_elements, const Work& work)
      : at_(const_cast<uint16_t*>(first_row) + work.first * row_elements), step_(work.stride * row_elements) {}
  __device__ uint16_t* get() const { return at_; }
  __device__ void next() { at_ += step_; }

 private:
  uint16_t* at_;
  int64_t step_;
};

// A thread's vectors on their way through shared memory: `kParts` of each of `kStages` tokens. No other thread touches
// them, so the block needs no barrier.
template <int kVector, int kParts, int kStages, int kThreads>
class Queue {
 public:
  static constexpr size_t kBytes = sizeof(Raw<kVector>) * kParts * kStages * kThreads;
  __device__ explicit Queue(void* shared) : own_(static_cast<Raw<kVector>*>(shared) + threadIdx.x) {}

  __device__ void fetch(int stage, int part, const uint16_t* from) {
    Raw<kVector>* to = own_ + (stage * kParts + part) * kThreads;
    if constexpr (sizeof(Raw<kVector>) >= 4) {
      __pipeline_memcpy_async(to, from, sizeof(Raw<kVector>));
    } else {
      *to = load<kVector>(from);
    }
  }
  __device__ Raw<kVector> get(int stage, int part) const { return own_[(stage * kParts + part) * kThreads]; }

  // Goes through the thread's tokens: fetch(stage) starts the fetches of one after the other, use(token, stage) has it.
  template <typename Fetch, typename Use>
  __device__ void stream(const Work& work, int tokens, const Fetch& fetch, const Use& use) {
    int fetched = work.first;
    const auto start = [&](int stage) {
      if (work.active && fetched < tokens) fetch(stage);
      fetched += work.stride;
      __pipeline_commit();
    };
#pragma unroll
    for (int stage = 0; stage < kStages - 1; ++stage) start(stage);
    int stage = 0;
    for (int token = work.first; token < tokens; token += work.stride) {
      start(stage == 0 ? kStages - 1 : stage - 1);  // into the place of the token before
      __pipeline_wait_prior(kStages - 1);
      __syncwarp();  // the compiler reads what has arrived no earlier
      use(token, stage);
      stage = stage + 1 == kStages ? 0 : stage + 1;
    }
  }

 private:
  Raw<kVector>* own_;
};

template <int kVector>
__device__ inline void load_floats(const float* from, float (&to)[kVector]) {
  if constexpr (kVector % 4 == 0) {
#pragma unroll
    for (int j = 0; j < kVector; j += 4) {
      const float4 four = *reinterpret_cast<const float4*>(from + j);
      to[j] = four.x, to[j + 1] = four.y, to[j + 2] = four.z, to[j + 3] = four.w;
    }
  } else {
#pragma unroll
    for (int j = 0; j < kVector; ++j) to[j] = from[j];
  }
}

template <int kVector>
struct Angles {
  float cos[kVector], sin[kVector];
  __device__ Angles(const Rotation& rotation, int position, int half, int at) {
    const bool valid = position >= 0 && position < rotation.table_positions;
    const int64_t begin = (valid ? position : 0) * static_cast<int64_t>(half) + at;
    load_floats<kVector>(rotation.cos + begin, cos);
    load_floats<kVector>(rotation.sin + begin, sin);
    if (valid) return;
#pragma unroll
    for (int j = 0; j < kVector; ++j) cos[j] = sin[j] = __int_as_float(0x7fc00000);
  }
};

// A lane's elements of its head's gain. Loaded anew for every token, which costs less than the registers.
template <int kVector>
struct Gain {
  float low[kVector], high[kVector];
  __device__ Gain(const HeadNorm& norm, bool query, int half, int at) {
    const uint16_t* weight = (query ? norm.query : norm.key) + at;
    unpack<kVector>(load<kVector>(weight), low);
    unpack<kVector>(load<kVector>(weight + half), high);
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
  Spread spread;
};

template <int kVector>
using ForwardQueue = Queue<kVector, 2, 4, kForwardThreads>;

template <int kVector, bool kNorm>
__global__ void __launch_bounds__(kForwardThreads, kForwardResident) forward(ForwardParams p) {
  extern __shared__ uint4 shared[];
  const int half = p.shape.head_dim / 2, all = p.shape.heads + p.shape.kv_heads;
  const int tokens = static_cast<int>(p.shape.tokens);
  const Work work(p.spread, half, all, tokens);
  const int64_t place = static_cast<int64_t>(work.head) * p.shape.head_dim + work.at;
  Cursor in(p.in + place, p.in_stride, work), out(p.out + place, p.out_stride, work);
  const float inverse_dim = 1.0f / p.shape.head_dim;
  const auto position_of = [&](int token) { return token < tokens ? p.rotation.positions[token] : 0; };
  int next_position = position_of(work.first);
  ForwardQueue<kVector> queue(shared);
  const auto fetch = [&](int stage) {
    queue.fetch(stage, 0, in.get());
    queue.fetch(stage, 1, in.get() + half);
    in.next();
  };
  queue.stream(work, tokens, fetch, [&](int token, int stage) {
    const int position = next_position;
    next_position = position_of(token + work.stride);
    float a[kVector], b[kVector], scale = 1;
    unpack<kVector>(queue.get(stage, 0), a);
    unpack<kVector>(queue.get(stage, 1), b);
    if constexpr (kNorm) {
      float squares = 0;
#pragma unroll
      for (int j = 0; j < kVector; ++j) squares += a[j] * a[j] + b[j] * b[j];
      scale = rsqrtf(group_sum(work.active ? squares : 0.0f, p.spread.lanes) * inverse_dim + p.norm.eps);
    }
    if (!work.active) return;
    if constexpr (kNorm) {
      if (p.rstd != nullptr && work.at == 0) p.rstd[static_cast<int64_t>(token) * all + work.head] = scale;
      const Gain<kVector> gain(p.norm, work.head < p.shape.heads, half, work.at);
#pragma unroll
      for (int j = 0; j < kVector; ++j) {
        a[j] *= scale * gain.low[j];
        b[j] *= scale * gain.high[j];
      }
    }
    const Angles<kVector> angles(p.rotation, position, half, work.at);
    float rotated_a[kVector], rotated_b[kVector];
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      rotated_a[j] = a[j] * angles.cos[j] - b[j] * angles.sin[j];
      rotated_b[j] = b[j] * angles.cos[j] + a[j] * angles.sin[j];
    }
    store<kVector>(out.get(), rotated_a);
    store<kVector>(out.get() + half, rotated_b);
    out.next();
  });
}

struct BackwardParams {
  HeadShape shape;
  Rotation rotation;
  HeadNorm norm;
  const float* rstd;
  HeadGradients gradients;
  uint16_t* qkv;
  float* partials;
  Spread spread;
};

// Gradients of the rotated head that a thread works on.
__device__ inline Cursor head_gradients(const BackwardParams& p, const Work& work) {
  const int heads = p.shape.heads, kv_heads = p.shape.kv_heads, head = work.head;
  const int64_t dim = p.shape.head_dim;
  if (head < heads) return {p.gradients.query + head * dim + work.at, heads * dim, work};
  if (head < heads + kv_heads) return {p.gradients.key + (head - heads) * dim + work.at, kv_heads * dim, work};
  return {p.gradients.value + (head - heads - kv_heads) * dim + work.at, kv_heads * dim, work};
}

template <int kVector>
__device__ inline void rotate_back(const Angles<kVector>& angles, float (&a)[kVector], float (&b)[kVector]) {
#pragma unroll
  for (int j = 0; j < kVector; ++j) {
    const float first = a[j], second = b[j];
    a[j] = first * angles.cos[j] + second * angles.sin[j];
    b[j] = second * angles.cos[j] - first * angles.sin[j];
  }
}

// A lane's share of the norm's backward: gradient of a head's normed elements in, times their gain out; adds to the
// sums of the weight gradient, and returns its part of gradient * gain * projected.
template <int kVector>
__device__ inline float through_gain(const Gain<kVector>& gain, float scale, const float (&low)[kVector],
                                     const float (&high)[kVector], float (&a)[kVector], float (&b)[kVector],
                                     float (&sums)[2][kVector]) {
  float dot = 0;
#pragma unroll
  for (int j = 0; j < kVector; ++j) {
    const float low_share = a[j] * low[j], high_share = b[j] * high[j];
    sums[0][j] += low_share * scale;
    sums[1][j] += high_share * scale;
    dot += low_share * gain.low[j] + high_share * gain.high[j];
    a[j] *= gain.low[j];
    b[j] *= gain.high[j];
  }
  return dot;
}

// The block's weight gradients: every thread writes its sums, then each element is added over the block's heads of that
// weight in their order.
template <int kVector>
__device__ void write_partials(const BackwardParams& p, const Work& work, const float (&sums)[2][kVector],
                               float* shared) {
  const int half = p.shape.head_dim / 2, dim = p.shape.head_dim, padded = p.spread.lanes * kVector;
  const int group = threadIdx.x / p.spread.lanes, first_head = work.head - group;
  __syncthreads();  // no thread reads what it has fetched any more
#pragma unroll
  for (int part = 0; part < 2; ++part) {
#pragma unroll
    for (int j = 0; j < kVector; ++j) shared[(group * 2 + part) * padded + work.at + j] = sums[part][j];
  }
  __syncthreads();
  const int heads = p.shape.heads, end_head = first_head + p.spread.slice_heads;
  for (int i = threadIdx.x; i < 2 * dim; i += blockDim.x) {
    const bool query = i < dim;
    const int part = i % dim / half, inside = i % half;
    const int begin = query ? first_head : max(first_head, heads);
    const int end = min(end_head, query ? heads : heads + p.shape.kv_heads);
    float sum = 0;
    for (int head = begin; head < end; ++head) sum += shared[((head - first_head) * 2 + part) * padded + inside];
    p.partials[blockIdx.x * static_cast<int64_t>(2 * dim) + i] = sum;
  }
}

// With QK-norm a token brings twice as much, so fewer of them are enough.
template <int kVector, bool kNorm>
using BackwardQueue = Queue<kVector, kNorm ? 4 : 2, kNorm ? 3 : 5, kBackwardThreads>;

template <int kVector, bool kNorm>
__global__ void __launch_bounds__(kBackwardThreads, kBackwardResident) backward(BackwardParams p) {
  extern __shared__ uint4 shared[];
  const int half = p.shape.head_dim / 2, rotated_heads = p.shape.heads + p.shape.kv_heads;
  const int all = rotated_heads + p.shape.kv_heads, tokens = static_cast<int>(p.shape.tokens);
  const Work work(p.spread, half, all, tokens);
  const bool rotated = work.active && work.head < rotated_heads;
  Cursor gradients = head_gradients(p, work);
  Cursor qkv(p.qkv + static_cast<int64_t>(work.head) * p.shape.head_dim + work.at, all * p.shape.head_dim, work);
  Cursor projected = qkv;  // the same, some tokens ahead
  BackwardQueue<kVector, kNorm> queue(shared);
  const auto fetch = [&](int stage) {
    queue.fetch(stage, 0, gradients.get());
    queue.fetch(stage, 1, gradients.get() + half);
    gradients.next();
    if (!kNorm || !rotated) return;
    queue.fetch(stage, 2, projected.get());
    queue.fetch(stage, 3, projected.get() + half);
    projected.next();
  };
  float sums[2][kVector] = {}, next_scale = 0;
  int next_position = 0;
  const auto prepare = [&](int token) {
    if (!rotated || token >= tokens) return;
    next_position = p.rotation.positions[token];
    if (kNorm) next_scale = p.rstd[static_cast<int64_t>(token) * rotated_heads + work.head];
  };
  prepare(work.first);
  queue.stream(work, tokens, fetch, [&](int token, int stage) {
    const int position = next_position;
    const float scale = next_scale;
    prepare(token + work.stride);
    float a[kVector], b[kVector], low[kVector], high[kVector], dot = 0;
    unpack<kVector>(queue.get(stage, 0), a);
    unpack<kVector>(queue.get(stage, 1), b);
    if (rotated) rotate_back<kVector>({p.rotation, position, half, work.at}, a, b);
    if constexpr (kNorm) {
      if (rotated) {
        unpack<kVector>(queue.get(stage, 2), low);
        unpack<kVector>(queue.get(stage, 3), high);
        dot = through_gain<kVector>({p.norm, work.head < p.shape.heads, half, work.at}, scale, low, high, a, b, sums);
      }
      const float projection = group_sum(dot, p.spread.lanes) * scale * scale * scale * (1.0f / p.shape.head_dim);
      if (rotated) {
#pragma unroll
        for (int j = 0; j < kVector; ++j) {
          a[j] = scale * a[j] - low[j] * projection;
          b[j] = scale * b[j] - high[j] * projection;
        }
      }
    }
    if (!work.active) return;
    store<kVector>(qkv.get(), a);
    store<kVector>(qkv.get() + half, b);
    qkv.next();
  });
  if constexpr (kNorm) write_partials<kVector>(p, work, sums, reinterpret_cast<float*>(shared));
}

template <typename Queue, typename Params>
void launch(void (*kernel)(Params), const Params& p, int blocks, cudaStream_t stream) {
  if (p.shape.tokens > 1 << 30) throw std::logic_error("the rotation kernel takes at most 2^30 tokens");
  if (Queue::kBytes > kDefaultSharedBytes) {
    check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Queue::kBytes),
               "cudaFuncSetAttribute");
  }
  kernel<<<blocks, p.spread.threads, Queue::kBytes, stream>>>(p);
}

template <int kVector>
void launch_forward(const ForwardParams& p, cudaStream_t stream) {
  launch<ForwardQueue<kVector>>(p.norm.query != nullptr ? forward<kVector, true> : forward<kVector, false>, p,
                                kForwardBlocks, stream);
}

template <int kVector>
void launch_backward(const BackwardParams& p, cudaStream_t stream) {
  if (p.norm.query != nullptr) {
    launch<BackwardQueue<kVector, true>>(backward<kVector, true>, p, kBackwardBlocks, stream);
  } else {
    launch<BackwardQueue<kVector, false>>(backward<kVector, false>, p, kBackwardBlocks, stream);
  }
}

}  // namespace

void check_head_dim(int head_dim) {
  if (head_dim < 2 || head_dim % 2 != 0 || spread(head_dim, 1, kForwardThreads).lanes > kWarp) {
    throw std::logic_error("the rotation kernel cannot take heads of this size");
  }
}

void qk_rope(const HeadShape& shape, const Rotation& rotation, const HeadNorm& norm, const uint16_t* in,
             int64_t in_stride, uint16_t* out, int64_t out_stride, float* rstd, cudaStream_t stream) {
  check_head_dim(shape.head_dim);
  if (shape.tokens == 0) return;
  const Spread s = spread(shape.head_dim, shape.heads + shape.kv_heads, kForwardThreads);
  const ForwardParams p{shape, rotation, norm, in, out, in_stride, out_stride, rstd, s};
  if (s.vector == 8) launch_forward<8>(p, stream);
  if (s.vector == 4) launch_forward<4>(p, stream);
  if (s.vector == 2) launch_forward<2>(p, stream);
  if (s.vector == 1) launch_forward<1>(p, stream);
  check_launch("qk_rope");
}

int64_t qk_rope_partial_rows() { return kBackwardBlocks; }

void qk_rope_backward(const HeadShape& shape, const Rotation& rotation, const HeadNorm& norm, const float* rstd,
                      const HeadGradients& gradients, uint16_t* qkv, float* partials, cudaStream_t stream) {
  check_head_dim(shape.head_dim);
  if (shape.tokens == 0) return;
  const Spread s = spread(shape.head_dim, shape.heads + 2 * shape.kv_heads, kBackwardThreads);
  const BackwardParams p{shape, rotation, norm, rstd, gradients, qkv, partials, s};
  if (s.vector == 8) launch_backward<8>(p, stream);
  if (s.vector == 4) launch_backward<4>(p, stream);
  if (s.vector == 2) launch_backward<2>(p, stream);
  if (s.vector == 1) launch_backward<1>(p, stream);
  check_launch("qk_rope_backward");
}

}  // namespace slidedp::nn
