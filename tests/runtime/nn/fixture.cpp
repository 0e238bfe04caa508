#include "tests/runtime/nn/fixture.h"

#include <cmath>
#include <random>
#include <stdexcept>

#include "runtime/nn/vector_math.h"

namespace slidedp {
namespace {

ModelSpec base_model(const std::string& name) {
  ModelSpec model;
  model.name = name;
  model.hidden = 72;
  model.intermediate = 100;
  model.layers = 2;
  model.heads = 6;
  model.kv_heads = 2;
  model.head_dim = 12;
  model.vocabulary = 301;
  model.max_position = 512;
  model.rms_eps = 1e-5;
  return model;
}

}  // namespace

ModelSpec llama_model() { return base_model("llama"); }

std::vector<ModelSpec> all_models() {
  ModelSpec llama = llama_model();

  ModelSpec biased = base_model("every_bias_llama3_rope");  // one head a group
  biased.kv_heads = 6;
  biased.qkv_bias = biased.o_bias = biased.mlp_bias = true;
  biased.rope = {RopeKind::llama3, 10000.0, 8.0, 1.0, 4.0, 16};

  ModelSpec qwen2 = base_model("qwen2");  // one KV head
  qwen2.family = ModelFamily::qwen2;
  qwen2.kv_heads = 1;
  qwen2.qkv_bias = true;
  qwen2.rope.theta = 1e6;

  ModelSpec qwen3 = base_model("qwen3");  // heads wider than the hidden size, and than gate and up together
  qwen3.family = ModelFamily::qwen3;
  qwen3.head_dim = 36;
  qwen3.qk_norm = true;
  qwen3.tied = true;
  qwen3.rms_eps = 1e-6;

  ModelSpec linear = base_model("linear_rope_tied");
  linear.rope = {RopeKind::linear, 5000.0, 2.5, 1.0, 1.0, 0};
  linear.tied = true;
  return {llama, biased, qwen2, qwen3, linear};
}

Plan plan_for(const ModelSpec& model, int64_t rows, int64_t seq, int threads, ActivationPolicy policy) {
  Plan plan;
  plan.model = model.name;
  plan.backend = "cpu";
  plan.activation.assign(static_cast<size_t>(model.layers), policy);
  plan.seq = seq;
  plan.micro_batch_rows = rows;
  plan.head_chunk_tokens = rows * seq;
  plan.threads.compute_per_rank = threads;
  return plan;
}

Slot<uint16_t> random_weights(const UnitLayout& unit, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  Slot<uint16_t> slot(unit.elements);
  for (const TensorLayout& tensor : unit.tensors) {
    const bool matrix = tensor.shape.size() > 1;
    const bool norm = tensor.name.find("norm") != std::string::npos;
    const float scale = matrix ? 1.0f / std::sqrt(static_cast<float>(tensor.shape[1])) : 0.2f;
    for (int64_t i = 0; i < tensor.elements; ++i) {
      slot.data()[tensor.offset + i] = to_bf16((norm ? 1.0f : 0.0f) + scale * normal(random));
    }
  }
  return slot;
}

Slot<float> random_hidden(int64_t elements, uint32_t seed, double scale) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0.0f, static_cast<float>(scale));
  Slot<float> slot(elements);
  for (float& value : slot.span()) value = normal(random);
  return slot;
}

TestBatch::TestBatch(const ModelSpec& model, int64_t row_count, int64_t row_tokens, std::vector<int64_t> documents,
                     uint32_t seed)
    : rows(row_count), seq(row_tokens) {
  std::mt19937 random(seed);
  std::uniform_int_distribution<int32_t> token(0, static_cast<int32_t>(model.vocabulary) - 1);
  for (const int64_t length : documents) {
    starts.push_back(static_cast<int32_t>(ids.size()));
    for (int64_t i = 0; i < length; ++i) {
      ids.push_back(token(random));
      positions.push_back(static_cast<int32_t>(i));
    }
    for (int64_t i = 0; i < length; ++i) {
      const size_t at = static_cast<size_t>(starts.back() + i);
      targets.push_back(i + 1 < length && at % 5 != 0 ? ids[at + 1] : -100);
    }
  }
  if (static_cast<int64_t>(ids.size()) != rows * seq) throw std::logic_error("documents do not fill the rows");
}

double relative_difference(std::span<const float> a, std::span<const double> b) {
  if (a.size() != b.size()) throw std::logic_error("sizes differ");
  double difference = 0, norm = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    difference += (a[i] - b[i]) * (a[i] - b[i]);
    norm += b[i] * b[i];
  }
  return std::sqrt(difference / norm);
}

}  // namespace slidedp
