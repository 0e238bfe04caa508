#include "runtime/nn/decoder_layer.h"
#include "runtime/nn/rotated_heads.h"
#include "runtime/nn/row_scale.h"
#include "runtime/nn/tensors.h"

namespace slidedp::nn {
namespace {

float* at_bytes(void* base, int64_t offset) {
  return offset == kNotSaved ? nullptr : reinterpret_cast<float*>(static_cast<char*>(base) + offset);
}

// out = input * matrix^T, plus what `out` holds when `add`. The matrix in fp32 lives only here.
void project(const at::Tensor& input, const uint16_t* weights, int64_t outputs, float* out, bool add) {
  const at::Tensor fp32 = weights_as_fp32(weights, outputs, input.size(1));
  at::Tensor result = view(out, input.size(0), outputs);
  multiply(result, input, fp32.t(), add);
}

void forward(const LayerCall& call, const NormedProjection& block) {
  const int64_t tokens = call.tokens, hidden = call.model.hidden;
  const at::Tensor normed = saved_or_temporary(block.saved_normed, tokens, hidden);
  const RowScale rstd(block.saved_rstd, tokens);
  rms_norm(matrix_rows(block.x, tokens, hidden), call.weight(block.norm), call.model.rms_eps, rstd.data(),
           matrix_rows(normed.data_ptr<float>(), tokens, hidden));
  if (block.has_bias) fill_rows(matrix_rows(block.output, tokens, block.outputs), call.weight(block.bias), {});
  project(normed, call.weight(block.matrix), block.outputs, block.output, /*add=*/block.has_bias);
}

void attend(const LayerCall& call) {
  const RotatedHeads heads = RotatedHeads::form(call);
  attention_forward(call.attention_shape(), heads.queries(), heads.keys(), call.values(), call.saved.attention,
                    call.saved.log_sum_exp);
}

// residual = input + attention * o^T
void project_attention(const LayerCall& call) {
  const ModelSpec& model = call.model;
  fill_rows(matrix_rows(call.saved.residual, call.tokens, model.hidden), call.bias(TensorRole::o_bias, model.o_bias),
            matrix_rows(call.input, call.tokens, model.hidden));
  project(view(call.saved.attention, call.tokens, call.queries), call.weight(TensorRole::o_weight), model.hidden,
          call.saved.residual, /*add=*/true);
}

// hidden_out (may be null) = residual + (silu(gate) * up) * down^T
void project_down(const LayerCall& call, float* hidden_out) {
  const ModelSpec& model = call.model;
  if (hidden_out == nullptr && call.saved.activation == nullptr) return;
  const at::Tensor activation = saved_or_temporary(call.saved.activation, call.tokens, model.intermediate);
  swiglu(call.saved.gate_up, call.tokens, model.intermediate, activation.data_ptr<float>());
  if (hidden_out == nullptr) return;
  fill_rows(matrix_rows(hidden_out, call.tokens, model.hidden), call.bias(TensorRole::down_bias, model.mlp_bias),
            matrix_rows(call.saved.residual, call.tokens, model.hidden));
  project(activation, call.weight(TensorRole::down_weight), model.hidden, hidden_out, /*add=*/true);
}

}  // namespace

SavedTensors::SavedTensors(const SavedLayout& layout, void* base)
    : input_rstd(at_bytes(base, layout.input_rstd)),
      normed_input(at_bytes(base, layout.normed_input)),
      qkv(at_bytes(base, layout.qkv)),
      qk_rstd(at_bytes(base, layout.qk_rstd)),
      qk_rotated(at_bytes(base, layout.qk_rotated)),
      attention(at_bytes(base, layout.attention)),
      log_sum_exp(at_bytes(base, layout.log_sum_exp)),
      residual(at_bytes(base, layout.residual)),
      residual_rstd(at_bytes(base, layout.residual_rstd)),
      normed_residual(at_bytes(base, layout.normed_residual)),
      gate_up(at_bytes(base, layout.gate_up)),
      activation(at_bytes(base, layout.activation)) {}

LayerCall::LayerCall(const ModelSpec& model_spec, const UnitLayout& layout, ActivationPolicy policy,
                     const RopeTable& rope_table, const MicroBatch& micro_batch, const void* unit_weights,
                     const void* hidden_in, void* saved_area)
    : model(model_spec),
      unit(layout),
      table(rope_table),
      batch(micro_batch),
      weights(static_cast<const uint16_t*>(unit_weights)),
      input(static_cast<const float*>(hidden_in)),
      tokens(micro_batch.tokens()),
      queries(model.heads * model.head_dim),
      keys(model.kv_heads * model.head_dim),
      saved(saved_layout(model, tokens, DType::fp32, policy), saved_area) {}

AttentionShape LayerCall::attention_shape() const {
  return {model.heads, model.kv_heads, model.head_dim, tokens, batch.document_starts};
}

NormedProjection LayerCall::qkv_block() const {
  return {TensorRole::input_norm, TensorRole::q_weight, TensorRole::q_bias, model.qkv_bias, qkv_width(), input,
          saved.input_rstd,       saved.normed_input,   saved.qkv};
}

NormedProjection LayerCall::gate_up_block() const {
  return {TensorRole::post_norm, TensorRole::gate_weight, TensorRole::gate_bias, model.mlp_bias, 2 * model.intermediate,
          saved.residual,        saved.residual_rstd,     saved.normed_residual, saved.gate_up};
}

void layer_forward(const LayerCall& call, float* hidden_out) {
  forward(call, call.qkv_block());
  attend(call);
  project_attention(call);
  forward(call, call.gate_up_block());
  project_down(call, hidden_out);
}

}  // namespace slidedp::nn
