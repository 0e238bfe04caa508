#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/pow.h>
#include <ATen/ops/reciprocal.h>

#include <cmath>
#include <numbers>

#include "runtime/nn/kernels.h"
#include "runtime/nn/vector_math.h"

namespace slidedp::nn {
namespace {

// Llama 3.1: long wavelengths are stretched by `factor`, short ones stay, those between are blended. fp32 throughout,
// in transformers' order of operations.
float llama3_frequency(float frequency, const RopeSpec& rope) {
  const float context = static_cast<float>(rope.original_max_position);
  const float low_wavelength = context / static_cast<float>(rope.low_freq_factor);
  const float high_wavelength = context / static_cast<float>(rope.high_freq_factor);
  const float factor = static_cast<float>(rope.factor);
  const float wavelength = static_cast<float>(2 * std::numbers::pi) / frequency;
  if (wavelength > low_wavelength) return frequency / factor;
  if (wavelength < high_wavelength) return frequency;
  const float smooth = (context / wavelength - static_cast<float>(rope.low_freq_factor)) /
                       static_cast<float>(rope.high_freq_factor - rope.low_freq_factor);
  return (1.0f - smooth) * frequency / factor + smooth * frequency;
}

SLIDEDP_VECTORIZE void rotate(float* head, const float* cos, const float* sin, float sign, int64_t half) {
  float* first = head;
  float* second = head + half;
  for (int64_t i = 0; i < half; ++i) {
    const float a = first[i], b = second[i], s = sign * sin[i];
    first[i] = a * cos[i] - b * s;
    second[i] = b * cos[i] + a * s;
  }
}

}  // namespace

std::vector<float> rope_frequencies(const RopeSpec& rope, int64_t head_dim) {
  // ATen's own fp32 power, so that the last bit is transformers': an error of one ulp grows with the position.
  const at::Tensor exponent = at::arange(0, head_dim, 2, at::dtype(at::kFloat)).div_(static_cast<double>(head_dim));
  const at::Tensor inverse = at::pow(rope.theta, exponent).reciprocal_();
  const float* data = inverse.const_data_ptr<float>();
  std::vector<float> frequencies(data, data + head_dim / 2);
  for (float& frequency : frequencies) {
    if (rope.kind == RopeKind::linear) frequency /= static_cast<float>(rope.factor);
    if (rope.kind == RopeKind::llama3) frequency = llama3_frequency(frequency, rope);
  }
  return frequencies;
}

void fill_rope_table(std::span<const float> frequencies, int64_t positions, float* cos, float* sin) {
  const int64_t half = static_cast<int64_t>(frequencies.size());
  for (int64_t position = 0; position < positions; ++position) {
    for (int64_t i = 0; i < half; ++i) {
      const float angle = static_cast<float>(position) * frequencies[static_cast<size_t>(i)];
      cos[position * half + i] = std::cos(angle);
      sin[position * half + i] = std::sin(angle);
    }
  }
}

void rope(Rows heads, const int32_t* positions, const RopeTable& table, bool inverse) {
  const float sign = inverse ? -1.0f : 1.0f;
  at::parallel_for(0, heads.rows, 256, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const int64_t at = positions[row / heads.inner] * table.half;
      rotate(heads.at(row), table.cos + at, table.sin + at, sign, table.half);
    }
  });
}

}  // namespace slidedp::nn
