#include "runtime/nn/kernels/convert.h"
#include "runtime/nn/kernels/device_math.cuh"

namespace slidedp::nn {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kNormBlock = 64;

__device__ inline void load_floats(const float* from, float (&out)[8]) {
  const float4 low = *reinterpret_cast<const float4*>(from), high = *reinterpret_cast<const float4*>(from + 4);
  out[0] = low.x, out[1] = low.y, out[2] = low.z, out[3] = low.w;
  out[4] = high.x, out[5] = high.y, out[6] = high.z, out[7] = high.w;
}

__device__ inline void store_floats(float* to, const float (&values)[8]) {
  *reinterpret_cast<float4*>(to) = make_float4(values[0], values[1], values[2], values[3]);
  *reinterpret_cast<float4*>(to + 4) = make_float4(values[4], values[5], values[6], values[7]);
}

struct Narrow {
  const float* from;
  uint16_t* to;
  __device__ void vector(int64_t at) const {
    float values[8];
    load_floats(from + at, values);
    store<8>(to + at, values);
  }
  __device__ void element(int64_t at) const { to[at] = to_bf16_bits(from[at]); }
};

struct Widen {
  const uint16_t* from;
  float* to;
  __device__ void vector(int64_t at) const {
    float values[8];
    unpack<8>(load<8>(from + at), values);
    store_floats(to + at, values);
  }
  __device__ void element(int64_t at) const { to[at] = from_bf16_bits(from[at]); }
};

struct Accumulate {
  const uint16_t* from;
  float* to;
  bool first;
  __device__ void vector(int64_t at) const {
    float values[8], sums[8] = {};
    unpack<8>(load<8>(from + at), values);
    if (!first) load_floats(to + at, sums);
#pragma unroll
    for (int j = 0; j < 8; ++j) sums[j] = first ? values[j] : sums[j] + values[j];
    store_floats(to + at, sums);
  }
  __device__ void element(int64_t at) const {
    to[at] = first ? from_bf16_bits(from[at]) : to[at] + from_bf16_bits(from[at]);
  }
};

// `vectors` whole vectors of 8, then single elements.
template <typename Operation>
__global__ void __launch_bounds__(kThreads) apply(Operation operation, int64_t vectors, int64_t elements) {
  const int64_t thread = blockIdx.x * static_cast<int64_t>(kThreads) + threadIdx.x;
  if (thread < vectors) {
    operation.vector(thread * 8);
  } else if (const int64_t at = vectors * 8 + thread - vectors; at < elements) {
    operation.element(at);
  }
}

bool aligned(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; }

template <typename Operation>
void launch(const Operation& operation, int64_t elements, cudaStream_t stream, const char* name) {
  if (elements == 0) return;
  const int64_t vectors = aligned(operation.from) && aligned(operation.to) ? elements / 8 : 0;
  const int64_t threads = vectors + elements - vectors * 8;
  apply<<<static_cast<unsigned>((threads + kThreads - 1) / kThreads), kThreads, 0, stream>>>(operation, vectors,
                                                                                             elements);
  check_launch(name);
}

__device__ inline float element_of(const float* values, int64_t at) { return values[at]; }
__device__ inline float element_of(const uint16_t* values, int64_t at) { return from_bf16_bits(values[at]); }

// Eight lanes a block of 64: lane j adds elements j, j + 8, ... and the lanes are folded 4, 2, 1 apart.
template <typename T>
__global__ void __launch_bounds__(kThreads) square_sums(const T* values, int64_t elements, double* sums) {
  const int64_t thread = blockIdx.x * static_cast<int64_t>(kThreads) + threadIdx.x;
  const int64_t block = thread / 8;
  double sum = 0;
  for (int64_t i = thread % 8; i < kNormBlock; i += 8) {
    const int64_t at = block * kNormBlock + i;
    const double value = at < elements ? element_of(values, at) : 0.0f;
    sum += value * value;
  }
  for (int step = 4; step > 0; step /= 2) sum += __shfl_down_sync(kFullWarp, sum, step, 8);
  if (thread % 8 == 0 && block * kNormBlock < elements) sums[block] = sum;
}

template <typename T>
void launch_square_sums(const T* values, int64_t elements, double* sums, cudaStream_t stream) {
  if (elements == 0) return;
  const int64_t threads = (elements + kNormBlock - 1) / kNormBlock * 8;
  const auto grid = static_cast<unsigned>((threads + kThreads - 1) / kThreads);
  square_sums<<<grid, kThreads, 0, stream>>>(values, elements, sums);
  check_launch("square_sums");
}

}  // namespace

void narrow_to_bf16(const float* from, uint16_t* to, int64_t elements, cudaStream_t stream) {
  launch(Narrow{from, to}, elements, stream, "narrow_to_bf16");
}

void widen_to_fp32(const uint16_t* from, float* to, int64_t elements, cudaStream_t stream) {
  launch(Widen{from, to}, elements, stream, "widen_to_fp32");
}

void accumulate_bf16(const uint16_t* values, float* sum, bool first, int64_t elements, cudaStream_t stream) {
  launch(Accumulate{values, sum, first}, elements, stream, "accumulate_bf16");
}

void square_sums_fp32(const float* values, int64_t elements, double* sums, cudaStream_t stream) {
  launch_square_sums(values, elements, sums, stream);
}

void square_sums_bf16(const uint16_t* values, int64_t elements, double* sums, cudaStream_t stream) {
  launch_square_sums(values, elements, sums, stream);
}

}  // namespace slidedp::nn
