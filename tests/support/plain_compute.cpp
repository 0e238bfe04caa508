#include "tests/support/plain_compute.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <vector>

#include "model/cost/activations.h"
#include "runtime/comm/local/local_collective.h"
#include "runtime/device/cpu/cpu_device.h"

namespace slidedp::testing {
namespace {

using Floats = std::vector<float>;

float widen(uint16_t value) { return std::bit_cast<float>(static_cast<uint32_t>(value) << 16); }

// To nearest even; values are finite.
uint16_t narrow(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  return static_cast<uint16_t>((bits + 0x7fffU + ((bits >> 16) & 1U)) >> 16);
}

Floats widened(const void* weights, int64_t elements) {
  const auto* from = static_cast<const uint16_t*>(weights);
  Floats to(static_cast<size_t>(elements));
  std::transform(from, from + elements, to.begin(), widen);
  return to;
}

// Stores or adds a unit's gradient, gaps included.
void store(const Floats& gradient, DType type, bool first, void* slot) {
  for (size_t i = 0; i < gradient.size(); ++i) {
    if (type == DType::fp32) {
      float& to = static_cast<float*>(slot)[i];
      to = first ? gradient[i] : to + gradient[i];
    } else {
      uint16_t& to = static_cast<uint16_t*>(slot)[i];
      to = narrow(first ? gradient[i] : widen(to) + gradient[i]);
    }
  }
}

// y[rows, outputs] = x[rows, inputs] * matrix[outputs, inputs]^T, added to y if `add`.
void multiply(const float* x, const float* matrix, int64_t rows, int64_t outputs, int64_t inputs, bool add, float* y) {
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t o = 0; o < outputs; ++o) {
      float sum = 0;
      for (int64_t i = 0; i < inputs; ++i) sum += x[r * inputs + i] * matrix[o * inputs + i];
      y[r * outputs + o] = sum + (add ? y[r * outputs + o] : 0.0F);
    }
  }
}

// Backward of multiply(): dx = dy * matrix, d_matrix += dy^T * x.
void multiply_backward(const float* x, const float* matrix, const float* dy, int64_t rows, int64_t outputs,
                       int64_t inputs, float* dx, float* d_matrix) {
  std::fill_n(dx, rows * inputs, 0.0F);
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t o = 0; o < outputs; ++o) {
      const float d = dy[r * outputs + o];
      for (int64_t i = 0; i < inputs; ++i) {
        dx[r * inputs + i] += d * matrix[o * inputs + i];
        d_matrix[o * inputs + i] += d * x[r * inputs + i];
      }
    }
  }
}

// RMSNorm of rows; returns 1/rms of each.
Floats norm(const float* x, const float* weight, int64_t rows, int64_t width, double eps, float* y) {
  Floats scales;
  for (int64_t r = 0; r < rows; ++r) {
    float squares = 0;
    for (int64_t i = 0; i < width; ++i) squares += x[r * width + i] * x[r * width + i];
    scales.push_back(1.0F / std::sqrt(squares / static_cast<float>(width) + static_cast<float>(eps)));
    for (int64_t i = 0; i < width; ++i) y[r * width + i] = x[r * width + i] * scales.back() * weight[i];
  }
  return scales;
}

// dx += gradient of the norm's input, or = if not `add`; d_weight += gradient of its weight.
void norm_backward(const float* x, const float* weight, const float* scales, const float* dy, int64_t rows,
                   int64_t width, bool add, float* dx, float* d_weight) {
  for (int64_t r = 0; r < rows; ++r) {
    float dot = 0;
    for (int64_t i = 0; i < width; ++i) dot += dy[r * width + i] * weight[i] * x[r * width + i];
    const float scale = scales[r], correction = dot * scale * scale / static_cast<float>(width);
    for (int64_t i = 0; i < width; ++i) {
      const int64_t at = r * width + i;
      d_weight[i] += dy[at] * x[at] * scale;
      dx[at] = (add ? dx[at] : 0.0F) + scale * (dy[at] * weight[i] - x[at] * correction);
    }
  }
}

// Causal attention inside documents, query heads in groups on KV heads. Rows of `qkv` hold queries, keys, values.
struct Attention {
  const ModelSpec& model;
  const MicroBatch& batch;
  int64_t queries = model.heads * model.head_dim;
  int64_t width = (model.heads + 2 * model.kv_heads) * model.head_dim;
  float scale = 1.0F / std::sqrt(static_cast<float>(model.head_dim));

  int64_t key_at(int64_t head) const { return queries + head / (model.heads / model.kv_heads) * model.head_dim; }
  int64_t value_at(int64_t head) const { return key_at(head) + model.kv_heads * model.head_dim; }

  // Calls use(head, query token, first token of its document).
  template <typename Use>
  void for_each_query(const Use& use) const {
    for (size_t d = 0; d < batch.document_starts.size(); ++d) {
      const bool last = d + 1 == batch.document_starts.size();
      const int64_t begin = batch.document_starts[d], end = last ? batch.tokens() : batch.document_starts[d + 1];
      for (int64_t head = 0; head < model.heads; ++head) {
        for (int64_t t = begin; t < end; ++t) use(head, t, begin);
      }
    }
  }

  float dot(const float* a, const float* b) const {
    float sum = 0;
    for (int64_t i = 0; i < model.head_dim; ++i) sum += a[i] * b[i];
    return sum;
  }

  // Rotates queries and keys, back if `inverse`.
  void rotate(float* qkv, bool inverse) const {
    const int64_t half = model.head_dim / 2;
    for (int64_t t = 0; t < batch.tokens(); ++t) {
      for (int64_t head = 0; head < model.heads + model.kv_heads; ++head) {
        float* at = qkv + t * width + head * model.head_dim;
        for (int64_t i = 0; i < half; ++i) {
          const double power = -2.0 * static_cast<double>(i) / static_cast<double>(model.head_dim);
          const auto angle = static_cast<float>(batch.positions[t] * std::pow(model.rope.theta, power));
          const float cosine = std::cos(angle), sine = inverse ? -std::sin(angle) : std::sin(angle);
          const float a = at[i], b = at[i + half];
          at[i] = a * cosine - b * sine;
          at[i + half] = b * cosine + a * sine;
        }
      }
    }
  }

  void forward(const float* qkv, float* out, float* log_sum_exp) const {
    for_each_query([&](int64_t head, int64_t t, int64_t begin) {
      const float* query = qkv + t * width + head * model.head_dim;
      Floats scores;
      for (int64_t s = begin; s <= t; ++s) scores.push_back(scale * dot(query, qkv + s * width + key_at(head)));
      const float most = *std::max_element(scores.begin(), scores.end());
      float sum = 0;
      for (const float score : scores) sum += std::exp(score - most);
      const float lse = most + std::log(sum);
      log_sum_exp[t * model.heads + head] = lse;
      float* to = out + t * queries + head * model.head_dim;
      std::fill_n(to, model.head_dim, 0.0F);
      for (int64_t s = begin; s <= t; ++s) {
        const float share = std::exp(scores[static_cast<size_t>(s - begin)] - lse);
        for (int64_t i = 0; i < model.head_dim; ++i) to[i] += share * qkv[s * width + value_at(head) + i];
      }
    });
  }

  // Returns the gradient of `qkv` (rotated).
  Floats backward(const float* qkv, const float* out, const float* log_sum_exp, const float* d_out) const {
    Floats gradient(static_cast<size_t>(batch.tokens() * width), 0.0F);
    for_each_query([&](int64_t head, int64_t t, int64_t begin) {
      const int64_t query = t * width + head * model.head_dim, result = t * queries + head * model.head_dim;
      const float mean = dot(out + result, d_out + result);
      for (int64_t s = begin; s <= t; ++s) {
        const int64_t key = s * width + key_at(head), value = s * width + value_at(head);
        const float share = std::exp(scale * dot(qkv + query, qkv + key) - log_sum_exp[t * model.heads + head]);
        const float d_score = scale * share * (dot(d_out + result, qkv + value) - mean);
        for (int64_t i = 0; i < model.head_dim; ++i) {
          gradient[static_cast<size_t>(value + i)] += share * d_out[result + i];
          gradient[static_cast<size_t>(query + i)] += d_score * qkv[key + i];
          gradient[static_cast<size_t>(key + i)] += d_score * qkv[query + i];
        }
      }
    });
    return gradient;
  }
};

class PlainCompute final : public Compute {
 public:
  PlainCompute(const ModelSpec& model, const ModelLayout& layout, const Plan& plan)
      : model_(model), layout_(layout), plan_(plan) {
    const bool plain = !model.qk_norm && !model.qkv_bias && !model.o_bias && !model.mlp_bias;
    if (!plain || plan.compute != DType::fp32) throw std::logic_error("plain compute knows no such model or plan");
  }

  void embedding_forward(const void* weights, const MicroBatch& batch, void* hidden_out) override {
    const auto* matrix = static_cast<const uint16_t*>(weights) + layout_.embedding().at(TensorRole::embedding).offset;
    for (int64_t t = 0; t < batch.tokens(); ++t) {
      const Floats row = widened(matrix + batch.ids[t] * model_.hidden, model_.hidden);
      std::copy_n(row.data(), model_.hidden, static_cast<float*>(hidden_out) + t * model_.hidden);
    }
  }

  void embedding_backward(const MicroBatch& batch, const void* hidden_gradient, void* gradients, int64_t rows,
                          bool first) override {
    const UnitLayout& unit = layout_.embedding();
    const int64_t elements = rows == model_.vocabulary ? unit.elements : rows * model_.hidden;
    Floats sums(static_cast<size_t>(elements), 0.0F);
    const auto* from = static_cast<const float*>(hidden_gradient);
    for (int64_t t = 0; t < batch.tokens(); ++t) {
      float* row = sums.data() + unit.at(TensorRole::embedding).offset + batch.ids[t] * model_.hidden;
      for (int64_t i = 0; i < model_.hidden; ++i) row[i] += from[t * model_.hidden + i];
    }
    store(sums, plan_.accumulator, first, gradients);
  }

  void block_forward(LayerBlock block, int layer, const void* weights, const MicroBatch& batch, const void* hidden_in,
                     void* saved_area, void* hidden_out) override {
    const Block call(*this, block, layer, weights, batch, saved_area);
    if (block == LayerBlock::attention) {
      attention_forward(call, static_cast<const float*>(hidden_in));
    } else {
      mlp_forward(call, static_cast<float*>(hidden_out));
    }
  }

  // As the CPU backend: qkv and gate_up become their gradients.
  void block_backward(LayerBlock block, int layer, const void* weights, const MicroBatch& batch, const void* hidden_in,
                      void* saved_area, void* hidden_gradient, void* gradients, bool first) override {
    const Block call(*this, block, layer, weights, batch, saved_area);
    Floats sums(call.w.size(), 0.0F);
    auto* d_hidden = static_cast<float*>(hidden_gradient);
    if (block == LayerBlock::mlp) {
      mlp_backward(call, d_hidden, sums);
    } else {
      attention_backward(call, static_cast<const float*>(hidden_in), d_hidden, sums);
    }
    const int64_t begin = call.range.begin * size_of(plan_.accumulator);
    store(sums, plan_.accumulator, first, static_cast<char*>(gradients) + begin);
  }

  void head(const void* weights, const void* vocabulary, const MicroBatch& batch, const void* hidden_in,
            void* hidden_gradient, void* gradients, void* vocabulary_gradients, bool first, double* loss_sum) override {
    const UnitLayout& unit = layout_.head();
    const UnitLayout& matrix_unit = model_.tied ? layout_.embedding() : unit;
    const int64_t matrix_at = matrix_unit.at(model_.tied ? TensorRole::embedding : TensorRole::lm_head).offset;
    const int64_t norm_at = unit.at(TensorRole::final_norm).offset;
    const int64_t tokens = batch.tokens(), hidden = model_.hidden, words = model_.vocabulary;
    const auto* input = static_cast<const float*>(hidden_in);
    const Floats w = widened(weights, unit.elements);
    const Floats matrix = model_.tied ? widened(vocabulary, matrix_unit.elements) : w;
    Floats sums(w.size(), 0.0F), matrix_sums(model_.tied ? matrix.size() : 0, 0.0F);
    float* d_matrix = (model_.tied ? matrix_sums : sums).data() + matrix_at;

    Floats normed(static_cast<size_t>(tokens * hidden)), d_normed(normed.size());
    const Floats rstd = norm(input, w.data() + norm_at, tokens, hidden, model_.rms_eps, normed.data());
    Floats logits(static_cast<size_t>(tokens * words));
    multiply(normed.data(), matrix.data() + matrix_at, tokens, words, hidden, false, logits.data());
    *loss_sum = 0;
    for (int64_t t = 0; t < tokens; ++t) *loss_sum += token_loss(logits.data() + t * words, batch.targets[t]);
    multiply_backward(normed.data(), matrix.data() + matrix_at, logits.data(), tokens, words, hidden, d_normed.data(),
                      d_matrix);
    norm_backward(input, w.data() + norm_at, rstd.data(), d_normed.data(), tokens, hidden, false,
                  static_cast<float*>(hidden_gradient), sums.data() + norm_at);
    store(sums, plan_.accumulator, first, gradients);
    if (model_.tied) store(matrix_sums, plan_.accumulator, first, vocabulary_gradients);
  }

  void cast(const void* from, DType from_type, void* to, DType to_type, int64_t elements) override {
    if (from_type == to_type) {
      std::memmove(to, from, static_cast<size_t>(elements * size_of(from_type)));
    } else if (from_type == DType::fp32) {
      const auto* values = static_cast<const float*>(from);
      std::transform(values, values + elements, static_cast<uint16_t*>(to), narrow);
    } else {
      const auto* values = static_cast<const uint16_t*>(from);
      std::transform(values, values + elements, static_cast<float*>(to), widen);
    }
  }

 private:
  // Where a layer's saved tensors are; rstd is null where the policy does not save it.
  struct Saved {
    Saved(const PlainCompute& compute, int layer, int64_t tokens, void* base) {
      const ActivationPolicy policy = compute.plan_.activation[static_cast<size_t>(layer)];
      const SavedLayout layout = saved_layout(compute.model_, tokens, DType::fp32, policy);
      const auto at = [base](int64_t offset) {
        return offset == kNotSaved ? nullptr : reinterpret_cast<float*>(static_cast<char*>(base) + offset);
      };
      input_rstd = at(layout.input_rstd);
      qkv = at(layout.qkv);
      attention = at(layout.attention);
      log_sum_exp = at(layout.log_sum_exp);
      residual = at(layout.residual);
      residual_rstd = at(layout.residual_rstd);
      gate_up = at(layout.gate_up);
      rotated = policy != ActivationPolicy::selective;
    }
    float *input_rstd, *qkv, *attention, *log_sum_exp, *residual, *residual_rstd, *gate_up;
    bool rotated;  // queries and keys in qkv are
  };

  // What both passes of a block need: its weights alone, widened.
  struct Block {
    Block(const PlainCompute& compute, LayerBlock block, int layer, const void* weights, const MicroBatch& micro_batch,
          void* saved_area)
        : unit(compute.layout_.units.at(static_cast<size_t>(layer) + 1)),
          range(unit.range(block)),
          w(widened(static_cast<const uint16_t*>(weights) + range.begin, range.end - range.begin)),
          tokens(micro_batch.tokens()),
          saved(compute, layer, tokens, saved_area),
          attention{compute.model_, micro_batch} {}
    const float* at(TensorRole role) const { return w.data() + place(role); }
    int64_t place(TensorRole role) const { return unit.at(role).offset - range.begin; }

    const UnitLayout& unit;
    const ElementRange range;
    const Floats w;
    const int64_t tokens;
    const Saved saved;
    const Attention attention;
  };

  void attention_forward(const Block& call, const float* input) const {
    const int64_t tokens = call.tokens, hidden = model_.hidden;
    const Saved& saved = call.saved;
    const Attention& attention = call.attention;
    Floats normed(static_cast<size_t>(tokens * hidden));
    const Floats rstd = norm(input, call.at(TensorRole::input_norm), tokens, hidden, model_.rms_eps, normed.data());
    multiply(normed.data(), call.at(TensorRole::q_weight), tokens, attention.width, hidden, false, saved.qkv);
    if (saved.rotated) {
      attention.rotate(saved.qkv, false);
      attention.forward(saved.qkv, saved.attention, saved.log_sum_exp);
    } else {
      Floats rotated(saved.qkv, saved.qkv + tokens * attention.width);
      attention.rotate(rotated.data(), false);
      attention.forward(rotated.data(), saved.attention, saved.log_sum_exp);
    }
    std::copy_n(input, tokens * hidden, saved.residual);
    multiply(saved.attention, call.at(TensorRole::o_weight), tokens, hidden, attention.queries, true, saved.residual);
    if (saved.input_rstd != nullptr) std::ranges::copy(rstd, saved.input_rstd);
  }

  void mlp_forward(const Block& call, float* out) const {
    const int64_t tokens = call.tokens, hidden = model_.hidden, inner = model_.intermediate;
    const Saved& saved = call.saved;
    Floats normed(static_cast<size_t>(tokens * hidden));
    const Floats rstd =
        norm(saved.residual, call.at(TensorRole::post_norm), tokens, hidden, model_.rms_eps, normed.data());
    multiply(normed.data(), call.at(TensorRole::gate_weight), tokens, 2 * inner, hidden, false, saved.gate_up);
    if (saved.residual_rstd != nullptr) std::ranges::copy(rstd, saved.residual_rstd);
    if (out == nullptr) return;
    std::copy_n(saved.residual, tokens * hidden, out);
    multiply(activation(saved.gate_up, tokens).data(), call.at(TensorRole::down_weight), tokens, hidden, inner, true,
             out);
  }

  void mlp_backward(const Block& call, float* d_hidden, Floats& sums) const {
    const int64_t tokens = call.tokens, hidden = model_.hidden, inner = model_.intermediate;
    const Saved& saved = call.saved;
    const auto to = [&](TensorRole role) { return sums.data() + call.place(role); };
    Floats d_activation(static_cast<size_t>(tokens * inner));
    multiply_backward(activation(saved.gate_up, tokens).data(), call.at(TensorRole::down_weight), d_hidden, tokens,
                      hidden, inner, d_activation.data(), to(TensorRole::down_weight));
    activation_backward(d_activation, tokens, saved.gate_up);
    project_backward(saved.residual, saved.residual_rstd, call.at(TensorRole::post_norm),
                     call.at(TensorRole::gate_weight), saved.gate_up, tokens, 2 * inner, d_hidden,
                     to(TensorRole::post_norm), to(TensorRole::gate_weight));
  }

  void attention_backward(const Block& call, const float* input, float* d_hidden, Floats& sums) const {
    const int64_t tokens = call.tokens, hidden = model_.hidden;
    const Saved& saved = call.saved;
    const Attention& attention = call.attention;
    const auto to = [&](TensorRole role) { return sums.data() + call.place(role); };
    Floats d_attention(static_cast<size_t>(tokens * attention.queries));
    multiply_backward(saved.attention, call.at(TensorRole::o_weight), d_hidden, tokens, hidden, attention.queries,
                      d_attention.data(), to(TensorRole::o_weight));
    if (!saved.rotated) attention.rotate(saved.qkv, false);
    Floats d_qkv = attention.backward(saved.qkv, saved.attention, saved.log_sum_exp, d_attention.data());
    attention.rotate(d_qkv.data(), true);
    std::ranges::copy(d_qkv, saved.qkv);
    project_backward(input, saved.input_rstd, call.at(TensorRole::input_norm), call.at(TensorRole::q_weight), saved.qkv,
                     tokens, attention.width, d_hidden, to(TensorRole::input_norm), to(TensorRole::q_weight));
  }

  // silu(gate) * up
  Floats activation(const float* gate_up, int64_t tokens) const {
    const int64_t inner = model_.intermediate;
    Floats out;
    for (int64_t t = 0; t < tokens; ++t) {
      for (int64_t i = 0; i < inner; ++i) {
        const float gate = gate_up[t * 2 * inner + i];
        out.push_back(gate / (1.0F + std::exp(-gate)) * gate_up[t * 2 * inner + inner + i]);
      }
    }
    return out;
  }
  // gate and up become their gradients.
  void activation_backward(const Floats& gradient, int64_t tokens, float* gate_up) const {
    const int64_t inner = model_.intermediate;
    for (int64_t t = 0; t < tokens; ++t) {
      for (int64_t i = 0; i < inner; ++i) {
        float &gate = gate_up[t * 2 * inner + i], &up = gate_up[t * 2 * inner + inner + i];
        const float d = gradient[static_cast<size_t>(t * inner + i)], sigmoid = 1.0F / (1.0F + std::exp(-gate));
        const float d_up = d * gate * sigmoid;
        gate = d * up * sigmoid * (1.0F + gate * (1.0F - sigmoid));
        up = d_up;
      }
    }
  }

  // Back through a norm and the projection behind it; d_x += the gradient of the norm's input.
  void project_backward(const float* x, const float* saved_rstd, const float* norm_weight, const float* matrix,
                        const float* d_out, int64_t tokens, int64_t outputs, float* d_x, float* d_norm,
                        float* d_matrix) const {
    const int64_t hidden = model_.hidden;
    Floats normed(static_cast<size_t>(tokens * hidden)), d_normed(normed.size());
    Floats rstd = norm(x, norm_weight, tokens, hidden, model_.rms_eps, normed.data());
    if (saved_rstd != nullptr) rstd.assign(saved_rstd, saved_rstd + tokens);
    multiply_backward(normed.data(), matrix, d_out, tokens, outputs, hidden, d_normed.data(), d_matrix);
    norm_backward(x, norm_weight, rstd.data(), d_normed.data(), tokens, hidden, true, d_x, d_norm);
  }

  // -log p(target); the logits become their gradient.
  double token_loss(float* logits, int32_t target) const {
    if (target < 0) {
      std::fill_n(logits, model_.vocabulary, 0.0F);
      return 0;
    }
    const float most = *std::max_element(logits, logits + model_.vocabulary), logit = logits[target];
    double sum = 0;
    for (int64_t i = 0; i < model_.vocabulary; ++i) sum += std::exp(logits[i] - most);
    for (int64_t i = 0; i < model_.vocabulary; ++i) {
      logits[i] = static_cast<float>(std::exp(logits[i] - most) / sum) - (i == target ? 1.0F : 0.0F);
    }
    return most + std::log(sum) - logit;
  }

  const ModelSpec model_;
  const ModelLayout layout_;
  const Plan plan_;
};

}  // namespace

std::unique_ptr<Compute> make_plain_compute(const ModelSpec& model, const ModelLayout& layout, const Plan& plan) {
  return std::make_unique<PlainCompute>(model, layout, plan);
}

Backend make_plain_backend(const ModelSpec& model, const ModelLayout& layout, const Plan& plan) {
  Backend backend;
  std::vector<Device*> devices;
  for (int rank = 0; rank < plan.ranks; ++rank) {
    backend.devices.push_back(std::make_unique<CpuDevice>(rank));
    devices.push_back(backend.devices.back().get());
    backend.compute.push_back(make_plain_compute(model, layout, plan));
  }
  backend.collective = std::make_unique<LocalCollective>(std::move(devices));
  return backend;
}

ModelSpec plain_model(bool tied, int64_t hidden) {
  ModelSpec model;
  model.name = "plain";
  model.family = ModelFamily::llama;
  model.hidden = hidden;
  model.intermediate = 8;
  model.layers = 4;
  model.heads = 2;
  model.kv_heads = 1;
  model.head_dim = 6;
  model.vocabulary = 37;
  model.max_position = 64;
  model.tied = tied;
  return model;
}

}  // namespace slidedp::testing
