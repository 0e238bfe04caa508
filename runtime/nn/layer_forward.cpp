#include "runtime/nn/decoder_layer.h"
#include "runtime/nn/tensors.h"

namespace slidedp::nn {
namespace {

float* at_bytes(void* base, int64_t offset) { return reinterpret_cast<float*>(static_cast<char*>(base) + offset); }

// out = input * matrix^T, plus what `out` holds when `add`. The matrix in fp32 lives only here.
void project(const at::Tensor& input, const uint16_t* weights, int64_t outputs, float* out, bool add) {
  const at::Tensor fp32 = weights_as_fp32(weights, outputs, input.size(1));
  at::Tensor result = view(out, input.size(0), outputs);
  multiply(result, input, fp32.t(), add);
}

// The same with a bias (null: none).
void project_biased(const at::Tensor& input, const uint16_t* weights, const uint16_t* bias, int64_t outputs,
                    float* out) {
  if (bias != nullptr) fill_rows(matrix_rows(out, input.size(0), outputs), bias, {});
  project(input, weights, outputs, out, /*add=*/bias != nullptr);
}

void project_qkv(const LayerCall& call) {
  const ModelSpec& model = call.model;
  const at::Tensor normed = matrix(call.tokens, model.hidden);
  rms_norm(matrix_rows(call.input, call.tokens, model.hidden), call.weight(TensorRole::input_norm), model.rms_eps,
           call.saved.input_rstd, matrix_rows(normed.data_ptr<float>(), call.tokens, model.hidden));
  project_biased(normed, call.weight(TensorRole::q_weight), call.bias(TensorRole::q_bias, model.qkv_bias),
                 call.qkv_width(), call.saved.qkv);
}

void norm_and_rotate(const LayerCall& call) {
  const ModelSpec& model = call.model;
  const Rows queries = call.rotated_heads(call.rotated_queries(), model.heads);
  const Rows keys = call.rotated_heads(call.rotated_keys(), model.kv_heads);
  if (model.qk_norm) {
    rms_norm(call.projected_query_heads(), call.weight(TensorRole::q_norm), model.rms_eps, call.saved.qk_rstd, queries);
    rms_norm(call.projected_key_heads(), call.weight(TensorRole::k_norm), model.rms_eps,
             call.saved.qk_rstd + queries.rows, keys);
  }
  rope(queries, call.batch.positions, call.table, /*inverse=*/false);
  rope(keys, call.batch.positions, call.table, /*inverse=*/false);
}

// residual = input + attention * o^T
void project_attention(const LayerCall& call) {
  const ModelSpec& model = call.model;
  fill_rows(matrix_rows(call.saved.residual, call.tokens, model.hidden), call.bias(TensorRole::o_bias, model.o_bias),
            matrix_rows(call.input, call.tokens, model.hidden));
  project(view(call.saved.attention, call.tokens, call.queries), call.weight(TensorRole::o_weight), model.hidden,
          call.saved.residual, /*add=*/true);
}

void project_gate_up(const LayerCall& call) {
  const ModelSpec& model = call.model;
  const at::Tensor normed = matrix(call.tokens, model.hidden);
  rms_norm(matrix_rows(call.saved.residual, call.tokens, model.hidden), call.weight(TensorRole::post_norm),
           model.rms_eps, call.saved.residual_rstd, matrix_rows(normed.data_ptr<float>(), call.tokens, model.hidden));
  project_biased(normed, call.weight(TensorRole::gate_weight), call.bias(TensorRole::gate_bias, model.mlp_bias),
                 2 * model.intermediate, call.saved.gate_up);
}

// hidden_out = residual + (silu(gate) * up) * down^T
void project_down(const LayerCall& call, float* hidden_out) {
  const ModelSpec& model = call.model;
  const at::Tensor activation = matrix(call.tokens, model.intermediate);
  swiglu(call.saved.gate_up, call.tokens, model.intermediate, activation.data_ptr<float>());
  fill_rows(matrix_rows(hidden_out, call.tokens, model.hidden), call.bias(TensorRole::down_bias, model.mlp_bias),
            matrix_rows(call.saved.residual, call.tokens, model.hidden));
  project(activation, call.weight(TensorRole::down_weight), model.hidden, hidden_out, /*add=*/true);
}

}  // namespace

SavedTensors::SavedTensors(const SavedLayout& layout, void* base)
    : input_rstd(at_bytes(base, layout.input_rstd)),
      qkv(at_bytes(base, layout.qkv)),
      qk_rstd(at_bytes(base, layout.qk_rstd)),
      qk_rotated(at_bytes(base, layout.qk_rotated)),
      attention(at_bytes(base, layout.attention)),
      log_sum_exp(at_bytes(base, layout.log_sum_exp)),
      residual(at_bytes(base, layout.residual)),
      residual_rstd(at_bytes(base, layout.residual_rstd)),
      gate_up(at_bytes(base, layout.gate_up)) {}

LayerCall::LayerCall(const ModelSpec& model_spec, const UnitLayout& layout, const RopeTable& rope_table,
                     const MicroBatch& micro_batch, const void* unit_weights, const void* hidden_in, void* saved_area)
    : model(model_spec),
      unit(layout),
      table(rope_table),
      batch(micro_batch),
      weights(static_cast<const uint16_t*>(unit_weights)),
      input(static_cast<const float*>(hidden_in)),
      tokens(micro_batch.tokens()),
      queries(model.heads * model.head_dim),
      keys(model.kv_heads * model.head_dim),
      saved(saved_layout(model, tokens, DType::fp32), saved_area) {}

AttentionShape LayerCall::attention_shape() const {
  return {model.heads, model.kv_heads, model.head_dim, tokens, batch.document_starts};
}

HeadMatrix LayerCall::rotated_queries() const {
  if (model.qk_norm) return {saved.qk_rotated, queries + keys};
  return {saved.qkv, qkv_width()};
}

HeadMatrix LayerCall::rotated_keys() const {
  const HeadMatrix first = rotated_queries();
  return {first.data + queries, first.stride};
}

void layer_forward(const LayerCall& call, float* hidden_out) {
  project_qkv(call);
  norm_and_rotate(call);
  attention_forward(call.attention_shape(), call.rotated_queries(), call.rotated_keys(), call.values(),
                    call.saved.attention, call.saved.log_sum_exp);
  project_attention(call);
  project_gate_up(call);
  if (hidden_out != nullptr) project_down(call, hidden_out);
}

}  // namespace slidedp::nn
