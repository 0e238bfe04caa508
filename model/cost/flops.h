// Work of compute tasks, from shapes alone. Multiply-add counts as 2 flops; attention as causal (half of the square).
#pragma once

#include <cstdint>

#include "model/base/types.h"
#include "model/spec/model_spec.h"
#include "model/spec/plan.h"

namespace slidedp {

// Forward of one layer over rows x seq tokens: 2 * tokens * matrix parameters + attention 2 * 2 * rows * seq^2 / 2 *
// heads * head_dim. Those of the two blocks add up to those of the whole.
double layer_forward_flops(const ModelSpec& model, int64_t rows, int64_t seq, LayerBlock block = LayerBlock::whole);
// What a layer's backward reads and writes on the device beyond what it does under `keep`, to form again what its
// policy does not save (SavedLayout). All but keep: silu(gate) * up is written, tokens * intermediate elements.
// Selective also reads layer input and residual and writes them normed, and reads the projected queries and keys and
// writes them after QK-norm and RoPE: tokens * (4 * hidden + 2 * (heads + kv_heads) * head_dim) elements. The MLP block
// has silu(gate) * up and the residual.
double formed_again_bytes(const ModelSpec& model, int64_t tokens, DType compute, ActivationPolicy policy,
                          LayerBlock block = LayerBlock::whole);
// Forward and backward of the LM head: 3 * 2 * tokens * vocabulary * hidden.
double head_flops(const ModelSpec& model, int64_t tokens);
// The embedding is memory-bound: its "flops" are elements written. Backward of a wave's first micro-batch also zeroes
// the whole gradient matrix.
double embedding_forward_elements(const ModelSpec& model, int64_t tokens);
double embedding_backward_elements(const ModelSpec& model, int64_t tokens, bool first);

}  // namespace slidedp
