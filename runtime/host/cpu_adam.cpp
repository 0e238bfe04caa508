#include "runtime/host/cpu_adam.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <stdexcept>

#include "runtime/host/kernels.h"

namespace slidedp {
namespace {

// Gradients are summed into a stack buffer of this many elements, which the update or the norm then reads; accumulators
// are worked on in pieces of this size, so that they stay in the core's cache from source to source.
constexpr int64_t kTile = 1024;
static_assert(kTile % kBlockElements == 0);
using Tile = std::array<float, kTile>;

const Kernels& widest_kernels() { return supported_kernels().front(); }

// sum = or += elements [begin, begin + count) of one source.
void take_source(const Kernels& kernels, const void* source, DType type, int64_t begin, int64_t count, bool first,
                 float* sum) {
  if (type == DType::bf16) {
    const uint16_t* values = static_cast<const uint16_t*>(source) + begin;
    first ? kernels.copy_bf16(values, count, sum) : kernels.add_bf16(values, count, sum);
  } else {
    const float* values = static_cast<const float*>(source) + begin;
    if (first) {
      std::memcpy(sum, values, static_cast<size_t>(count) * sizeof(float));
    } else {
      kernels.add_fp32(values, count, sum);
    }
  }
}

// The sources in order, onto `sum`; `first`: the first of them overwrites it.
void take_sources(const Kernels& kernels, std::span<const void* const> sources, DType type, int64_t begin,
                  int64_t count, bool first, float* sum) {
  for (const void* source : sources) {
    take_source(kernels, source, type, begin, count, first, sum);
    first = false;
  }
}

void sum_tile(const Kernels& kernels, const GradientSources& gradient, int64_t begin, int64_t count, Tile& out) {
  if (gradient.accumulator != nullptr) {
    std::memcpy(out.data(), gradient.accumulator + begin, static_cast<size_t>(count) * sizeof(float));
    return take_sources(kernels, gradient.sources, gradient.type, begin, count, false, out.data());
  }
  const auto group_size = static_cast<size_t>(gradient.group_size);
  Tile group_sum;
  for (size_t group = 0; group < gradient.sources.size(); group += group_size) {
    float* sum = group == 0 ? out.data() : group_sum.data();
    take_sources(kernels, gradient.sources.subspan(group, group_size), gradient.type, begin, count, true, sum);
    if (group > 0) kernels.add_fp32(group_sum.data(), count, out.data());
  }
}

void check_sources(const GradientSources& gradient) {
  if (gradient.accumulator != nullptr) return;
  if (gradient.sources.empty() || gradient.group_size < 1 ||
      gradient.sources.size() % static_cast<size_t>(gradient.group_size) != 0) {
    throw std::logic_error("GradientSources: the sources do not form whole groups");
  }
}

void check_wave(const GradientSources& wave, bool first) {
  if (wave.accumulator != nullptr) throw std::logic_error("accumulate: a wave has no accumulator of its own");
  if (first && wave.sources.empty()) throw std::logic_error("accumulate: the first wave has no source");
}

void check_block_sums(int64_t elements, std::span<double> block_sums) {
  if (static_cast<int64_t>(block_sums.size()) != ceil_div(elements, kBlockElements)) {
    throw std::logic_error("one sum for each block is needed");
  }
}

// Block sums of `count` elements; zeros follow a last block that is shorter.
void square_range(const Kernels& kernels, const float* values, int64_t count, double* block_sums) {
  const int64_t blocks = count / kBlockElements, rest = count % kBlockElements;
  kernels.square_blocks(values, blocks, block_sums);
  if (rest == 0) return;
  std::array<float, kBlockElements> last{};
  std::copy_n(values + blocks * kBlockElements, rest, last.begin());
  kernels.square_blocks(last.data(), 1, block_sums + blocks);
}

// 64 squares of finite floats cannot overflow a double, so a sum is finite exactly if its elements are.
bool all_finite(std::span<const double> block_sums) {
  return std::all_of(block_sums.begin(), block_sums.end(), [](double sum) { return std::isfinite(sum); });
}

}  // namespace

void adam_update(std::span<uint16_t> hi, std::span<uint16_t> lo, std::span<float> m, std::span<float> v,
                 const GradientSources& gradient, const AdamScalars& scalars, bool decay, UpdatePart part) {
  if (lo.size() != hi.size() || m.size() != hi.size() || v.size() != hi.size()) {
    throw std::logic_error("adam_update: the state's spans differ in length");
  }
  check_sources(gradient);
  if (scalars.skip) return;
  const Kernels& kernels = widest_kernels();
  const Kernels::Update update = kernels.update[static_cast<size_t>(part)];
  const float factor = decay ? scalars.decay : 1.0f;
  const auto elements = static_cast<int64_t>(hi.size());
  Tile tile;
  for (int64_t begin = 0; begin < elements; begin += kTile) {
    const int64_t count = std::min(kTile, elements - begin);
    sum_tile(kernels, gradient, begin, count, tile);
    update(hi.data() + begin, lo.data() + begin, m.data() + begin, v.data() + begin, tile.data(), count, scalars,
           factor);
  }
}

bool block_square_sums(const GradientSources& gradient, int64_t elements, std::span<double> block_sums) {
  check_block_sums(elements, block_sums);
  check_sources(gradient);
  const Kernels& kernels = widest_kernels();
  Tile tile;
  for (int64_t begin = 0; begin < elements; begin += kTile) {
    const int64_t count = std::min(kTile, elements - begin);
    sum_tile(kernels, gradient, begin, count, tile);
    square_range(kernels, tile.data(), count, block_sums.data() + begin / kBlockElements);
  }
  return all_finite(block_sums);
}

void accumulate(std::span<float> accumulator, const GradientSources& wave, bool first) {
  check_wave(wave, first);
  const Kernels& kernels = widest_kernels();
  const auto elements = static_cast<int64_t>(accumulator.size());
  for (int64_t begin = 0; begin < elements; begin += kTile) {
    const int64_t count = std::min(kTile, elements - begin);
    take_sources(kernels, wave.sources, wave.type, begin, count, first, accumulator.data() + begin);
  }
}

bool accumulate_and_square(std::span<float> accumulator, const GradientSources& wave, bool first,
                           std::span<double> block_sums) {
  const auto elements = static_cast<int64_t>(accumulator.size());
  check_block_sums(elements, block_sums);
  check_wave(wave, first);
  const Kernels& kernels = widest_kernels();
  for (int64_t begin = 0; begin < elements; begin += kTile) {
    const int64_t count = std::min(kTile, elements - begin);
    float* sum = accumulator.data() + begin;
    take_sources(kernels, wave.sources, wave.type, begin, count, first, sum);
    square_range(kernels, sum, count, block_sums.data() + begin / kBlockElements);
  }
  return all_finite(block_sums);
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
