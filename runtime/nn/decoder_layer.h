// One decoder layer, forward and backward, over a unit's flat weight and gradient slots.
#pragma once

#include <cstdint>

#include "model/base/types.h"
#include "model/cost/activations.h"
#include "model/spec/layout.h"
#include "model/spec/model_spec.h"
#include "runtime/nn/attention.h"
#include "runtime/nn/compute.h"
#include "runtime/nn/gradient_slot.h"
#include "runtime/nn/kernels.h"

namespace slidedp::nn {

// The saved tensors of one layer and micro-batch, as pointers into the saved area; null: not saved.
struct SavedTensors {
  SavedTensors(const SavedLayout& layout, void* base);
  float *input_rstd, *normed_input, *qkv, *qk_rstd, *qk_rotated, *attention, *log_sum_exp, *residual, *residual_rstd,
      *normed_residual, *gate_up, *activation;
};

// The block "projection of a norm": output = rms_norm(x) * matrix^T + bias.
struct NormedProjection {
  TensorRole norm, matrix, bias;
  bool has_bias;
  int64_t outputs;
  const float* x;
  float *saved_rstd, *saved_normed;  // both or neither; null: not saved
  float* output;                     // backward: its gradient
};

// What both passes need; cheap to make, borrows everything.
struct LayerCall {
  LayerCall(const ModelSpec& model, const UnitLayout& unit, ActivationPolicy policy, const RopeTable& table,
            const MicroBatch& batch, const void* weights, const void* hidden_in, void* saved);

  const ModelSpec& model;
  const UnitLayout& unit;
  const RopeTable& table;
  const MicroBatch& batch;
  const uint16_t* weights;        // bf16, the unit's flat vector
  const float* input;             // [tokens, hidden]
  int64_t tokens, queries, keys;  // queries = heads * head_dim, keys = kv_heads * head_dim
  SavedTensors saved;

  int64_t qkv_width() const { return queries + 2 * keys; }
  int64_t offset(TensorRole role) const { return unit.at(role).offset; }
  const uint16_t* weight(TensorRole role) const { return weights + offset(role); }
  const uint16_t* bias(TensorRole role, bool present) const { return present ? weight(role) : nullptr; }
  AttentionShape attention_shape() const;
  NormedProjection qkv_block() const;
  NormedProjection gate_up_block() const;
  HeadMatrix values() const { return {saved.qkv + queries + keys, qkv_width()}; }
  // As projected (before QK-norm), one row a head.
  Rows projected_query_heads() const {
    return {saved.qkv, tokens * model.heads, model.head_dim, qkv_width(), model.heads};
  }
  Rows projected_key_heads() const {
    return {saved.qkv + queries, tokens * model.kv_heads, model.head_dim, qkv_width(), model.kv_heads};
  }
};

// Fills call.saved; hidden_out [tokens, hidden] may be null.
void layer_forward(const LayerCall& call, float* hidden_out);
// hidden_gradient: in = of the output, out = of the input. Overwrites call.saved.
void layer_backward(const LayerCall& call, float* hidden_gradient, const GradientSlot& gradients);

}  // namespace slidedp::nn
