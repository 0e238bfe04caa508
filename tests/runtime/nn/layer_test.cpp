// Decoder layer: forward and every gradient against autograd of an independent forward in double.
#include <gtest/gtest.h>

#include <bit>
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

// fp32 rounds at 6e-8 relative; sums here have up to 216 terms and pass a dozen operations, and the attention kernel's
// exponential is good to about 1e-6. Measured: at most 3e-7 (forward) and 1.9e-6 (gradients).
constexpr double kForwardTolerance = 2e-6;
constexpr double kGradientTolerance = 5e-6;

constexpr int64_t kRows = 2, kSeq = 48;
std::vector<int64_t> documents() { return {17, 1, 30, 48}; }

// One layer's buffers; the results of a forward and a backward.
struct LayerRun {
  LayerRun(const ModelSpec& model, const Plan& plan, const TestBatch& test_batch, int shift = 0)
      : layout(make_layout(model)),
        saved_tensors(saved_layout(model, test_batch.rows * test_batch.seq, DType::fp32, plan.activation.front())),
        unit(layout.units[1]),
        batch(test_batch),
        compute(make_aten_compute(model, layout, plan)),
        weights(random_weights(unit, 1)),
        input(batch.rows * batch.seq * model.hidden, shift),
        output(input.elements(), shift),
        gradient(input.elements(), shift),
        saved(saved_tensors.bytes / 4, shift),
        gradients(unit.elements, shift) {
    copy(random_hidden(input.elements(), 2), input);
    copy(random_hidden(input.elements(), 3), gradient);
  }
  static void copy(const Slot<float>& from, Slot<float>& to) {
    std::memcpy(to.data(), from.data(), static_cast<size_t>(to.elements()) * 4);
  }
  void forward() {
    compute->layer_forward(0, weights.data(), batch.micro_batch(), input.data(), saved.data(), output.data());
  }
  void backward(bool first = true) {
    compute->layer_backward(0, weights.data(), batch.micro_batch(), input.data(), saved.data(), gradient.data(),
                            gradients.data(), first);
  }

  ModelLayout layout;
  SavedLayout saved_tensors;
  const UnitLayout& unit;
  TestBatch batch;
  std::unique_ptr<Compute> compute;
  Slot<uint16_t> weights;
  Slot<float> input, output, gradient, saved, gradients;
};

bool same_bits(const Slot<float>& a, const Slot<float>& b) {
  return std::memcmp(a.data(), b.data(), static_cast<size_t>(a.elements()) * 4) == 0;
}

// A saved tensor as it lies in the area, up to the next one.
std::vector<float> saved_tensor(const LayerRun& run, int64_t offset, int64_t elements) {
  const auto tensor = run.saved.span().subspan(static_cast<size_t>(offset / 4), static_cast<size_t>(elements));
  return {tensor.begin(), tensor.end()};
}

class Layer : public testing::TestWithParam<ModelSpec> {};

TEST_P(Layer, ForwardAndGradientsMatchAutogradInDouble) {
  const ModelSpec& model = GetParam();
  LayerRun run(model, plan_for(model, kRows, kSeq), TestBatch(model, kRows, kSeq, documents(), 7));
  const auto output_gradient = random_hidden(run.gradient.elements(), 3);
  run.forward();
  run.backward();

  const int64_t tokens = kRows * kSeq;
  const auto weights = reference::load_weights(run.unit, run.weights);
  const at::Tensor input = reference::leaf(run.input.span(), {tokens, model.hidden});
  const at::Tensor output = reference::layer(model, weights, run.batch, input);
  reference::backward(output, output_gradient.span());

  EXPECT_LT(relative_difference(run.output.span(), reference::values(output)), kForwardTolerance);
  EXPECT_LT(relative_difference(run.gradient.span(), reference::values(input.grad())), kGradientTolerance);
  for (const TensorLayout& tensor : run.unit.tensors) {
    const auto ours =
        run.gradients.span().subspan(static_cast<size_t>(tensor.offset), static_cast<size_t>(tensor.elements));
    const std::vector<double> expected = reference::values(weights.at(tensor.role).grad());
    EXPECT_LT(relative_difference(ours, expected), kGradientTolerance) << tensor.name;
  }
}

TEST_P(Layer, ForwardWithoutAnOutputSavesTheSameBits) {
  const ModelSpec& model = GetParam();
  const TestBatch batch(model, kRows, kSeq, documents(), 7);
  for (const ActivationPolicy policy :
       {ActivationPolicy::keep, ActivationPolicy::selective, ActivationPolicy::recompute}) {
    SCOPED_TRACE(name(policy));
    const Plan plan = plan_for(model, kRows, kSeq, 1, policy);
    LayerRun once(model, plan, batch), twice(model, plan, batch);
    once.forward();
    twice.forward();
    // As recomputation does: into an area that holds something else.
    std::memset(twice.saved.data(), 0x3f, static_cast<size_t>(twice.saved.elements()) * 4);
    twice.compute->layer_forward(0, twice.weights.data(), batch.micro_batch(), twice.input.data(), twice.saved.data(),
                                 nullptr);
    once.backward();
    twice.backward();
    EXPECT_TRUE(same_bits(once.gradients, twice.gradients));
    EXPECT_TRUE(same_bits(once.gradient, twice.gradient));
  }
}

TEST_P(Layer, EveryPolicyGivesTheSameBitsAsKeep) {
  const ModelSpec& model = GetParam();
  struct Shape {
    int64_t seq;
    std::vector<int64_t> documents;
  };
  // Short and uneven documents; then enough tokens for several blocks of the products and tiles of attention.
  for (const Shape& shape : {Shape{kSeq, documents()}, Shape{kSeq, {48, 48}}, Shape{400, {300, 100, 400}}}) {
    const TestBatch batch(model, kRows, shape.seq, shape.documents, 7);
    for (const int threads : {1, 2}) {
      LayerRun keep(model, plan_for(model, kRows, shape.seq, threads), batch);
      // Twice, so that gradients are overwritten once and added once.
      const auto twice = [](LayerRun& run) {
        for (const bool first : {true, false}) {
          run.forward();
          run.backward(first);
        }
      };
      twice(keep);
      for (const ActivationPolicy policy :
           {ActivationPolicy::selective, ActivationPolicy::recompute, ActivationPolicy::offload}) {
        SCOPED_TRACE(std::string(name(policy)) + ", " + std::to_string(shape.seq) + " tokens, threads " +
                     std::to_string(threads));
        LayerRun run(model, plan_for(model, kRows, shape.seq, threads, policy), batch, /*shift=*/1);
        twice(run);
        EXPECT_TRUE(same_bits(keep.output, run.output));
        EXPECT_TRUE(same_bits(keep.gradient, run.gradient));
        EXPECT_TRUE(same_bits(keep.gradients, run.gradients));
      }
    }
  }
}

TEST_P(Layer, SelectiveSavesProjectedHeadsAndWritesNothingElse) {
  const ModelSpec& model = GetParam();
  const Plan plan = plan_for(model, kRows, kSeq, 1, ActivationPolicy::selective);
  LayerRun run(model, plan, TestBatch(model, kRows, kSeq, documents(), 7));
  TestBatch elsewhere = run.batch;  // other positions: other rotations
  for (int32_t& position : elsewhere.positions) position = static_cast<int32_t>(kSeq) - 1 - position;
  LayerRun moved(model, plan, elsewhere);
  run.forward();
  moved.forward();
  const int64_t tokens = kRows * kSeq;
  const int64_t qkv = tokens * (model.heads + 2 * model.kv_heads) * model.head_dim;
  const int64_t attention = tokens * model.heads * model.head_dim;
  const SavedLayout& layout = run.saved_tensors;
  EXPECT_EQ(saved_tensor(run, layout.qkv, qkv), saved_tensor(moved, layout.qkv, qkv));
  EXPECT_NE(saved_tensor(run, layout.attention, attention), saved_tensor(moved, layout.attention, attention));
  // Pattern of a fresh slot behind the area, after backward too.
  run.backward();
  for (int i = 0; i < 64; ++i) {
    ASSERT_EQ(std::bit_cast<uint32_t>(run.saved.data()[run.saved.elements() + i]), 0xffffffffu) << i;
  }
}

TEST_P(Layer, SecondMicroBatchIsAddedToTheSlot) {
  const ModelSpec& model = GetParam();
  const Plan plan = plan_for(model, kRows, kSeq);
  LayerRun a(model, plan, TestBatch(model, kRows, kSeq, documents(), 7));
  LayerRun b(model, plan, TestBatch(model, kRows, kSeq, {40, 8, 20, 28}, 8));
  for (LayerRun* run : {&a, &b}) {
    run->forward();
    run->backward();
  }
  LayerRun both(model, plan, a.batch);
  both.forward();
  both.backward(/*first=*/true);
  LayerRun second(model, plan, b.batch);
  second.forward();
  second.compute->layer_backward(0, second.weights.data(), second.batch.micro_batch(), second.input.data(),
                                 second.saved.data(), second.gradient.data(), both.gradients.data(), /*first=*/false);
  std::vector<double> sum;
  for (int64_t i = 0; i < a.gradients.elements(); ++i) {
    sum.push_back(static_cast<double>(a.gradients.data()[i]) + b.gradients.data()[i]);
  }
  EXPECT_LT(relative_difference(both.gradients.span(), sum), 1e-6);  // two fp32 sums in another order
}

TEST_P(Layer, GapsOfTheGradientSlotAreZero) {
  const ModelSpec& model = GetParam();
  LayerRun run(model, plan_for(model, kRows, kSeq), TestBatch(model, kRows, kSeq, documents(), 7));
  run.forward();
  run.backward();
  std::vector<bool> used(static_cast<size_t>(run.unit.elements), false);
  for (const TensorLayout& tensor : run.unit.tensors) {
    for (int64_t i = 0; i < tensor.elements; ++i) used[static_cast<size_t>(tensor.offset + i)] = true;
  }
  int64_t gaps = 0;
  for (size_t i = 0; i < used.size(); ++i) {
    if (used[i]) continue;
    ++gaps;
    ASSERT_EQ(run.gradients.span()[i], 0.0f) << "element " << i;
  }
  EXPECT_GT(gaps, 0);
}

TEST_P(Layer, Bf16SlotHoldsTheRoundedFp32Gradient) {
  const ModelSpec& model = GetParam();
  const TestBatch batch(model, kRows, kSeq, documents(), 7);
  Plan plan = plan_for(model, kRows, kSeq);
  LayerRun exact(model, plan, batch);
  exact.forward();
  exact.backward();
  plan.accumulator = DType::bf16;
  LayerRun run(model, plan, batch);
  Slot<uint16_t> gradients(run.unit.elements);
  run.forward();
  run.compute->layer_backward(0, run.weights.data(), batch.micro_batch(), run.input.data(), run.saved.data(),
                              run.gradient.data(), gradients.data(), /*first=*/true);
  for (int64_t i = 0; i < gradients.elements(); ++i) {
    ASSERT_EQ(gradients.data()[i], to_bf16(exact.gradients.data()[i])) << "element " << i;
  }
  // Added once more, every element about doubles.
  run.forward();
  LayerRun::copy(random_hidden(run.gradient.elements(), 3), run.gradient);
  const std::vector<uint16_t> before = gradients.copy();
  run.compute->layer_backward(0, run.weights.data(), batch.micro_batch(), run.input.data(), run.saved.data(),
                              run.gradient.data(), gradients.data(), /*first=*/false);
  double difference = 0, norm = 0;
  for (int64_t i = 0; i < gradients.elements(); ++i) {
    const double expected = 2.0 * from_bf16(before[static_cast<size_t>(i)]);
    difference += std::pow(from_bf16(gradients.data()[i]) - expected, 2);
    norm += expected * expected;
  }
  EXPECT_LT(std::sqrt(difference / norm), 1.0 / 256);  // two bf16 roundings of at most 2^-9 each
}

TEST_P(Layer, ThreadsAndAddressesDoNotChangeBits) {
  const ModelSpec& model = GetParam();
  // Long enough that ATen and our loops do split their work.
  const TestBatch batch(model, 2, 256, {200, 56, 256}, 9);
  LayerRun one(model, plan_for(model, 2, 256, 1), batch);
  one.forward();
  one.backward();
  for (const int threads : {2, 3}) {
    LayerRun more(model, plan_for(model, 2, 256, threads), batch, /*shift=*/threads);
    more.forward();
    more.backward();
    EXPECT_TRUE(same_bits(one.output, more.output)) << threads;
    EXPECT_TRUE(same_bits(one.gradient, more.gradient)) << threads;
    EXPECT_TRUE(same_bits(one.gradients, more.gradients)) << threads;
  }
}

TEST_P(Layer, DocumentsDoNotSeeEachOther) {
  const ModelSpec& model = GetParam();
  const Plan plan = plan_for(model, kRows, kSeq);
  const TestBatch batch(model, kRows, kSeq, documents(), 7);
  LayerRun plain(model, plan, batch), changed(model, plan, batch);
  changed.input.data()[3 * model.hidden] += 1.0f;  // token 3, first document
  plain.forward();
  changed.forward();
  const size_t hidden = static_cast<size_t>(model.hidden);
  const auto rows = [&](const LayerRun& run, size_t begin, size_t end) {
    const auto all = run.output.span().subspan(begin * hidden, (end - begin) * hidden);
    return std::vector<float>(all.begin(), all.end());
  };
  EXPECT_EQ(rows(plain, 0, 3), rows(changed, 0, 3));      // causal
  EXPECT_NE(rows(plain, 4, 17), rows(changed, 4, 17));    // later tokens of the document see it
  EXPECT_EQ(rows(plain, 17, 96), rows(changed, 17, 96));  // other documents and rows do not
}

INSTANTIATE_TEST_SUITE_P(Models, Layer, testing::ValuesIn(all_models()),
                         [](const auto& info) { return info.param.name; });

TEST(LayerErrors, PositionOutsideThePlanIsRefused) {
  const ModelSpec model = llama_model();
  TestBatch batch(model, 1, 16, {16}, 1);
  batch.positions.back() = 16;
  LayerRun run(model, plan_for(model, 1, 16), batch);
  EXPECT_THROW(run.forward(), Error);
}

}  // namespace
}  // namespace slidedp
