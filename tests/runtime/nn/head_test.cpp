// Embedding and head: loss and gradients against autograd in double.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>

#include "model/base/error.h"
#include "model/cost/activations.h"
#include "runtime/nn/aten_compute.h"
#include "runtime/nn/vector_math.h"
#include "tests/runtime/nn/fixture.h"
#include "tests/runtime/nn/reference.h"

namespace slidedp {
namespace {

constexpr int64_t kRows = 2, kSeq = 48;
std::vector<int64_t> documents() { return {17, 1, 30, 48}; }

ModelSpec head_model(bool tied) {
  ModelSpec model = llama_model();
  model.tied = tied;
  return model;
}

// Buffers of one head call; slots hold fp32 gradients.
struct HeadRun {
  HeadRun(const ModelSpec& head_model, const Plan& plan, const TestBatch& test_batch)
      : model(head_model),
        layout(make_layout(model)),
        batch(test_batch),
        compute(make_aten_compute(model, layout, plan)),
        weights(random_weights(layout.head(), 1)),
        vocabulary(random_weights(layout.embedding(), 2)),
        input(random_hidden(batch.rows * batch.seq * model.hidden, 3)),
        gradient(input.elements()),
        gradients(layout.head().elements),
        vocabulary_gradients(layout.embedding().elements) {}
  void run(bool first = true) {
    compute->head(weights.data(), model.tied ? vocabulary.data() : nullptr, batch.micro_batch(), input.data(),
                  gradient.data(), gradients.data(), model.tied ? vocabulary_gradients.data() : nullptr, first, &loss);
  }
  std::span<const float> norm_gradient() const { return part(gradients, layout.head().at(TensorRole::final_norm)); }
  std::span<const float> matrix_gradient() const {
    return model.tied ? part(vocabulary_gradients, layout.embedding().at(TensorRole::embedding))
                      : part(gradients, layout.head().at(TensorRole::lm_head));
  }
  static std::span<const float> part(const Slot<float>& slot, const TensorLayout& tensor) {
    return slot.span().subspan(static_cast<size_t>(tensor.offset), static_cast<size_t>(tensor.elements));
  }

  ModelSpec model;
  ModelLayout layout;
  TestBatch batch;
  std::unique_ptr<Compute> compute;
  Slot<uint16_t> weights, vocabulary;
  Slot<float> input, gradient, gradients, vocabulary_gradients;
  double loss = NAN;
};

std::vector<float> to_vector(std::span<const float> values) { return {values.begin(), values.end()}; }

class Head : public testing::TestWithParam<bool> {};

TEST_P(Head, LossAndGradientsMatchAutogradInDouble) {
  const ModelSpec model = head_model(GetParam());
  Plan plan = plan_for(model, kRows, kSeq);
  for (const int64_t chunk : {kRows * kSeq, int64_t{13}, int64_t{1}}) {
    plan.head_chunk_tokens = chunk;
    HeadRun run(model, plan, TestBatch(model, kRows, kSeq, documents(), 5));
    run.run();

    const auto head = reference::load_weights(run.layout.head(), run.weights);
    const auto embedding = reference::load_weights(run.layout.embedding(), run.vocabulary);
    const at::Tensor matrix = model.tied ? embedding.at(TensorRole::embedding) : head.at(TensorRole::lm_head);
    const at::Tensor input = reference::leaf(run.input.span(), {kRows * kSeq, model.hidden});
    const at::Tensor loss = reference::loss(model, head.at(TensorRole::final_norm), matrix, run.batch, input);
    loss.backward();

    // Each logit carries a few fp32 roundings (6e-8) of sums of 72 products; measured: 6e-9 and 4e-7.
    EXPECT_NEAR(run.loss / reference::values(loss)[0], 1.0, 2e-7);
    EXPECT_LT(relative_difference(run.gradient.span(), reference::values(input.grad())), 2e-6);
    EXPECT_LT(relative_difference(run.norm_gradient(), reference::values(head.at(TensorRole::final_norm).grad())),
              2e-6);
    EXPECT_LT(relative_difference(run.matrix_gradient(), reference::values(matrix.grad())), 2e-6);
  }
}

TEST_P(Head, SecondMicroBatchIsAddedAndGapsAreZero) {
  const ModelSpec model = head_model(GetParam());
  const Plan plan = plan_for(model, kRows, kSeq);
  HeadRun a(model, plan, TestBatch(model, kRows, kSeq, documents(), 5));
  HeadRun b(model, plan, TestBatch(model, kRows, kSeq, {48, 48}, 6));
  a.run();
  b.run();
  HeadRun both(model, plan, a.batch);
  both.run(/*first=*/true);
  both.batch = b.batch;
  both.run(/*first=*/false);
  EXPECT_EQ(both.loss, b.loss);  // each call reports its own micro-batch
  std::vector<double> norm_sum, matrix_sum;
  for (size_t i = 0; i < a.norm_gradient().size(); ++i) {
    norm_sum.push_back(static_cast<double>(a.norm_gradient()[i]) + b.norm_gradient()[i]);
  }
  for (size_t i = 0; i < a.matrix_gradient().size(); ++i) {
    matrix_sum.push_back(static_cast<double>(a.matrix_gradient()[i]) + b.matrix_gradient()[i]);
  }
  EXPECT_LT(relative_difference(both.norm_gradient(), norm_sum), 1e-6);
  EXPECT_LT(relative_difference(both.matrix_gradient(), matrix_sum), 1e-6);
  // Between the norm (72 elements) and the next block of 64, and after the matrix.
  EXPECT_EQ(both.gradients.data()[model.hidden], 0.0f);
  EXPECT_EQ(both.gradients.span().back(), 0.0f);
  if (model.tied) {
    EXPECT_EQ(both.vocabulary_gradients.span().back(), 0.0f);
  }
}

TEST_P(Head, Bf16SlotIsRoundedOnceWhateverTheChunks) {
  const ModelSpec model = head_model(GetParam());
  Plan plan = plan_for(model, kRows, kSeq);
  plan.head_chunk_tokens = 20;
  const TestBatch batch(model, kRows, kSeq, documents(), 5);
  HeadRun exact(model, plan, batch);
  exact.run();
  plan.accumulator = DType::bf16;
  HeadRun run(model, plan, batch);
  run.run();
  const auto* rounded =
      reinterpret_cast<const uint16_t*>((model.tied ? run.vocabulary_gradients : run.gradients).data());
  const int64_t offset = model.tied ? 0 : run.layout.head().at(TensorRole::lm_head).offset;
  for (size_t i = 0; i < exact.matrix_gradient().size(); ++i) {
    ASSERT_EQ(rounded[offset + static_cast<int64_t>(i)], to_bf16(exact.matrix_gradient()[i])) << "element " << i;
  }
}

TEST_P(Head, SeveralVocabularyBlocksAndThreads) {
  // Wide rows make the fp32 block of the matrix smaller than the vocabulary.
  ModelSpec model = head_model(GetParam());
  model.hidden = 16384;
  model.vocabulary = 300;
  ASSERT_LT(head_block_rows(model), model.vocabulary);
  Plan plan = plan_for(model, 1, 24, 1);
  plan.head_chunk_tokens = 16;
  const TestBatch batch(model, 1, 24, {10, 14}, 5);
  HeadRun run(model, plan, batch);
  run.run();
  const auto head = reference::load_weights(run.layout.head(), run.weights);
  const auto embedding = reference::load_weights(run.layout.embedding(), run.vocabulary);
  const at::Tensor matrix = model.tied ? embedding.at(TensorRole::embedding) : head.at(TensorRole::lm_head);
  const at::Tensor input = reference::leaf(run.input.span(), {24, model.hidden});
  const at::Tensor loss = reference::loss(model, head.at(TensorRole::final_norm), matrix, run.batch, input);
  loss.backward();
  EXPECT_NEAR(run.loss / reference::values(loss)[0], 1.0, 1e-6);
  EXPECT_LT(relative_difference(run.gradient.span(), reference::values(input.grad())), 5e-6);
  EXPECT_LT(relative_difference(run.matrix_gradient(), reference::values(matrix.grad())), 5e-6);

  plan.threads.compute_per_rank = 2;
  HeadRun two(model, plan, batch);
  two.run();
  EXPECT_EQ(run.loss, two.loss);
  EXPECT_EQ(to_vector(run.gradient.span()), to_vector(two.gradient.span()));
  EXPECT_EQ(to_vector(run.norm_gradient()), to_vector(two.norm_gradient()));
  EXPECT_EQ(to_vector(run.matrix_gradient()), to_vector(two.matrix_gradient()));
}

INSTANTIATE_TEST_SUITE_P(Heads, Head, testing::Bool(), [](const auto& info) { return info.param ? "tied" : "untied"; });

TEST(HeadErrors, TargetBeyondTheVocabularyIsRefused) {
  const ModelSpec model = head_model(false);
  HeadRun run(model, plan_for(model, kRows, kSeq), TestBatch(model, kRows, kSeq, documents(), 5));
  run.batch.targets[20] = static_cast<int32_t>(model.vocabulary);
  EXPECT_THROW(run.run(), Error);
}

TEST(HeadLoss, NonFiniteInputGivesANonFiniteLossAndGradient) {
  const ModelSpec model = head_model(false);
  HeadRun run(model, plan_for(model, kRows, kSeq), TestBatch(model, kRows, kSeq, documents(), 5));
  run.input.data()[6 * model.hidden] = NAN;
  run.run();
  EXPECT_FALSE(std::isfinite(run.loss));
  EXPECT_FALSE(std::isfinite(run.matrix_gradient()[0]));
}

class Embedding : public testing::TestWithParam<int> {};

TEST_P(Embedding, LookupAndScatterInTokenOrder) {
  const ModelSpec model = head_model(false);
  const ModelLayout layout = make_layout(model);
  TestBatch batch(model, 4, 128, {128, 128, 128, 128}, 5);
  for (size_t t = 0; t < batch.ids.size(); t += 3) batch.ids[t] = 11;  // a frequent token
  const auto compute = make_aten_compute(model, layout, plan_for(model, 4, 128, GetParam()));
  const auto weights = random_weights(layout.embedding(), 1);
  const int64_t tokens = 4 * 128, hidden = model.hidden;

  Slot<float> out(tokens * hidden);
  compute->embedding_forward(weights.data(), batch.micro_batch(), out.data());
  for (int64_t t = 0; t < tokens; ++t) {
    for (int64_t i = 0; i < hidden; ++i) {
      ASSERT_EQ(out.data()[t * hidden + i], from_bf16(weights.data()[batch.ids[static_cast<size_t>(t)] * hidden + i]));
    }
  }

  const auto gradient = random_hidden(tokens * hidden, 2);
  Slot<float> slot(layout.embedding().elements);
  std::vector<float> expected(static_cast<size_t>(layout.embedding().elements), 0.0f);
  for (const bool first : {true, false}) {
    compute->embedding_backward(batch.micro_batch(), gradient.data(), slot.data(), model.vocabulary, first);
    for (int64_t t = 0; t < tokens; ++t) {
      for (int64_t i = 0; i < hidden; ++i) {
        expected[static_cast<size_t>(batch.ids[static_cast<size_t>(t)] * hidden + i)] +=
            gradient.data()[t * hidden + i];
      }
    }
    ASSERT_EQ(slot.copy(), expected) << "first " << first;
  }
}

TEST_P(Embedding, Bf16SlotIsRoundedOnceARow) {
  const ModelSpec model = head_model(false);
  const ModelLayout layout = make_layout(model);
  TestBatch batch(model, 1, 64, {64}, 5);
  for (int32_t& id : batch.ids) id = id % 7;
  Plan plan = plan_for(model, 1, 64, GetParam());
  const auto exact = make_aten_compute(model, layout, plan);
  plan.accumulator = DType::bf16;
  const auto compute = make_aten_compute(model, layout, plan);
  const auto gradient = random_hidden(64 * model.hidden, 2);
  Slot<float> sum(layout.embedding().elements);
  Slot<uint16_t> slot(layout.embedding().elements);
  exact->embedding_backward(batch.micro_batch(), gradient.data(), sum.data(), model.vocabulary, true);
  compute->embedding_backward(batch.micro_batch(), gradient.data(), slot.data(), model.vocabulary, true);
  for (int64_t i = 0; i < slot.elements(); ++i) ASSERT_EQ(slot.data()[i], to_bf16(sum.data()[i])) << i;
}

// A matrix of some rows: those are overwritten, and nothing behind them.
TEST_P(Embedding, ScatterIntoFewerRows) {
  const ModelSpec model = head_model(false);
  const ModelLayout layout = make_layout(model);
  TestBatch batch(model, 1, 64, {64}, 5);
  for (int32_t& id : batch.ids) id = id % 7;
  const auto compute = make_aten_compute(model, layout, plan_for(model, 1, 64, GetParam()));
  const auto gradient = random_hidden(64 * model.hidden, 2);
  const int64_t rows = 9, elements = rows * model.hidden;
  Slot<float> whole(layout.embedding().elements), compact(layout.embedding().elements);
  std::fill_n(compact.data(), compact.elements(), 5.0F);
  compute->embedding_backward(batch.micro_batch(), gradient.data(), whole.data(), model.vocabulary, true);
  compute->embedding_backward(batch.micro_batch(), gradient.data(), compact.data(), rows, true);
  for (int64_t i = 0; i < compact.elements(); ++i) {
    ASSERT_EQ(compact.data()[i], i < elements ? whole.data()[i] : 5.0F) << i;
  }
}

TEST(EmbeddingErrors, IdBeyondTheVocabularyIsRefused) {
  const ModelSpec model = head_model(false);
  const ModelLayout layout = make_layout(model);
  TestBatch batch(model, 1, 8, {8}, 5);
  batch.ids[3] = static_cast<int32_t>(model.vocabulary);
  const auto compute = make_aten_compute(model, layout, plan_for(model, 1, 8));
  const auto weights = random_weights(layout.embedding(), 1);
  Slot<float> out(8 * model.hidden);
  EXPECT_THROW(compute->embedding_forward(weights.data(), batch.micro_batch(), out.data()), Error);
}

INSTANTIATE_TEST_SUITE_P(Threads, Embedding, testing::Values(1, 2));

}  // namespace
}  // namespace slidedp
