// QK-norm (where the model has it) and rotary position embedding of all query and key heads, from and into row-major
// [tokens, ...] buffers. Memory-bound: forward reads and writes queries and keys once; backward reads gradients and,
// with QK-norm, the projected heads, and writes the gradient of q, k and v once.
#pragma once

#include "runtime/nn/kernels/launch.h"

namespace slidedp::nn {

struct HeadShape {
  int64_t tokens = 0;
  int heads = 0, kv_heads = 0;
  int head_dim = 0;  // even; at most 32 pairs of the widest vector that divides its half
};
// Throws std::logic_error if the kernels cannot take heads of this size.
void check_head_dim(int head_dim);

// cos and sin of position * frequency, fp32 [positions, head_dim / 2] each, and every token's position. A position
// outside the table gives NaN.
struct Rotation {
  const int32_t* positions = nullptr;
  const float* cos = nullptr;
  const float* sin = nullptr;
  int64_t table_positions = 0;
};

// RMSNorm weights of a query and a key head, [head_dim] each; null: no QK-norm.
struct HeadNorm {
  const uint16_t* query = nullptr;
  const uint16_t* key = nullptr;
  float eps = 0;
};

// in: queries then keys of a token, `in_stride` elements between tokens; out: the same. May be the same memory (with
// the same stride). rstd: fp32 [tokens, heads + kv_heads], 1/rms of every head, may be null; only with QK-norm.
void qk_rope(const HeadShape& shape, const Rotation& rotation, const HeadNorm& norm, const uint16_t* in,
             int64_t in_stride, uint16_t* out, int64_t out_stride, float* rstd, cudaStream_t stream);

// Gradients as attention's backward leaves them: dense [tokens, heads * head_dim].
struct HeadGradients {
  const uint16_t* query = nullptr;
  const uint16_t* key = nullptr;
  const uint16_t* value = nullptr;
};

// qkv [tokens, (heads + 2 * kv_heads) * head_dim]: in = projected heads (read with QK-norm only), out = their
// gradients. partials (QK-norm): [qk_rope_partial_rows()][2][head_dim], sums of the weight gradients, query
// first.
int64_t qk_rope_partial_rows();
void qk_rope_backward(const HeadShape& shape, const Rotation& rotation, const HeadNorm& norm, const float* rstd,
                      const HeadGradients& gradients, uint16_t* qkv, float* partials, cudaStream_t stream);

}  // namespace slidedp::nn
