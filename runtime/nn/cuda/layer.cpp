#include "runtime/nn/cuda/layer.h"

#include "runtime/nn/kernels/column_sums.h"
#include "runtime/nn/kernels/rms_norm.h"
#include "runtime/nn/kernels/swiglu.h"

namespace slidedp::nn {
namespace {

template <typename T>
T* part(void* saved, int64_t offset) {
  return offset == kNotSaved ? nullptr : reinterpret_cast<T*>(static_cast<char*>(saved) + offset);
}

}  // namespace

CudaLayer::CudaLayer(const CudaContext& context, CudaAttention& attention, const ModelSpec& model,
                     const UnitLayout& unit, ActivationPolicy policy, const CudaRopeTable& table,
                     const MicroBatch& batch, const void* weights, const void* hidden_in, void* saved)
    : context_(context),
      attention_(attention),
      model_(model),
      unit_(unit),
      table_(table),
      batch_(batch),
      weights_(static_cast<const uint16_t*>(weights)),
      input_(static_cast<const uint16_t*>(hidden_in)),
      tokens_(batch.tokens()),
      queries_(model.heads * model.head_dim),
      keys_(model.kv_heads * model.head_dim) {
  const SavedLayout layout = saved_layout(model, tokens_, DType::bf16, policy);
  normed_input_ = part<uint16_t>(saved, layout.normed_input);
  qkv_ = part<uint16_t>(saved, layout.qkv);
  qk_rotated_ = part<uint16_t>(saved, layout.qk_rotated);
  attention_out_ = part<uint16_t>(saved, layout.attention);
  residual_ = part<uint16_t>(saved, layout.residual);
  normed_residual_ = part<uint16_t>(saved, layout.normed_residual);
  gate_up_ = part<uint16_t>(saved, layout.gate_up);
  activation_ = part<uint16_t>(saved, layout.activation);
  input_rstd_ = part<float>(saved, layout.input_rstd);
  qk_rstd_ = part<float>(saved, layout.qk_rstd);
  log_sum_exp_ = part<float>(saved, layout.log_sum_exp);
  residual_rstd_ = part<float>(saved, layout.residual_rstd);
}

CudaLayer::NormedProjection CudaLayer::qkv_block() const {
  return {TensorRole::input_norm,
          TensorRole::q_weight,
          TensorRole::q_bias,
          model_.qkv_bias,
          queries_ + 2 * keys_,
          input_,
          input_rstd_,
          normed_input_,
          qkv_};
}

CudaLayer::NormedProjection CudaLayer::gate_up_block() const {
  return {TensorRole::post_norm, TensorRole::gate_weight, TensorRole::gate_bias,
          model_.mlp_bias,       2 * model_.intermediate, residual_,
          residual_rstd_,        normed_residual_,        gate_up_};
}

HeadShape CudaLayer::head_shape() const {
  return {tokens_, static_cast<int>(model_.heads), static_cast<int>(model_.kv_heads),
          static_cast<int>(model_.head_dim)};
}

Rotation CudaLayer::rotation() const { return {batch_.positions, table_.cos, table_.sin, table_.positions}; }

HeadNorm CudaLayer::head_norm() const {
  if (!model_.qk_norm) return {};
  return {weight(TensorRole::q_norm), weight(TensorRole::k_norm), static_cast<float>(model_.rms_eps)};
}

AttentionInputs CudaLayer::attention_inputs(const RotatedHeads& rotated) const {
  return {{rotated.heads, rotated.stride},
          {rotated.heads + queries_, rotated.stride},
          {qkv_ + queries_ + keys_, queries_ + 2 * keys_}};
}

CudaLayer::Place CudaLayer::saved_or_temporary(uint16_t* saved, int64_t elements) const {
  if (saved != nullptr) return {{}, saved};
  Place place{context_.bf16(elements), nullptr};
  place.data = bf16_data(place.temporary);
  return place;
}

// The stride between tokens is the same wherever the heads lie, so attention makes the same calls under every policy.
CudaLayer::RotatedHeads CudaLayer::rotate(uint16_t* place) const {
  RotatedHeads rotated{{}, {}, place, qk_rstd_, model_.qk_norm ? queries_ + keys_ : queries_ + 2 * keys_};
  if (place == nullptr) {
    rotated.heads_temporary = context_.bf16(tokens_ * rotated.stride);
    rotated.heads = bf16_data(rotated.heads_temporary);
  }
  if (model_.qk_norm && rotated.rstd == nullptr) {
    rotated.rstd_temporary = context_.fp32(tokens_ * (model_.heads + model_.kv_heads));
    rotated.rstd = fp32_data(rotated.rstd_temporary);
  }
  qk_rope(head_shape(), rotation(), head_norm(), qkv_, queries_ + 2 * keys_, rotated.heads, rotated.stride,
          rotated.rstd, context_.stream);
  return rotated;
}

// The saved ones, or formed again; without QK-norm, whose gradient needs the projected heads, in their place.
CudaLayer::RotatedHeads CudaLayer::rotated_for_backward() const {
  if (qk_rotated_ == nullptr) return rotate(model_.qk_norm ? nullptr : qkv_);
  return {{}, {}, qk_rotated_, qk_rstd_, model_.qk_norm ? queries_ + keys_ : queries_ + 2 * keys_};
}

void CudaLayer::project(const NormedProjection& block) const {
  const int64_t hidden = model_.hidden;
  const Place normed = saved_or_temporary(block.saved_normed, tokens_ * hidden);
  rms_norm(block.x, weight(block.norm), static_cast<float>(model_.rms_eps), tokens_, hidden, block.saved_rstd,
           normed.data, context_.stream);
  context_.multiply({.rows = tokens_,
                     .columns = block.outputs,
                     .inner = hidden,
                     .a = {.data = normed.data, .stride = hidden},
                     .b = {.data = weight(block.matrix), .stride = hidden, .transposed = true},
                     .out = block.output,
                     .out_stride = block.outputs,
                     .bias = block.has_bias ? weight(block.bias) : nullptr});
}

void CudaLayer::project_onto(const uint16_t* input, int64_t inputs, TensorRole matrix, TensorRole bias, bool has_bias,
                             const uint16_t* residual, uint16_t* out) const {
  context_.multiply({.rows = tokens_,
                     .columns = model_.hidden,
                     .inner = inputs,
                     .a = {.data = input, .stride = inputs},
                     .b = {.data = weight(matrix), .stride = inputs, .transposed = true},
                     .out = out,
                     .out_stride = model_.hidden,
                     .add = residual,
                     .bias = has_bias ? weight(bias) : nullptr});
}

void CudaLayer::forward(LayerBlock block, uint16_t* hidden_out) const {
  block == LayerBlock::attention ? forward_attention() : forward_mlp(hidden_out);
}

void CudaLayer::forward_attention() const {
  project(qkv_block());
  {
    const RotatedHeads rotated = rotate(qk_rotated_);
    attention_.forward(context_, batch_, attention_inputs(rotated), attention_out_, log_sum_exp_);
  }
  project_onto(attention_out_, queries_, TensorRole::o_weight, TensorRole::o_bias, model_.o_bias, input_, residual_);
}

void CudaLayer::forward_mlp(uint16_t* hidden_out) const {
  project(gate_up_block());
  if (hidden_out == nullptr && activation_ == nullptr) return;
  const Place activation = saved_or_temporary(activation_, tokens_ * model_.intermediate);
  swiglu(gate_up_, tokens_, model_.intermediate, activation.data, context_.stream);
  if (hidden_out == nullptr) return;
  project_onto(activation.data, model_.intermediate, TensorRole::down_weight, TensorRole::down_bias, model_.mlp_bias,
               residual_, hidden_out);
}

// gate_up becomes the gradient of gate and up, a saved activation that of the activation.
void CudaLayer::backward_down(const uint16_t* hidden_gradient, const CudaGradientSlot& slot) const {
  const int64_t width = model_.intermediate;
  const bool saved = activation_ != nullptr;
  const Place activation = saved_or_temporary(activation_, tokens_ * width);
  const auto weight_gradient_from_activation = [&] {
    weight_gradient(context_, slot, offset(TensorRole::down_weight), hidden_gradient, model_.hidden, activation.data,
                    width, tokens_);
  };
  if (saved) weight_gradient_from_activation();
  input_gradient(context_, hidden_gradient, model_.hidden, weight(TensorRole::down_weight), width, tokens_,
                 activation.data);
  swiglu_backward(gate_up_, tokens_, width, activation.data, /*form_activation=*/!saved, context_.stream);
  if (!saved) weight_gradient_from_activation();
  if (model_.mlp_bias) {
    bias_gradient(context_, slot.at(offset(TensorRole::down_bias)), hidden_gradient, tokens_, model_.hidden);
  }
}

// Weight, bias and norm gradients; hidden_gradient += gradient of x. One [tokens, hidden] matrix, saved or temporary,
// holds first the projection's input, then its gradient.
void CudaLayer::backward_block(const NormedProjection& block, uint16_t* hidden_gradient,
                               const CudaGradientSlot& slot) const {
  const int64_t hidden = model_.hidden;
  const Place normed = saved_or_temporary(block.saved_normed, tokens_ * hidden);
  at::Tensor rstd_temporary;
  float* rstd = block.saved_rstd;
  if (rstd == nullptr) {
    rstd_temporary = context_.fp32(tokens_);
    rstd = fp32_data(rstd_temporary);
    rms_norm(block.x, weight(block.norm), static_cast<float>(model_.rms_eps), tokens_, hidden, rstd, normed.data,
             context_.stream);
  }
  weight_gradient(context_, slot, offset(block.matrix), block.output, block.outputs, normed.data, hidden, tokens_);
  if (block.has_bias) {
    bias_gradient(context_, slot.at(offset(block.bias)), block.output, tokens_, block.outputs);
  }
  input_gradient(context_, block.output, block.outputs, weight(block.matrix), hidden, tokens_, normed.data);
  const int64_t rows = rms_norm_partial_rows(tokens_, hidden);
  const at::Tensor partials = context_.fp32(rows * hidden);
  rms_norm_backward(block.x, weight(block.norm), rstd, normed.data, tokens_, hidden, hidden_gradient,
                    /*add=*/true, fp32_data(partials), /*continued=*/false, context_.stream);
  store_column_sums(fp32_data(partials), rows, hidden, hidden, slot.at(offset(block.norm)), context_.stream);
}

// The gradient of the attention output takes the place of gate_up, which is spent.
void CudaLayer::backward_output(const uint16_t* hidden_gradient, const CudaGradientSlot& slot) const {
  weight_gradient(context_, slot, offset(TensorRole::o_weight), hidden_gradient, model_.hidden, attention_out_,
                  queries_, tokens_);
  if (model_.o_bias) {
    bias_gradient(context_, slot.at(offset(TensorRole::o_bias)), hidden_gradient, tokens_, model_.hidden);
  }
  input_gradient(context_, hidden_gradient, model_.hidden, weight(TensorRole::o_weight), queries_, tokens_, gate_up_);
}

// Through attention, rotation and QK-norm: qkv becomes the gradient of the projected q, k, v.
void CudaLayer::backward_attention(const CudaGradientSlot& slot) const {
  const RotatedHeads rotated = rotated_for_backward();
  const AttentionGradients gradients =
      attention_.backward(context_, batch_, attention_inputs(rotated), attention_out_, log_sum_exp_, gate_up_);
  const int64_t dim = model_.head_dim, rows = qk_rope_partial_rows();
  at::Tensor partials;
  if (model_.qk_norm) partials = context_.fp32(rows * 2 * dim);
  float* sums = model_.qk_norm ? fp32_data(partials) : nullptr;
  qk_rope_backward(head_shape(), rotation(), head_norm(), rotated.rstd,
                   {bf16_data(gradients.query), bf16_data(gradients.key), bf16_data(gradients.value)}, qkv_, sums,
                   context_.stream);
  if (!model_.qk_norm) return;
  store_column_sums(sums, rows, dim, 2 * dim, slot.at(offset(TensorRole::q_norm)), context_.stream);
  store_column_sums(sums + dim, rows, dim, 2 * dim, slot.at(offset(TensorRole::k_norm)), context_.stream);
}

void CudaLayer::backward(LayerBlock block, uint16_t* hidden_gradient, const CudaGradientSlot& slot) const {
  slot.zero_gaps(unit_, context_.stream, block);
  if (block == LayerBlock::mlp) {
    backward_down(hidden_gradient, slot);
    return backward_block(gate_up_block(), hidden_gradient, slot);
  }
  backward_output(hidden_gradient, slot);
  backward_attention(slot);
  backward_block(qkv_block(), hidden_gradient, slot);
}

}  // namespace slidedp::nn
