// Device functions that the kernels share: 16-byte vectors of bf16 and sums in a fixed order.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "runtime/nn/kernels/launch.h"

namespace slidedp::nn {

constexpr int kWarp = 32;
constexpr unsigned kFullWarp = 0xffffffffu;

__device__ inline float from_bf16_bits(uint16_t bits) { return __uint_as_float(static_cast<uint32_t>(bits) << 16); }
__device__ inline uint16_t to_bf16_bits(float value) { return __bfloat16_as_ushort(__float2bfloat16_rn(value)); }

// kCount adjacent bf16 elements that are loaded and stored at once.
template <int kCount>
struct Bf16Pack;
template <>
struct Bf16Pack<8> {
  using Raw = uint4;
};
template <>
struct Bf16Pack<4> {
  using Raw = uint2;
};
template <>
struct Bf16Pack<2> {
  using Raw = uint32_t;
};
template <>
struct Bf16Pack<1> {
  using Raw = uint16_t;
};
template <int kCount>
using Raw = typename Bf16Pack<kCount>::Raw;

template <int kCount>
__device__ inline Raw<kCount> load(const uint16_t* from) {
  return *reinterpret_cast<const Raw<kCount>*>(from);
}

template <int kCount>
__device__ inline void unpack(const Raw<kCount>& raw, float (&out)[kCount]) {
  if constexpr (kCount == 1) {
    out[0] = from_bf16_bits(raw);
  } else {
    uint32_t words[kCount / 2];
    memcpy(words, &raw, sizeof(raw));
#pragma unroll
    for (int i = 0; i < kCount / 2; ++i) {
      out[2 * i] = __uint_as_float(words[i] << 16);
      out[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
    }
  }
}

template <int kCount>
__device__ inline void store(uint16_t* to, const float (&values)[kCount]) {
  if constexpr (kCount == 1) {
    *to = to_bf16_bits(values[0]);
  } else {
    uint32_t words[kCount / 2];
#pragma unroll
    for (int i = 0; i < kCount / 2; ++i) {
      const __nv_bfloat162 pair = __floats2bfloat162_rn(values[2 * i], values[2 * i + 1]);
      memcpy(&words[i], &pair, sizeof(pair));
    }
    Raw<kCount> raw;
    memcpy(&raw, words, sizeof(raw));
    *reinterpret_cast<Raw<kCount>*>(to) = raw;
  }
}

// Sum over groups of `lanes` adjacent lanes (a power of two); every lane of a group gets the same bits.
__device__ inline float group_sum(float value, int lanes) {
  for (int step = lanes / 2; step > 0; step /= 2) value += __shfl_xor_sync(kFullWarp, value, step);
  return value;
}

__device__ inline float warp_sum(float value) { return group_sum(value, kWarp); }

// Sum over the block (a multiple of 32 threads); every thread gets the same bits. `scratch` has one element a warp and
// must not be the one of the previous call unless a barrier lies between.
__device__ inline float block_sum(float value, float* scratch) {
  value = warp_sum(value);
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  if (lane == 0) scratch[warp] = value;
  __syncthreads();
  return warp_sum(lane < static_cast<int>(blockDim.x) / kWarp ? scratch[lane] : 0.0f);
}

// One element of a gradient slot.
__device__ inline void store_gradient(const GradientRange& range, int64_t at, float sum) {
  if (range.fp32) {
    float* to = static_cast<float*>(range.data) + at;
    *to = range.first ? sum : *to + sum;
  } else {
    uint16_t* to = static_cast<uint16_t*>(range.data) + at;
    *to = to_bf16_bits(range.first ? sum : from_bf16_bits(*to) + sum);
  }
}

}  // namespace slidedp::nn
