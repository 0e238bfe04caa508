#include <ATen/Parallel.h>

#include <algorithm>

#include "runtime/nn/kernels.h"
#include "runtime/nn/vector_math.h"

namespace slidedp::nn {
namespace {

int64_t token_grain(int64_t width) { return std::max<int64_t>(1, (1 << 13) / std::max<int64_t>(1, width)); }

SLIDEDP_VECTORIZE void forward_row(const float* gate, const float* up, float* out, int64_t width) {
  for (int64_t i = 0; i < width; ++i) out[i] = gate[i] / (1.0f + fast_exp(-gate[i])) * up[i];
}

// silu'(g) = s * (1 + g * (1 - s)) with s = sigmoid(g).
SLIDEDP_VECTORIZE void backward_row(float* gate, float* up, float* gradient, int64_t width, bool form_activation) {
  for (int64_t i = 0; i < width; ++i) {
    const float g = gate[i], u = up[i], d = gradient[i];
    const float denominator = 1.0f + fast_exp(-g);
    const float sigmoid = 1.0f / denominator, silu = g / denominator;
    gate[i] = d * u * (sigmoid * (1.0f + g * (1.0f - sigmoid)));
    up[i] = d * silu;
    if (form_activation) gradient[i] = silu * u;
  }
}

}  // namespace

void swiglu(const float* gate_up, int64_t tokens, int64_t width, float* out) {
  at::parallel_for(0, tokens, token_grain(width), [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const float* gate = gate_up + t * 2 * width;
      forward_row(gate, gate + width, out + t * width, width);
    }
  });
}

void swiglu_backward(float* gate_up, int64_t tokens, int64_t width, float* gradient, bool form_activation) {
  at::parallel_for(0, tokens, token_grain(width), [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      float* gate = gate_up + t * 2 * width;
      backward_row(gate, gate + width, gradient + t * width, width, form_activation);
    }
  });
}

}  // namespace slidedp::nn
