#include "tests/runtime/nn/reference.h"

#include <ATen/ATen.h>

#include <bit>
#include <cmath>
#include <numbers>

namespace slidedp::reference {
namespace {

at::Tensor norm(const at::Tensor& x, const at::Tensor& weight, double eps) {
  return x * at::rsqrt(x.pow(2).mean(-1, /*keepdim=*/true) + eps) * weight;
}

at::Tensor linear(const at::Tensor& x, const Weights& weights, TensorRole matrix, TensorRole bias) {
  at::Tensor y = at::matmul(x, weights.at(matrix).t());
  return weights.contains(bias) ? y + weights.at(bias) : y;
}

double frequency(const RopeSpec& rope, int64_t i, int64_t head_dim) {
  const double plain = std::pow(rope.theta, -2.0 * static_cast<double>(i) / static_cast<double>(head_dim));
  if (rope.kind == RopeKind::standard) return plain;
  if (rope.kind == RopeKind::linear) return plain / rope.factor;
  // Llama 3.1: turns that a wave makes over the original context decide.
  const double turns = static_cast<double>(rope.original_max_position) * plain / (2 * std::numbers::pi);
  if (turns < rope.low_freq_factor) return plain / rope.factor;
  if (turns > rope.high_freq_factor) return plain;
  const double share = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor);
  return plain * ((1 - share) / rope.factor + share);
}

// heads [tokens, n, d]: complex rotation of the pairs (i, i + d/2).
at::Tensor rotate(const at::Tensor& heads, const RopeSpec& rope, const TestBatch& batch) {
  const int64_t d = heads.size(2);
  at::Tensor angle = at::empty({heads.size(0), 1, d / 2}, at::kDouble);
  for (int64_t t = 0; t < heads.size(0); ++t) {
    for (int64_t i = 0; i < d / 2; ++i) {
      angle[t][0][i] = batch.positions[static_cast<size_t>(t)] * frequency(rope, i, d);
    }
  }
  const at::Tensor a = heads.narrow(2, 0, d / 2), b = heads.narrow(2, d / 2, d / 2);
  return at::cat({a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()}, 2);
}

// True where key j may be seen from query i: same document, not later.
at::Tensor visible(const TestBatch& batch) {
  const int64_t tokens = batch.rows * batch.seq;
  at::Tensor mask = at::zeros({tokens, tokens}, at::kBool);
  for (size_t doc = 0; doc < batch.starts.size(); ++doc) {
    const int64_t begin = batch.starts[doc];
    const int64_t end = doc + 1 < batch.starts.size() ? batch.starts[doc + 1] : tokens;
    mask.narrow(0, begin, end - begin).narrow(1, begin, end - begin).fill_(true);
  }
  return mask.tril();
}

at::Tensor attention(const ModelSpec& model, const Weights& weights, const TestBatch& batch, const at::Tensor& x) {
  const int64_t tokens = x.size(0), d = model.head_dim;
  at::Tensor q = linear(x, weights, TensorRole::q_weight, TensorRole::q_bias).view({tokens, model.heads, d});
  at::Tensor k = linear(x, weights, TensorRole::k_weight, TensorRole::k_bias).view({tokens, model.kv_heads, d});
  at::Tensor v = linear(x, weights, TensorRole::v_weight, TensorRole::v_bias).view({tokens, model.kv_heads, d});
  if (model.qk_norm) {
    q = norm(q, weights.at(TensorRole::q_norm), model.rms_eps);
    k = norm(k, weights.at(TensorRole::k_norm), model.rms_eps);
  }
  const int64_t group = model.heads / model.kv_heads;
  q = rotate(q, model.rope, batch).transpose(0, 1);
  k = rotate(k, model.rope, batch).repeat_interleave(group, 1).transpose(0, 1);
  v = v.repeat_interleave(group, 1).transpose(0, 1);
  at::Tensor scores = at::matmul(q, k.transpose(1, 2)) / std::sqrt(static_cast<double>(d));
  scores = scores.masked_fill(visible(batch).logical_not(), -INFINITY);
  const at::Tensor out = at::matmul(at::softmax(scores, -1), v).transpose(0, 1).reshape({tokens, model.heads * d});
  return linear(out, weights, TensorRole::o_weight, TensorRole::o_bias);
}

}  // namespace

at::Tensor leaf(std::span<const float> data, at::IntArrayRef shape) {
  at::Tensor tensor = at::empty(shape, at::kDouble);
  std::copy(data.begin(), data.end(), tensor.data_ptr<double>());
  return tensor.requires_grad_(true);
}

Weights load_weights(const UnitLayout& unit, const Slot<uint16_t>& weights) {
  Weights result;
  for (const TensorLayout& tensor : unit.tensors) {
    std::vector<float> data(static_cast<size_t>(tensor.elements));
    for (size_t i = 0; i < data.size(); ++i) {
      data[i] =
          std::bit_cast<float>(static_cast<uint32_t>(weights.data()[tensor.offset + static_cast<int64_t>(i)]) << 16);
    }
    result[tensor.role] = leaf(data, tensor.shape);
  }
  return result;
}

void backward(const at::Tensor& output, std::span<const float> gradient) {
  (output * leaf(gradient, output.sizes()).detach()).sum().backward();
}

std::vector<double> values(const at::Tensor& tensor) {
  const at::Tensor dense = tensor.detach().to(at::kDouble).contiguous();
  return {dense.const_data_ptr<double>(), dense.const_data_ptr<double>() + dense.numel()};
}

at::Tensor layer(const ModelSpec& model, const Weights& weights, const TestBatch& batch, const at::Tensor& input) {
  const at::Tensor residual =
      input + attention(model, weights, batch, norm(input, weights.at(TensorRole::input_norm), model.rms_eps));
  const at::Tensor x = norm(residual, weights.at(TensorRole::post_norm), model.rms_eps);
  const at::Tensor gate = linear(x, weights, TensorRole::gate_weight, TensorRole::gate_bias);
  const at::Tensor up = linear(x, weights, TensorRole::up_weight, TensorRole::up_bias);
  return residual + linear(gate * at::sigmoid(gate) * up, weights, TensorRole::down_weight, TensorRole::down_bias);
}

at::Tensor loss(const ModelSpec& model, const at::Tensor& norm_weight, const at::Tensor& matrix, const TestBatch& batch,
                const at::Tensor& input) {
  const at::Tensor logits = at::matmul(norm(input, norm_weight, model.rms_eps), matrix.t());
  const at::Tensor log_p = logits - at::logsumexp(logits, 1, /*keepdim=*/true);
  at::Tensor sum = at::zeros({}, at::kDouble);
  for (size_t t = 0; t < batch.targets.size(); ++t) {
    if (batch.targets[t] >= 0) sum = sum - log_p[static_cast<int64_t>(t)][batch.targets[t]];
  }
  return sum;
}

}  // namespace slidedp::reference
