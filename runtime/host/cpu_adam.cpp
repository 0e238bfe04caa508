#include "runtime/host/cpu_adam.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <stdexcept>

// The loops are compiled once per instruction set and picked at load time. Every operation in them is correctly rounded
// (no FMA, no approximate reciprocals), so that all versions give the same bits. (ThreadSanitizer is not up yet when
// the picking is done.)
#if defined(__GNUC__) && !defined(__clang__) && defined(__x86_64__) && !defined(__SANITIZE_THREAD__)
#define SLIDEDP_CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define SLIDEDP_CLONES
#endif

namespace slidedp {
namespace {

// Gradients are summed into a stack buffer of this many elements, which the update or the norm then reads.
constexpr int64_t kTile = 1024;
static_assert(kTile % kBlockElements == 0);
using Tile = std::array<float, kTile>;

inline float widen(uint16_t bf16) { return std::bit_cast<float>(static_cast<uint32_t>(bf16) << 16); }

SLIDEDP_CLONES void copy_bf16(const uint16_t* __restrict source, int64_t count, float* __restrict out) {
  for (int64_t i = 0; i < count; ++i) out[i] = widen(source[i]);
}

SLIDEDP_CLONES void add_bf16(const uint16_t* __restrict source, int64_t count, float* __restrict out) {
  for (int64_t i = 0; i < count; ++i) out[i] += widen(source[i]);
}

SLIDEDP_CLONES void add_fp32(const float* __restrict source, int64_t count, float* __restrict out) {
  for (int64_t i = 0; i < count; ++i) out[i] += source[i];
}

// out = or += elements [begin, begin + count) of one source.
void take_source(const void* source, DType type, int64_t begin, int64_t count, bool first, float* out) {
  if (type == DType::bf16) {
    const uint16_t* values = static_cast<const uint16_t*>(source) + begin;
    first ? copy_bf16(values, count, out) : add_bf16(values, count, out);
  } else {
    const float* values = static_cast<const float*>(source) + begin;
    if (first) {
      std::memcpy(out, values, static_cast<size_t>(count) * sizeof(float));
    } else {
      add_fp32(values, count, out);
    }
  }
}

void sum_tile(const GradientSources& gradient, int64_t begin, int64_t count, Tile& out) {
  const int sources = static_cast<int>(gradient.sources.size());
  Tile group_sum;
  for (int group = 0; group < sources; group += gradient.group_size) {
    float* sum = group == 0 ? out.data() : group_sum.data();
    for (int source = group; source < group + gradient.group_size; ++source) {
      take_source(gradient.sources[static_cast<size_t>(source)], gradient.type, begin, count, source == group, sum);
    }
    if (group > 0) add_fp32(group_sum.data(), count, out.data());
  }
}

void check_sources(const GradientSources& gradient) {
  if (gradient.sources.empty() || gradient.group_size < 1 ||
      gradient.sources.size() % static_cast<size_t>(gradient.group_size) != 0) {
    throw std::logic_error("GradientSources: the sources do not form whole groups");
  }
}

SLIDEDP_CLONES void update_tile(uint16_t* __restrict hi, uint16_t* __restrict lo, float* __restrict m,
                                float* __restrict v, const float* __restrict gradient, int64_t count,
                                const AdamScalars& scalars, float decay) {
  const AdamScalars s = scalars;  // a copy cannot alias the arrays
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t low = lo[i];
    const float p = std::bit_cast<float>(((static_cast<uint32_t>(hi[i]) - (low >> 15)) << 16) | low);
    const float g = gradient[i] * s.gradient_scale;
    const float first = m[i] + s.one_minus_beta1 * (g - m[i]);
    const float second = v[i] * s.beta2 + (s.one_minus_beta2 * g) * g;
    const float denominator = std::sqrt(second) / s.bias_correction2_sqrt + s.eps;
    const auto bits = std::bit_cast<uint32_t>(p * decay - (s.step_size * first) / denominator);
    m[i] = first;
    v[i] = second;
    hi[i] = static_cast<uint16_t>((bits + 0x8000u) >> 16);
    lo[i] = static_cast<uint16_t>(bits);
  }
}

// Squares are exact in double. Eight interleaved partial sums, folded in a fixed order.
SLIDEDP_CLONES void square_blocks(const float* __restrict values, int64_t blocks, double* __restrict sums) {
  constexpr int kParts = 8;
  for (int64_t block = 0; block < blocks; ++block) {
    double part[kParts] = {};
    for (int64_t i = 0; i < kBlockElements; i += kParts) {
      for (int j = 0; j < kParts; ++j) {
        const double value = values[block * kBlockElements + i + j];
        part[j] += value * value;
      }
    }
    sums[block] = ((part[0] + part[4]) + (part[2] + part[6])) + ((part[1] + part[5]) + (part[3] + part[7]));
  }
}

}  // namespace

void adam_update(std::span<uint16_t> hi, std::span<uint16_t> lo, std::span<float> m, std::span<float> v,
                 const GradientSources& gradient, const AdamScalars& scalars, bool decay) {
  if (lo.size() != hi.size() || m.size() != hi.size() || v.size() != hi.size()) {
    throw std::logic_error("adam_update: the state's spans differ in length");
  }
  check_sources(gradient);
  if (scalars.skip) return;
  const float factor = decay ? scalars.decay : 1.0f;
  const auto elements = static_cast<int64_t>(hi.size());
  Tile tile;
  for (int64_t begin = 0; begin < elements; begin += kTile) {
    const int64_t count = std::min(kTile, elements - begin);
    sum_tile(gradient, begin, count, tile);
    update_tile(hi.data() + begin, lo.data() + begin, m.data() + begin, v.data() + begin, tile.data(), count, scalars,
                factor);
  }
}

bool block_square_sums(const GradientSources& gradient, int64_t elements, std::span<double> block_sums) {
  if (static_cast<int64_t>(block_sums.size()) != ceil_div(elements, kBlockElements)) {
    throw std::logic_error("block_square_sums: one sum per block is needed");
  }
  check_sources(gradient);
  Tile tile;
  for (int64_t begin = 0; begin < elements; begin += kTile) {
    const int64_t count = std::min(kTile, elements - begin);
    sum_tile(gradient, begin, count, tile);
    const int64_t blocks = ceil_div(count, kBlockElements);
    std::fill(tile.begin() + count, tile.begin() + blocks * kBlockElements, 0.0f);
    square_blocks(tile.data(), blocks, block_sums.data() + begin / kBlockElements);
  }
  // 64 squares of finite floats cannot overflow a double, so a sum is finite exactly if its elements are.
  return std::all_of(block_sums.begin(), block_sums.end(), [](double sum) { return std::isfinite(sum); });
}

double combine_block_sums(std::span<const double> block_sums) {
  constexpr size_t kGroup = 4096;
  double total = 0;
  for (size_t begin = 0; begin < block_sums.size(); begin += kGroup) {
    double group = 0;
    for (size_t i = begin; i < std::min(begin + kGroup, block_sums.size()); ++i) group += block_sums[i];
    total += group;
  }
  return total;
}

}  // namespace slidedp
