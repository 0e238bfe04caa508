// Elementwise and row-wise kernels of the CPU backend: plain loops over raw pointers, parallel over rows or columns.
// Deterministic: the order of every sum is fixed by the shapes, not by the number of threads.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "model/base/types.h"
#include "model/spec/model_spec.h"

namespace slidedp::nn {

// Rows inside a larger fp32 array: row r starts at data + (r / inner) * outer_stride + (r % inner) * width. A plain
// matrix has inner 1; the heads of every token have inner = heads, width = head_dim. Borrowed memory.
template <typename T>
struct RowsOf {
  T* data = nullptr;
  int64_t rows = 0;
  int64_t width = 0;
  int64_t outer_stride = 0;
  int64_t inner = 1;
  T* at(int64_t row) const { return data + row / inner * outer_stride + row % inner * width; }
  operator RowsOf<const T>() const { return {data, rows, width, outer_stride, inner}; }
};
using Rows = RowsOf<float>;
using ConstRows = RowsOf<const float>;
template <typename T>
RowsOf<T> matrix_rows(T* data, int64_t rows, int64_t width) {
  return {data, rows, width, width, 1};
}

// Conversions between bf16 and fp32, round to nearest even.
void widen(const uint16_t* from, float* to, int64_t elements);
void narrow(const float* from, uint16_t* to, int64_t elements);
std::vector<float> widen(const uint16_t* from, int64_t elements);

// out = x * rstd * weight with rstd = 1 / sqrt(mean(x^2) + eps) of each row; weight is one row. Source: LlamaRMSNorm.
void rms_norm(ConstRows x, const uint16_t* weight, double eps, float* rstd, Rows out);
// gradient: in = gradient of the norm's output. dx = or += gradient of its input. dx may alias gradient or x.
void rms_norm_backward(ConstRows x, const uint16_t* weight, const float* rstd, ConstRows gradient, Rows dx, bool add);
// sums[j] += sum over rows of gradient * x * rstd: the weight's gradient.
void rms_norm_weight_sums(ConstRows x, const float* rstd, ConstRows gradient, std::span<double> sums);
// sums[j] += sum over rows of gradient: a bias's gradient.
void column_sums(ConstRows gradient, std::span<double> sums);

// Every row = bias (may be null: zero) + the same row of `residual` (data may be null: zero).
void fill_rows(Rows out, const uint16_t* bias, ConstRows residual);

// cos and sin of position * frequency, [positions, head_dim / 2] each. Frequencies as transformers computes them
// (modeling_rope_utils.py: default, linear, llama3), in fp32.
struct RopeTable {
  int64_t half = 0;
  int64_t positions = 0;
  const float* cos = nullptr;
  const float* sin = nullptr;
};
std::vector<float> rope_frequencies(const RopeSpec& rope, int64_t head_dim);
// Fills cos and sin, which have room for positions * frequencies each.
void fill_rope_table(std::span<const float> frequencies, int64_t positions, float* cos, float* sin);
// Rotates heads in place (rotate-half); `heads.inner` rows of one token share a position. inverse: the transpose, which
// is what backward needs.
void rope(Rows heads, const int32_t* positions, const RopeTable& table, bool inverse);

// gate_up: [tokens, 2 * width], gate then up. out = silu(gate) * up.
void swiglu(const float* gate_up, int64_t tokens, int64_t width, float* out);
// gradient: of the activation; if `form_activation`, out = the activation (the bits of swiglu()). gate_up: out =
// gradients of gate and up.
void swiglu_backward(float* gate_up, int64_t tokens, int64_t width, float* gradient, bool form_activation);

// logits [targets.size(), vocabulary]: in = logits, out = softmax - onehot (zero where the target is -100). Returns the
// sum of -log p(target) in token order.
double cross_entropy(float* logits, std::span<const int32_t> targets, int64_t vocabulary);

}  // namespace slidedp::nn
