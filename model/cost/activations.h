// Bytes of activations and temporaries of the compute backends, from shapes alone. The compute backend lays its saved
// tensors out by SavedLayout, so what the planner counts is what runs.
#pragma once

#include <algorithm>
#include <cstdint>
#include <iterator>

#include "model/base/types.h"
#include "model/spec/model_spec.h"
#include "model/spec/plan.h"

namespace slidedp {

// A tensor that is not saved: backward forms it again, or the model has no such tensor.
inline constexpr int64_t kNotSaved = -1;

// Offsets in bytes of the tensors that one layer saves for one micro-batch of `tokens` tokens, besides the layer input,
// which is a buffer of its own. `keep` saves all that backward reads. `selective` forms again every norm, RoPE and
// silu(gate) * up. Recompute and offload, whose scratch holds one layer, have in it what keep has but silu(gate) * up:
// the backward of that forms it on its way. Offsets are 64-byte aligned. Backward writes over all of it: what it has
// read becomes a gradient.
struct SavedLayout {
  int64_t input_rstd = kNotSaved;    // fp32 [tokens]: 1/rms of the layer input; not selective
  int64_t normed_input = kNotSaved;  // compute type [tokens, hidden]; not selective
  // Compute type, one row a token: [tokens, (heads + 2 * kv_heads) * head_dim], queries, keys, values, after bias, as
  // projected unless qk_rotated says otherwise.
  int64_t qkv = 0;
  int64_t qk_rstd = kNotSaved;  // fp32 [tokens, heads + kv_heads]: 1/rms per head; only with QK-norm, not selective
  // Queries and keys after QK-norm and RoPE; not selective. With QK-norm [tokens, (heads + kv_heads) * head_dim];
  // without, equal to qkv: they are rotated where they are.
  int64_t qk_rotated = kNotSaved;
  int64_t attention = 0;                // compute type [tokens, heads * head_dim]
  int64_t log_sum_exp = 0;              // fp32, heads * tokens; by document, inside one [kv head][token][group]
  int64_t residual = 0;                 // compute type [tokens, hidden]: input + attention block
  int64_t residual_rstd = kNotSaved;    // fp32 [tokens]; not selective
  int64_t normed_residual = kNotSaved;  // compute type [tokens, hidden]; not selective
  // Compute type [tokens, 2 * intermediate], gate then up, after bias. Backward reuses the area for the gradient of the
  // attention output, so it also has room for [tokens, heads * head_dim].
  int64_t gate_up = 0;
  int64_t activation = kNotSaved;  // compute type [tokens, intermediate]: silu(gate) * up; keep only
  int64_t bytes = 0;
};
SavedLayout saved_layout(const ModelSpec& model, int64_t tokens, DType compute, ActivationPolicy policy);

// What decides over temporaries: a rank's layers run one after another, so one layer of a policy is like all.
inline bool all_keep(const Plan& plan) {
  return std::ranges::count(plan.activation, ActivationPolicy::keep) == std::ssize(plan.activation);
}
inline bool some_selective(const Plan& plan) {
  return std::ranges::count(plan.activation, ActivationPolicy::selective) > 0;
}

inline int64_t hidden_bytes(const ModelSpec& model, int64_t tokens, DType compute) {
  return tokens * model.hidden * size_of(compute);
}

// Rows of the LM-head matrix that the CPU backend holds in fp32 at once: about 16 MiB, at least one block of 64.
int64_t head_block_rows(const ModelSpec& model);

// Upper bound of the temporaries that one rank's compute lane holds at any moment under this plan's backend, with what
// its compute object keeps: what ATen's allocator hands out. Each term is written beside the name of the tensor.
int64_t temporary_bytes(const ModelSpec& model, const Plan& plan);

// The CUDA backend's share of that: sizes that the formula and the code have in common.
int64_t cuda_temporary_bytes(const ModelSpec& model, const Plan& plan);
inline constexpr int64_t kCudaProductWorkspaceBytes = int64_t{32} << 20;  // cuBLASLt's, kept
inline constexpr int64_t kAttentionTileRows = 256;                        // queries in a tile of the tiled attention
// Documents of a micro-batch of so many tokens that one call of the flash kernels takes: they hold memory for 128
// tokens more per document.
int64_t flash_documents(int64_t tokens);
// cos and sin of half a head, for every position; kept.
int64_t cuda_rope_table_bytes(const ModelSpec& model, const Plan& plan);
// The one block that all but the kept and the small temporaries are cut from.
int64_t cuda_temporary_block_bytes(const ModelSpec& model, const Plan& plan);

}  // namespace slidedp
