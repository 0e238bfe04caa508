#include "runtime/comm/local/reduce.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>

namespace slidedp {
namespace {

float bf16_to_float(uint16_t value) { return std::bit_cast<float>(static_cast<uint32_t>(value) << 16); }

// Nearest, ties to even. For sums of bf16 values: their NaNs have zero low bits, so that rounding keeps them NaN.
uint16_t rounded_sum(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

float to_float(float value) { return value; }
float to_float(uint16_t value) { return bf16_to_float(value); }
void store(float sum, float* to) { *to = sum; }
void store(float sum, uint16_t* to) { *to = rounded_sum(sum); }

template <typename T>
void sum_typed(std::span<const void* const> sources, T* to, int64_t elements) {
  constexpr int64_t kBlock = 1024;  // sums stay in the first-level cache
  std::array<float, kBlock> sums;
  for (int64_t begin = 0; begin < elements; begin += kBlock) {
    const int64_t count = std::min(kBlock, elements - begin);
    const T* first = static_cast<const T*>(sources[0]) + begin;
    for (int64_t i = 0; i < count; ++i) sums[i] = to_float(first[i]);
    for (const void* source : sources.subspan(1)) {
      const T* next = static_cast<const T*>(source) + begin;
      for (int64_t i = 0; i < count; ++i) sums[i] += to_float(next[i]);
    }
    for (int64_t i = 0; i < count; ++i) store(sums[i], to + begin + i);
  }
}

}  // namespace

void sum_in_order(std::span<const void* const> sources, void* to, int64_t elements, DType type) {
  if (type == DType::fp32) {
    sum_typed(sources, static_cast<float*>(to), elements);
  } else {
    sum_typed(sources, static_cast<uint16_t*>(to), elements);
  }
}

}  // namespace slidedp
