// Bytes of activations and temporaries of the compute backends, from shapes alone. The compute backend lays its saved
// tensors out by SavedLayout, so what the planner counts is what runs.
#pragma once

#include <cstdint>

#include "model/base/types.h"
#include "model/spec/model_spec.h"
#include "model/spec/plan.h"

namespace slidedp {

// Offsets in bytes of the tensors that one layer saves for one micro-batch of `tokens` tokens (activation policy keep:
// everything that backward reads besides the layer input and that is not cheaper to form again: the normed inputs and
// silu(gate) * up are). Offsets are 64-byte aligned. Backward turns qkv, qk_rotated and gate_up into their gradients.
struct SavedLayout {
  int64_t input_rstd = 0;  // fp32 [tokens]: 1/rms of the layer input
  // Compute type, one row a token: [tokens, (heads + 2 * kv_heads) * head_dim], queries, keys, values, after bias.
  // Without QK-norm queries and keys are rotated (RoPE) in place; with it they stay as projected.
  int64_t qkv = 0;
  int64_t qk_rstd = 0;        // only with qk_norm: fp32 [tokens, heads + kv_heads]: 1/rms per head
  int64_t qk_rotated = 0;     // only with qk_norm: [tokens, (heads + kv_heads) * head_dim], normed and rotated
  int64_t attention = 0;      // compute type [tokens, heads * head_dim]
  int64_t log_sum_exp = 0;    // fp32, heads * tokens; document by document, inside one [kv head][token][group]
  int64_t residual = 0;       // compute type [tokens, hidden]: input + attention block
  int64_t residual_rstd = 0;  // fp32 [tokens]
  // Compute type [tokens, 2 * intermediate], gate then up, after bias. Backward reuses the area for the gradient of the
  // attention output, so it also has room for [tokens, heads * head_dim].
  int64_t gate_up = 0;
  int64_t bytes = 0;
};
SavedLayout saved_layout(const ModelSpec& model, int64_t tokens, DType compute);

inline int64_t hidden_bytes(const ModelSpec& model, int64_t tokens, DType compute) {
  return tokens * model.hidden * size_of(compute);
}

// Rows of the LM-head matrix that the CPU backend holds in fp32 at once: about 16 MiB, at least one block of 64.
int64_t head_block_rows(const ModelSpec& model);

// Upper bound of the temporaries that one rank's compute lane holds at any moment under this plan (CPU backend: what
// the c10 allocator hands out; each term is written beside the name of the tensor).
int64_t temporary_bytes(const ModelSpec& model, const Plan& plan);

}  // namespace slidedp
