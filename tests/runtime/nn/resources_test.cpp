// Casts, the fast exponential, temporaries against the planner's bound, threads, the saved layout, flops.
#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <thread>

#include "model/base/error.h"
#include "model/cost/activations.h"
#include "model/cost/flops.h"
#include "runtime/nn/aten_compute.h"
#include "runtime/nn/counting_allocator.h"
#include "runtime/nn/matrix_products.h"
#include "runtime/nn/vector_math.h"
#include "tests/runtime/nn/fixture.h"

namespace slidedp {
namespace {

TEST(FastExp, WithinTwoUlpOverTheWholeRangeAndKeepsNan) {
  double worst = 0;
  for (double x = -87.2; x < 88.2; x += 1.0 / 4096) {
    const float argument = static_cast<float>(x);
    const double exact = std::exp(static_cast<double>(argument));
    worst = std::max(worst, std::abs(fast_exp(argument) - exact) / exact);
  }
  EXPECT_LT(worst, 2 * 1.1920929e-7);
  EXPECT_GT(worst, 0.0);
  EXPECT_EQ(fast_exp(0.0f), 1.0f);
  EXPECT_TRUE(std::isnan(fast_exp(NAN)));
  EXPECT_LT(fast_exp(-std::numeric_limits<float>::infinity()), 1.3e-38f);
  EXPECT_GT(fast_exp(std::numeric_limits<float>::infinity()), 1e38f);
}

TEST(Cast, RoundsToNearestEvenAndCopies) {
  const ModelSpec model = llama_model();
  const auto compute = make_aten_compute(model, make_layout(model), plan_for(model, 1, 8));
  const std::vector<std::pair<float, uint16_t>> cases = {
      {1.0f, 0x3f80},
      {std::bit_cast<float>(0x3f808000u), 0x3f80},  // tie, even below
      {std::bit_cast<float>(0x3f818000u), 0x3f82},  // tie, even above
      {std::bit_cast<float>(0x3f808001u), 0x3f81},
      {std::bit_cast<float>(0x7f7fffffu), 0x7f80},  // largest finite rounds to infinity
      {std::bit_cast<float>(0x00000001u), 0x0000},
      {-0.0f, 0x8000},
      {std::numeric_limits<float>::infinity(), 0x7f80},
      {std::bit_cast<float>(0x7f800001u), 0x7fc0}};  // NaN stays NaN though its high half is infinity's
  std::vector<float> from;
  for (const auto& [value, bits] : cases) from.push_back(value);
  std::vector<uint16_t> to(from.size());
  compute->cast(from.data(), DType::fp32, to.data(), DType::bf16, static_cast<int64_t>(from.size()));
  for (size_t i = 0; i < cases.size(); ++i) EXPECT_EQ(to[i], cases[i].second) << "case " << i;

  std::vector<uint16_t> every(65536), back(65536);
  for (size_t i = 0; i < every.size(); ++i) every[i] = static_cast<uint16_t>(i);
  std::vector<float> wide(65536);
  compute->cast(every.data(), DType::bf16, wide.data(), DType::fp32, 65536);
  compute->cast(wide.data(), DType::fp32, back.data(), DType::bf16, 65536);
  for (size_t i = 0; i < every.size(); ++i) {
    if (!std::isnan(wide[i])) {
      ASSERT_EQ(back[i], every[i]);
    }
  }
  std::vector<float> copy(65536);
  compute->cast(wide.data(), DType::fp32, copy.data(), DType::fp32, 65536);
  EXPECT_EQ(std::memcmp(copy.data(), wide.data(), 65536 * 4), 0);
}

TEST(MatrixProducts, AreThoseOfALayersPasses) {
  const ModelSpec model = llama_model();
  const auto compute = make_aten_compute(model, make_layout(model), plan_for(model, 1, 8));
  auto* products = dynamic_cast<MatrixProducts*>(compute.get());
  ASSERT_NE(products, nullptr);
  constexpr int64_t kTokens = 3, kInputs = 5, kOutputs = 4;
  // Small integers: exact in bf16, and every sum in fp32.
  std::vector<float> x(kTokens * kInputs), slope(kTokens * kOutputs), w(kOutputs * kInputs);
  std::vector<uint16_t> matrix(w.size());
  for (size_t i = 0; i < x.size(); ++i) x[i] = static_cast<float>(i % 7) - 3;
  for (size_t i = 0; i < slope.size(); ++i) slope[i] = static_cast<float>(i % 5) - 1;
  for (size_t i = 0; i < w.size(); ++i) {
    w[i] = static_cast<float>(i % 11) - 4;
    matrix[i] = static_cast<uint16_t>(std::bit_cast<uint32_t>(w[i]) >> 16);
  }
  const auto at = [](const std::vector<float>& m, int64_t width) {
    return [&m, width](int64_t row, int64_t column) { return m[static_cast<size_t>(row * width + column)]; };
  };
  const auto transposed = [](auto m) { return [m](int64_t row, int64_t column) { return m(column, row); }; };
  // left [rows, inner] times right [inner, columns].
  const auto expect_product = [&](ProductPass pass, const float* a, const void* b, int64_t rows, int64_t inner,
                                  int64_t columns, auto left, auto right) {
    std::vector<float> out(static_cast<size_t>(rows * columns));
    products->product(pass, kTokens, kInputs, kOutputs, a, b, out.data());
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t column = 0; column < columns; ++column) {
        float sum = 0;
        for (int64_t i = 0; i < inner; ++i) sum += left(row, i) * right(i, column);
        EXPECT_EQ(at(out, columns)(row, column), sum);
      }
    }
  };
  const auto xs = at(x, kInputs), slopes = at(slope, kOutputs), ws = at(w, kInputs);
  expect_product(ProductPass::forward, x.data(), matrix.data(), kTokens, kInputs, kOutputs, xs, transposed(ws));
  expect_product(ProductPass::input_gradient, slope.data(), matrix.data(), kTokens, kOutputs, kInputs, slopes, ws);
  expect_product(ProductPass::weight_gradient, slope.data(), x.data(), kOutputs, kTokens, kInputs, transposed(slopes),
                 xs);
}

// Peak of the c10 allocator over a whole step of one rank, with what the compute object keeps.
int64_t measured_temporaries(const ModelSpec& model, const Plan& plan, const TestBatch& batch) {
  install_counting_allocator();
  const int64_t before = counted_memory().in_use;
  reset_counted_peak();
  const ModelLayout layout = make_layout(model);
  const auto compute = make_aten_compute(model, layout, plan);
  const auto embedding = random_weights(layout.embedding(), 1);
  const auto layer = random_weights(layout.units[1], 2);
  const auto head = random_weights(layout.head(), 3);
  const int64_t tokens = batch.rows * batch.seq;
  Slot<float> hidden(tokens * model.hidden), out(hidden.elements());
  Slot<float> saved(saved_layout(model, tokens, plan.compute, plan.activation.front()).bytes / 4);
  Slot<float> layer_gradients(layout.units[1].elements), head_gradients(layout.head().elements);
  Slot<float> vocabulary_gradients(layout.embedding().elements);
  double loss = 0;
  const MicroBatch micro_batch = batch.micro_batch();
  compute->embedding_forward(embedding.data(), micro_batch, hidden.data());
  compute->layer_forward(0, layer.data(), micro_batch, hidden.data(), saved.data(), out.data());
  compute->head(head.data(), model.tied ? embedding.data() : nullptr, micro_batch, out.data(), out.data(),
                head_gradients.data(), model.tied ? vocabulary_gradients.data() : nullptr, true, &loss);
  compute->layer_backward(0, layer.data(), micro_batch, hidden.data(), saved.data(), out.data(), layer_gradients.data(),
                          true);
  compute->embedding_backward(micro_batch, out.data(), vocabulary_gradients.data(), model.vocabulary, true);
  return counted_memory().peak - before;
}

struct MemoryCase {
  std::string name;
  ModelSpec model;
  int64_t rows, seq, head_chunk;
  std::vector<int64_t> documents;
  int threads = 1;
  DType accumulator = DType::fp32;
  ActivationPolicy policy = ActivationPolicy::keep;
};

void PrintTo(const MemoryCase& memory_case, std::ostream* out) { *out << memory_case.name; }

// Wide heads in many short documents: what a selective layer forms again is the largest temporary.
std::vector<MemoryCase> wide_head_cases() {
  std::vector<MemoryCase> cases;
  for (const bool qk_norm : {false, true}) {
    ModelSpec model = llama_model();
    model.head_dim = 64;
    model.qk_norm = qk_norm;
    cases.push_back({qk_norm ? "rotated_heads_dominate" : "rotated_copy_dominates", model, 16, 64, 8,
                     std::vector<int64_t>(16, 64), 1, DType::fp32, ActivationPolicy::selective});
  }
  return cases;
}

std::vector<MemoryCase> memory_cases() {
  std::vector<MemoryCase> cases;
  for (const ModelSpec& model : all_models()) cases.push_back({model.name, model, 2, 64, 32, {64, 64}});
  ModelSpec model = llama_model();
  cases.push_back({"attention_scratch_dominates", model, 1, 1024, 16, {1024}, 2});
  model.intermediate = 3000;
  cases.push_back({"matrices_dominate", model, 1, 64, 8, {64}});
  cases.push_back({"activations_dominate", model, 4, 256, 8, {256, 256, 256, 256}});
  model.vocabulary = 8000;
  cases.push_back({"logits_dominate", model, 2, 128, 128, {128, 128}, 2});
  cases.push_back({"bf16_accumulator", model, 2, 128, 64, {128, 128}, 1, DType::bf16});
  const size_t keep_cases = cases.size();
  for (const ActivationPolicy policy : {ActivationPolicy::selective, ActivationPolicy::recompute}) {
    for (size_t i = 0; i < keep_cases; ++i) {
      cases.push_back(cases[i]);
      cases.back().name += "_" + std::string(name(policy));
      cases.back().policy = policy;
    }
  }
  for (MemoryCase& c : wide_head_cases()) cases.push_back(c);
  return cases;
}

class Temporaries : public testing::TestWithParam<MemoryCase> {};

TEST_P(Temporaries, StayInsideTheBoundAndNearIt) {
  const MemoryCase& c = GetParam();
  Plan plan = plan_for(c.model, c.rows, c.seq, c.threads, c.policy);
  plan.head_chunk_tokens = c.head_chunk;
  plan.accumulator = c.accumulator;
  const int64_t measured = measured_temporaries(c.model, plan, TestBatch(c.model, c.rows, c.seq, c.documents, 3));
  const int64_t bound = temporary_bytes(c.model, plan);
  EXPECT_LE(measured, bound);
  EXPECT_GE(measured, bound * 7 / 10) << "bound " << bound;
}

INSTANTIATE_TEST_SUITE_P(Cases, Temporaries, testing::ValuesIn(memory_cases()),
                         [](const auto& info) { return info.param.name; });

// One selective layer is enough to need its temporaries; without any, one layer that does not keep.
TEST(MixedPolicies, TemporariesAreThoseOfTheLargestLayer) {
  for (const MemoryCase& c : wide_head_cases()) {
    Plan plan = plan_for(c.model, c.rows, c.seq, c.threads);
    plan.head_chunk_tokens = c.head_chunk;
    const int64_t keep = temporary_bytes(c.model, plan);
    plan.activation.back() = ActivationPolicy::selective;
    const int64_t mixed = temporary_bytes(c.model, plan);
    plan.activation.assign(plan.activation.size(), ActivationPolicy::selective);
    EXPECT_EQ(mixed, temporary_bytes(c.model, plan)) << c.name;
    EXPECT_GT(mixed, keep * 3 / 2) << c.name;
  }
  ModelSpec model = llama_model();
  model.intermediate = 3000;
  Plan plan = plan_for(model, 4, 256);
  const int64_t keep = temporary_bytes(model, plan);
  plan.activation.back() = ActivationPolicy::recompute;
  const int64_t mixed = temporary_bytes(model, plan);
  EXPECT_EQ(mixed, 4 * (256 * 12 + 4 * 256 * 3000 + 72 * 3000));  // rotations, silu(gate) * up and its matrix
  EXPECT_LT(keep, mixed / 2);
  plan.activation.assign(plan.activation.size(), ActivationPolicy::offload);
  EXPECT_EQ(temporary_bytes(model, plan), mixed);
}

TEST(Threads, ComputeUsesThePlansThreadsOnWhicheverThreadCallsIt) {
  const ModelSpec model = llama_model();
  const ModelLayout layout = make_layout(model);
  const auto used = [&](int threads) {
    const auto compute = make_aten_compute(model, layout, plan_for(model, 1, 8, threads));
    std::thread caller([&] {
      float from = 1;
      uint16_t to = 0;
      compute->cast(&from, DType::fp32, &to, DType::bf16, 1);
      EXPECT_EQ(at::get_num_threads(), threads);
    });
    caller.join();
  };
  used(2);
  used(1);
  used(3);
}

TEST(Plans, OtherComputeTypesAreRefused) {
  const ModelSpec model = llama_model();
  Plan plan = plan_for(model, 1, 8);
  plan.compute = DType::bf16;
  EXPECT_THROW(make_aten_compute(model, make_layout(model), plan), Error);
}

TEST(SavedLayout, TensorsFollowEachOtherAndCountEveryByte) {
  const ModelSpec model = all_models()[3];  // QK-norm
  const SavedLayout layout = saved_layout(model, 16, DType::fp32, ActivationPolicy::keep);
  const int64_t queries = 6 * 36, keys = 2 * 36;
  EXPECT_EQ(layout.input_rstd, 0);
  EXPECT_EQ(layout.normed_input, 64);
  EXPECT_EQ(layout.qkv, layout.normed_input + 16 * 72 * 4);
  EXPECT_EQ(layout.qk_rstd, layout.qkv + 16 * (queries + 2 * keys) * 4);
  EXPECT_EQ(layout.qk_rotated, layout.qk_rstd + 16 * 8 * 4);
  EXPECT_EQ(layout.attention, layout.qk_rotated + 16 * (queries + keys) * 4);
  EXPECT_EQ(layout.log_sum_exp, layout.attention + 16 * queries * 4);
  EXPECT_EQ(layout.residual, layout.log_sum_exp + 16 * 6 * 4);
  EXPECT_EQ(layout.residual_rstd, layout.residual + 16 * 72 * 4);
  EXPECT_EQ(layout.normed_residual, layout.residual_rstd + 64);
  EXPECT_EQ(layout.gate_up, layout.normed_residual + 16 * 72 * 4);
  EXPECT_EQ(layout.activation, layout.gate_up + 16 * 216 * 4);  // heads are wider than gate and up together
  EXPECT_EQ(layout.bytes, layout.activation + 16 * 100 * 4);
  EXPECT_EQ(hidden_bytes(model, 16, DType::bf16), 16 * 72 * 2);
  // bf16 halves the tensors but not the fp32 statistics.
  const SavedLayout plain = saved_layout(llama_model(), 16, DType::bf16, ActivationPolicy::keep);
  const int64_t heads = 16 * 120 * 2 + 16 * 72 * 2 + 16 * 6 * 4, norms = 2 * (64 + 16 * 72 * 2);
  EXPECT_EQ(plain.bytes, norms + heads + 16 * 72 * 2 + 16 * 200 * 2 + 16 * 100 * 2);
  EXPECT_EQ(plain.qk_rotated, plain.qkv);  // rotated in place
  EXPECT_EQ(plain.qk_rstd, kNotSaved);
}

TEST(SavedLayout, SelectiveLeavesOutWhatBackwardFormsAgain) {
  for (const ModelSpec& model : all_models()) {
    const int64_t queries = model.heads * model.head_dim, keys = model.kv_heads * model.head_dim;
    const SavedLayout layout = saved_layout(model, 16, DType::fp32, ActivationPolicy::selective);
    for (const int64_t offset : {layout.input_rstd, layout.normed_input, layout.qk_rstd, layout.qk_rotated,
                                 layout.residual_rstd, layout.normed_residual, layout.activation}) {
      EXPECT_EQ(offset, kNotSaved) << model.name;
    }
    EXPECT_EQ(layout.qkv, 0);
    EXPECT_EQ(layout.attention, 16 * (queries + 2 * keys) * 4);
    EXPECT_EQ(layout.log_sum_exp, layout.attention + 16 * queries * 4);
    EXPECT_EQ(layout.residual, layout.log_sum_exp + 16 * model.heads * 4);
    EXPECT_EQ(layout.gate_up, layout.residual + 16 * model.hidden * 4);
    EXPECT_EQ(layout.bytes, layout.gate_up + 16 * std::max(2 * model.intermediate, queries) * 4);
    const int64_t norms = 2 * 16 * (1 + model.hidden) * 4;
    const int64_t heads = model.qk_norm ? 16 * (queries + keys + model.heads + model.kv_heads) * 4 : 0;
    const int64_t activation = 16 * model.intermediate * 4;
    const SavedLayout keep = saved_layout(model, 16, DType::fp32, ActivationPolicy::keep);
    EXPECT_EQ(keep.bytes - layout.bytes, norms + heads + activation) << model.name;
    for (const ActivationPolicy policy : {ActivationPolicy::recompute, ActivationPolicy::offload}) {
      const SavedLayout scratch = saved_layout(model, 16, DType::fp32, policy);
      EXPECT_EQ(scratch.activation, kNotSaved) << model.name;
      EXPECT_EQ(scratch.bytes, keep.bytes - activation) << model.name;
    }
  }
}

TEST(Flops, CountMatricesAndCausalAttention) {
  const ModelSpec model = llama_model();
  // q and o 72*72, k and v 24*72, gate, up and down 100*72; attention 2 * 2 * rows * seq^2 / 2 * 6 * 12.
  const double matrices = 2.0 * 72 * 72 + 2.0 * 24 * 72 + 3.0 * 100 * 72;
  const double forward = 2.0 * 3 * 16 * matrices + 2.0 * 3 * 16 * 16 * 72;
  EXPECT_DOUBLE_EQ(layer_forward_flops(model, 3, 16), forward);
  EXPECT_DOUBLE_EQ(head_flops(model, 48), 6.0 * 48 * 301 * 72);
  const double mlp = 2.0 * 3 * 16 * 3.0 * 100 * 72;
  EXPECT_DOUBLE_EQ(layer_forward_flops(model, 3, 16, LayerBlock::mlp), mlp);
  EXPECT_DOUBLE_EQ(layer_forward_flops(model, 3, 16, LayerBlock::attention), forward - mlp);
  for (const ActivationPolicy policy : {ActivationPolicy::selective, ActivationPolicy::recompute}) {
    EXPECT_DOUBLE_EQ(formed_again_bytes(model, 48, DType::bf16, policy, LayerBlock::attention) +
                         formed_again_bytes(model, 48, DType::bf16, policy, LayerBlock::mlp),
                     formed_again_bytes(model, 48, DType::bf16, policy));
  }
}

TEST(Flops, BackwardFormsAgainWhatItsPolicyDoesNotSave) {
  const ModelSpec model = llama_model();
  const auto bytes = [&](ActivationPolicy policy) { return formed_again_bytes(model, 48, DType::bf16, policy); };
  EXPECT_EQ(bytes(ActivationPolicy::keep), 0);
  EXPECT_DOUBLE_EQ(bytes(ActivationPolicy::recompute), 48 * 100 * 2.0);
  EXPECT_DOUBLE_EQ(bytes(ActivationPolicy::offload), 48 * 100 * 2.0);
  // Two norms read and write a hidden state each; 6 + 2 heads of 12 are read and written.
  EXPECT_DOUBLE_EQ(bytes(ActivationPolicy::selective), 48 * (100 + 4 * 72 + 2 * 96) * 2.0);
}

}  // namespace
}  // namespace slidedp
