#include "runtime/host/cpu_adam.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>

#include "runtime/host/kernels.h"

namespace slidedp {
namespace {

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
  kernels::update({hi.data(), lo.data(), m.data(), v.data()}, gradient, static_cast<int64_t>(hi.size()), scalars,
                  decay ? scalars.decay : 1.0f, part);
}

bool block_square_sums(const GradientSources& gradient, int64_t elements, std::span<double> block_sums) {
  check_block_sums(elements, block_sums);
  check_sources(gradient);
  kernels::square(gradient, elements, block_sums.data());
  return all_finite(block_sums);
}

void accumulate(std::span<float> accumulator, const GradientSources& wave, bool first) {
  check_wave(wave, first);
  kernels::accumulate(accumulator.data(), wave, static_cast<int64_t>(accumulator.size()), first, nullptr);
}

bool accumulate_and_square(std::span<float> accumulator, const GradientSources& wave, bool first,
                           std::span<double> block_sums) {
  const auto elements = static_cast<int64_t>(accumulator.size());
  check_block_sums(elements, block_sums);
  check_wave(wave, first);
  kernels::accumulate(accumulator.data(), wave, elements, first, block_sums.data());
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
