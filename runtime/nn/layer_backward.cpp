#include <span>
#include <vector>

#include "runtime/nn/decoder_layer.h"
#include "runtime/nn/rotated_heads.h"
#include "runtime/nn/row_scale.h"
#include "runtime/nn/tensors.h"

namespace slidedp::nn {
namespace {

// matrix gradient [outputs, inputs] += gradient^T * input
void weight_gradient(const GradientSlot& slot, int64_t offset, const at::Tensor& gradient, const at::Tensor& input) {
  MatrixGradient sum(slot, offset, gradient.size(1), input.size(1));
  sum.add(0, gradient.size(1), gradient, input, slot.first());
  sum.commit();
}

void bias_gradient(const GradientSlot& slot, int64_t offset, const float* gradient, int64_t tokens, int64_t width) {
  std::vector<double> sums(static_cast<size_t>(width), 0.0);
  column_sums(matrix_rows(gradient, tokens, width), sums);
  slot.store(offset, sums);
}

// out = gradient * matrix: what flows back through a projection.
void input_gradient(const at::Tensor& gradient, const uint16_t* weights, at::Tensor& out) {
  multiply(out, gradient, weights_as_fp32(weights, gradient.size(1), out.size(1)), /*add=*/false);
}

// Gradient of a norm's weight from the gradient of its output; `x` is the norm's input.
void norm_weight_gradient(const GradientSlot& slot, int64_t offset, ConstRows x, const float* rstd,
                          ConstRows gradient) {
  std::vector<double> sums(static_cast<size_t>(x.width), 0.0);
  rms_norm_weight_sums(x, rstd, gradient, sums);
  slot.store(offset, sums);
}

// Weight, bias and norm gradients; hidden_gradient += gradient of x. One [tokens, hidden] matrix, saved or temporary,
// holds first the projection's input, then its gradient.
void backward(const LayerCall& call, const NormedProjection& block, float* hidden_gradient, const GradientSlot& slot) {
  const int64_t tokens = call.tokens, hidden = call.model.hidden;
  const ConstRows x = matrix_rows(block.x, tokens, hidden);
  at::Tensor normed = saved_or_temporary(block.saved_normed, tokens, hidden);
  const Rows normed_rows = matrix_rows(normed.data_ptr<float>(), tokens, hidden);
  const RowScale rstd(block.saved_rstd, tokens);
  if (block.saved_normed == nullptr) {
    rms_norm(x, call.weight(block.norm), call.model.rms_eps, rstd.data(), normed_rows);
  }
  const at::Tensor gradient = view(block.output, tokens, block.outputs);
  weight_gradient(slot, call.offset(block.matrix), gradient, normed);
  if (block.has_bias) {
    bias_gradient(slot, call.offset(block.bias), block.output, tokens, block.outputs);
  }
  input_gradient(gradient, call.weight(block.matrix), normed);
  norm_weight_gradient(slot, call.offset(block.norm), x, rstd.data(), normed_rows);
  rms_norm_backward(x, call.weight(block.norm), rstd.data(), normed_rows, matrix_rows(hidden_gradient, tokens, hidden),
                    /*add=*/true);
}

// saved.gate_up becomes the gradient of gate and up, a saved activation that of the activation.
void backward_down(const LayerCall& call, float* hidden_gradient, const GradientSlot& slot) {
  const int64_t tokens = call.tokens, hidden = call.model.hidden, width = call.model.intermediate;
  const bool saved = call.saved.activation != nullptr;
  const at::Tensor gradient = view(hidden_gradient, tokens, hidden);
  at::Tensor activation = saved_or_temporary(call.saved.activation, tokens, width);
  const auto weight_gradient_from_activation = [&] {
    weight_gradient(slot, call.offset(TensorRole::down_weight), gradient, activation);
  };
  if (saved) weight_gradient_from_activation();
  input_gradient(gradient, call.weight(TensorRole::down_weight), activation);
  swiglu_backward(call.saved.gate_up, tokens, width, activation.data_ptr<float>(), /*form_activation=*/!saved);
  if (!saved) weight_gradient_from_activation();
  if (call.model.mlp_bias) {
    bias_gradient(slot, call.offset(TensorRole::down_bias), hidden_gradient, tokens, hidden);
  }
}

// The gradient of the attention output takes the place of saved.gate_up, which is spent.
void backward_output(const LayerCall& call, float* hidden_gradient, const GradientSlot& slot) {
  const int64_t tokens = call.tokens, hidden = call.model.hidden;
  const at::Tensor gradient = view(hidden_gradient, tokens, hidden);
  weight_gradient(slot, call.offset(TensorRole::o_weight), gradient, view(call.saved.attention, tokens, call.queries));
  if (call.model.o_bias) bias_gradient(slot, call.offset(TensorRole::o_bias), hidden_gradient, tokens, hidden);
  at::Tensor attention_gradient = view(call.saved.gate_up, tokens, call.queries);
  input_gradient(gradient, call.weight(TensorRole::o_weight), attention_gradient);
}

// Back through QK-norm of one group of heads: projected heads become their gradients.
void backward_head_norm(const LayerCall& call, TensorRole norm, Rows projected, const float* rstd, ConstRows gradient,
                        const GradientSlot& slot) {
  norm_weight_gradient(slot, call.offset(norm), projected, rstd, gradient);
  rms_norm_backward(projected, call.weight(norm), rstd, gradient, projected, /*add=*/false);
}

// Through attention, rotation and QK-norm: saved.qkv becomes the gradient of the projected q, k, v.
void backward_attention(const LayerCall& call, const GradientSlot& slot) {
  const RotatedHeads heads = RotatedHeads::restore(call);
  attention_backward(call.attention_shape(), heads.queries(), heads.keys(), call.values(), call.saved.attention,
                     call.saved.log_sum_exp, call.saved.gate_up);
  rope(heads.query_rows(), call.batch.positions, call.table, /*inverse=*/true);
  rope(heads.key_rows(), call.batch.positions, call.table, /*inverse=*/true);
  if (!call.model.qk_norm) return;
  backward_head_norm(call, TensorRole::q_norm, call.projected_query_heads(), heads.query_rstd(), heads.query_rows(),
                     slot);
  backward_head_norm(call, TensorRole::k_norm, call.projected_key_heads(), heads.key_rstd(), heads.key_rows(), slot);
}

}  // namespace

void layer_backward(const LayerCall& call, float* hidden_gradient, const GradientSlot& gradients) {
  gradients.zero_gaps(call.unit);
  backward_down(call, hidden_gradient, gradients);
  backward(call, call.gate_up_block(), hidden_gradient, gradients);
  backward_output(call, hidden_gradient, gradients);
  backward_attention(call, gradients);
  backward(call, call.qkv_block(), hidden_gradient, gradients);
}

}  // namespace slidedp::nn
