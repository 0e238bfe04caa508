// Small random models, training specs and plans for property tests. Same seed, same problem.
#pragma once

#include <random>
#include <string>
#include <vector>

#include "model/spec/model_spec.h"
#include "model/spec/plan.h"
#include "model/spec/train_spec.h"

namespace slidedp::testing {

class RandomProblem {
 public:
  explicit RandomProblem(uint32_t seed) : random_(seed) {
    make_model();
    make_plan();
  }
  ModelSpec model;
  TrainSpec train;
  Plan plan;

 private:
  template <typename T = int64_t>
  T pick(std::vector<T> values) {
    return values[std::uniform_int_distribution<size_t>(0, values.size() - 1)(random_)];
  }
  bool flip() { return pick({0, 1}) != 0; }

  void make_model() {
    model.family = flip() ? ModelFamily::llama : ModelFamily::qwen3;
    model.head_dim = pick({4, 8});
    model.kv_heads = pick({1, 2});
    model.heads = model.kv_heads * pick({1, 2});
    model.hidden = pick({16, 24, 32, 64, 64});
    model.intermediate = pick({32, 40});
    model.layers = pick({1, 2, 3, 5});
    model.vocabulary = pick({50, 64, 101});
    model.max_position = 64;
    model.tied = flip();
    model.qkv_bias = flip();
    model.qk_norm = flip();
  }

  void make_plan() {
    plan.model = model.fingerprint();
    plan.backend = "cpu";
    plan.ranks = static_cast<int>(pick({1, 2, 3, 4, 8}));
    if (plan.ranks > 1) plan.delivery = static_cast<Delivery>(pick({0, 1, 2}));
    plan.reduction = plan.ranks > 1 && flip() ? Reduction::gpu : Reduction::cpu;
    plan.chunk_elements = pick({64, 300, 1000, 1 << 20});
    for (int64_t layer = 0; layer < model.layers; ++layer) {
      plan.activation.push_back(static_cast<ActivationPolicy>(pick({0, 1, 2, 3, 3})));
    }
    plan.update = static_cast<UpdatePolicy>(pick({0, 1, 2}));
    plan.waves = static_cast<int>(pick({1, 1, 2, 3}));
    plan.wire = flip() ? DType::bf16 : DType::fp32;
    plan.micro_batches = static_cast<int>(pick({1, 2, 3}));
    plan.accumulator = plan.micro_batches == 1 && flip() ? DType::bf16 : DType::fp32;
    plan.seq = pick({8, 16});
    plan.micro_batch_rows = pick({1, 2});
    plan.head_chunk_tokens = pick({3, 8});
    plan.layer_slots = static_cast<int>(pick({1, 2, 3, 8}));
    plan.gradient_slots = static_cast<int>(pick({1, 2}));
    plan.vocabulary_slots = static_cast<int>(pick({1, 2}));
    plan.vocabulary_kept = model.tied && flip();
    if (model.hidden % kBlockElements == 0 && pick({0, 1, 2, 3}) > 0) plan.vocabulary_rows = VocabularyRows::touched;
    plan.wire_slots = static_cast<int>(pick({1, 2, 3}));
    const bool ring = plan.update == UpdatePolicy::eager || plan.waves > 1;
    plan.landing_slots = ring ? static_cast<int>(pick({0, 1, 3})) : 0;
    plan.threads.update = static_cast<int>(pick({1, 2}));
    train.seq = plan.seq;
    train.batch_rows = plan.batch_rows();
    train.steps = 4;
    train.touched_vocabulary_share = pick<double>({0.06, 0.5, 1.0});
    train.max_grad_norm = plan.update != UpdatePolicy::eager && flip() ? 1.0 : 0.0;
  }

  std::mt19937 random_;
};

}  // namespace slidedp::testing
