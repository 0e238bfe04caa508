// The CUDA compute against the CPU compute, which works in fp32, on the same bf16 weights: layers, head and embedding,
// every activation policy, gradients overwritten and added, packed documents and rows of one document.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <map>

#include "model/base/error.h"
#include "model/cost/activations.h"
#include "runtime/nn/aten_compute.h"
#include "runtime/nn/cuda/cuda_compute.h"
#include "runtime/nn/matrix_products.h"
#include "tests/runtime/nn/cuda/gpu_test.h"
#include "tests/runtime/nn/fixture.h"

namespace slidedp::test {
namespace {

// A bf16 value is off by at most 2^-9 of itself, 2^-9 / sqrt(3) in the mean square. A hidden state passes about ten
// roundings and a gradient about twenty, so their relative errors are near 0.4 and 0.5 %, and 1 - cosine is half the
// square of that: 1e-5. Gradients of q and k are differences of nearly equal terms (softmax), a few times worse.
constexpr double kForwardBound = 5e-5;
constexpr double kGradientBound = 2e-4;
// The bias of k would have no effect without rotation (softmax does not see what all keys have in common), so its
// gradient is what is left of terms that nearly cancel.
constexpr double kKeyBiasBound = 1e-3;

constexpr int64_t kRows = 2, kSeq = 200;

at::Tensor on_gpu(const void* data, int64_t bytes) {
  at::Tensor host = at::empty({bytes}, at::kByte);
  std::memcpy(host.data_ptr(), data, static_cast<size_t>(bytes));
  return to_gpu(host);
}

// A batch whose ids, targets and positions lie on the GPU.
struct GpuBatch {
  explicit GpuBatch(const TestBatch& test_batch) : batch(test_batch) {
    const auto bytes = static_cast<int64_t>(batch.ids.size()) * 4;
    ids = on_gpu(batch.ids.data(), bytes);
    targets = on_gpu(batch.targets.data(), bytes);
    positions = on_gpu(batch.positions.data(), bytes);
  }
  MicroBatch micro_batch() const {
    const auto data = [](const at::Tensor& t) { return static_cast<const int32_t*>(t.data_ptr()); };
    return {batch.rows, batch.seq, data(ids), data(targets), data(positions), batch.starts};
  }
  TestBatch batch;
  at::Tensor ids, targets, positions;
};

struct Case {
  ModelSpec model;
  std::string name;
  std::vector<int64_t> documents;
};
void PrintTo(const Case& c, std::ostream* out) { *out << c.name; }

std::vector<Case> cases() {
  std::vector<Case> all;
  for (const ModelSpec& model : gpu_models()) {
    all.push_back({model, model.name + "_packed", {17, 1, 130, 52, 200}});
    all.push_back({model, model.name + "_rows", {200, 200}});
  }
  return all;
}

Plan cuda_plan(const ModelSpec& model, ActivationPolicy policy, DType accumulator = DType::fp32) {
  Plan plan = plan_for(model, kRows, kSeq, 1, policy);
  plan.backend = "cuda";
  plan.compute = DType::bf16;
  plan.accumulator = accumulator;
  return plan;
}

at::Tensor random_hidden_bf16(const ModelSpec& model, uint64_t seed) {
  return random_bf16({kRows * kSeq, model.hidden}, seed);
}

// One layer on the GPU: buffers, and what forward and backward leave.
struct GpuLayer {
  GpuLayer(const ModelSpec& model, const TestBatch& test_batch, ActivationPolicy policy, bool deterministic,
           DType accumulator = DType::fp32)
      : layout(make_layout(model)),
        unit(layout.units[1]),
        batch(test_batch),
        compute(make_cuda_compute(model, layout, cuda_plan(model, policy, accumulator), 0, nullptr,
                                  {.deterministic = deterministic, .current_stream = {}})),
        input(to_gpu(random_hidden_bf16(model, 2))),
        gradient(to_gpu(random_hidden_bf16(model, 3))),
        output(unwritten({kRows * kSeq, model.hidden}, at::kBFloat16)),
        saved(unwritten({saved_layout(model, kRows * kSeq, DType::bf16, policy).bytes}, at::kByte)),
        gradients(unwritten({unit.elements}, accumulator == DType::fp32 ? at::kFloat : at::kBFloat16)) {
    const Slot<uint16_t> values = random_weights(unit, 1);
    weights = on_gpu(values.data(), unit.elements * 2);
  }
  void forward(bool with_output = true) {
    compute->layer_forward(0, weights.data_ptr(), batch.micro_batch(), input.data_ptr(), saved.data_ptr(),
                           with_output ? output.data_ptr() : nullptr);
  }
  void backward(bool first = true) {
    compute->layer_backward(0, weights.data_ptr(), batch.micro_batch(), input.data_ptr(), saved.data_ptr(),
                            gradient.data_ptr(), gradients.data_ptr(), first);
  }

  ModelLayout layout;
  const UnitLayout& unit;
  GpuBatch batch;
  std::unique_ptr<CudaCompute> compute;
  at::Tensor weights, input, gradient, output, saved, gradients;
};

at::Tensor as_tensor(const Slot<float>& slot) {
  at::Tensor tensor = at::empty({slot.elements()}, at::kFloat);
  std::memcpy(tensor.data_ptr(), slot.data(), static_cast<size_t>(slot.elements()) * 4);
  return tensor;
}

// The same layer on the CPU, in fp32.
struct CpuLayer {
  CpuLayer(const ModelSpec& model, const TestBatch& batch)
      : layout(make_layout(model)),
        compute(make_aten_compute(model, layout, plan_for(model, kRows, kSeq))),
        weights(random_weights(layout.units[1], 1)),
        input(kRows * kSeq * model.hidden),
        gradient(input.elements()),
        output(input.elements()),
        saved(saved_layout(model, kRows * kSeq, DType::fp32, ActivationPolicy::keep).bytes / 4),
        gradients(layout.units[1].elements) {
    fill(input, random_hidden_bf16(model, 2));
    fill(gradient, random_hidden_bf16(model, 3));
    compute->layer_forward(0, weights.data(), batch.micro_batch(), input.data(), saved.data(), output.data());
    compute->layer_backward(0, weights.data(), batch.micro_batch(), input.data(), saved.data(), gradient.data(),
                            gradients.data(), true);
  }
  static void fill(Slot<float>& slot, const at::Tensor& values) {
    const at::Tensor wide = values.to(at::kFloat).contiguous();
    std::memcpy(slot.data(), wide.data_ptr(), static_cast<size_t>(slot.elements()) * 4);
  }
  ModelLayout layout;
  std::unique_ptr<Compute> compute;
  Slot<uint16_t> weights;
  Slot<float> input, gradient, output, saved, gradients;
};

// Prints the worst tensor, so that the bound can be seen against what is measured.
void expect_layers_agree(const GpuLayer& gpu, const CpuLayer& cpu, double times = 1.0) {
  EXPECT_LT(one_minus_cosine(gpu.output, as_tensor(cpu.output)), kForwardBound);
  EXPECT_LT(relative_error(gpu.output, as_tensor(cpu.output)), std::sqrt(2 * kForwardBound));
  const at::Tensor all = as_tensor(cpu.gradients);
  double worst = 0;
  std::string worst_name;
  for (const TensorLayout& tensor : gpu.unit.tensors) {
    const at::Tensor ours = gpu.gradients.narrow(0, tensor.offset, tensor.elements);
    const at::Tensor expected = times * all.narrow(0, tensor.offset, tensor.elements);
    const double difference = one_minus_cosine(ours, expected);
    const double bound = tensor.role == TensorRole::k_bias ? kKeyBiasBound : kGradientBound;
    EXPECT_LT(difference, bound) << tensor.name;
    EXPECT_LT(relative_error(ours, expected), std::sqrt(2 * bound)) << tensor.name;
    if (difference > worst) worst = difference, worst_name = tensor.name;
  }
  std::printf("worst gradient: 1 - cosine %.2e (%s)\n", worst, worst_name.c_str());
}

void expect_gaps_are_zero(const GpuLayer& gpu) {
  const at::Tensor all = to_double(gpu.gradients);
  int64_t end = 0;
  for (const TensorLayout& tensor : gpu.unit.tensors) {
    EXPECT_EQ(all.narrow(0, end, tensor.offset - end).abs().sum().item<double>(), 0.0) << tensor.name;
    end = tensor.offset + tensor.elements;
  }
  EXPECT_EQ(all.narrow(0, end, gpu.unit.elements - end).abs().sum().item<double>(), 0.0);
}

class CudaLayerTest : public NeedsGpu<testing::TestWithParam<Case>> {
 protected:
  TestBatch batch() const { return {GetParam().model, kRows, kSeq, GetParam().documents, 7}; }
};

TEST_P(CudaLayerTest, MatchesTheCpuUnderEveryPolicyAndAttention) {
  const ModelSpec& model = GetParam().model;
  const CpuLayer cpu(model, batch());
  for (const bool deterministic : {false, true}) {
    for (const ActivationPolicy policy :
         {ActivationPolicy::keep, ActivationPolicy::selective, ActivationPolicy::recompute}) {
      SCOPED_TRACE(std::string(name(policy)) + (deterministic ? ", deterministic" : ""));
      GpuLayer gpu(model, batch(), policy, deterministic);
      std::printf("%s\n", gpu.compute->attention_report().c_str());
      gpu.forward();
      // The saved area holds something else by the time of backward. Keep: what a forward without output saves is
      // complete, too.
      if (policy != ActivationPolicy::selective) {
        gpu.saved.fill_(0xff);
        gpu.forward(/*with_output=*/false);
      }
      gpu.backward();
      expect_layers_agree(gpu, cpu);
      EXPECT_LT(one_minus_cosine(gpu.gradient, as_tensor(cpu.gradient)), kGradientBound);
      expect_gaps_are_zero(gpu);
    }
  }
}

TEST_P(CudaLayerTest, SecondMicroBatchIsAdded) {
  const CpuLayer cpu(GetParam().model, batch());
  for (const DType accumulator : {DType::fp32, DType::bf16}) {
    GpuLayer gpu(GetParam().model, batch(), ActivationPolicy::selective, false, accumulator);
    for (const bool first : {true, false}) {
      gpu.gradient.copy_(random_hidden_bf16(GetParam().model, 3));
      gpu.forward();
      gpu.backward(first);
    }
    expect_layers_agree(gpu, cpu, 2.0);
    expect_gaps_are_zero(gpu);
  }
}

TEST_P(CudaLayerTest, DeterministicGivesTheSameBitsTwiceAndUnderEveryPolicy) {
  std::vector<std::unique_ptr<GpuLayer>> layers;
  for (const ActivationPolicy policy :
       {ActivationPolicy::keep, ActivationPolicy::keep, ActivationPolicy::selective, ActivationPolicy::recompute}) {
    layers.push_back(std::make_unique<GpuLayer>(GetParam().model, batch(), policy, /*deterministic=*/true));
    layers.back()->forward();
    if (policy == ActivationPolicy::recompute) layers.back()->forward(/*with_output=*/false);
    layers.back()->backward();
  }
  for (size_t i = 1; i < layers.size(); ++i) {
    EXPECT_TRUE(same_bits(layers[i]->output, layers[0]->output)) << i;
    EXPECT_TRUE(same_bits(layers[i]->gradient, layers[0]->gradient)) << i;
    EXPECT_TRUE(same_bits(layers[i]->gradients, layers[0]->gradients)) << i;
  }
}

// A block works while the other block's weights are still on their way and its gradients are already being copied.
TEST_P(CudaLayerTest, ABlockTouchesItsOwnShareOnly) {
  for (const ActivationPolicy policy : {ActivationPolicy::keep, ActivationPolicy::selective}) {
    GpuLayer whole(GetParam().model, batch(), policy, /*deterministic=*/true);
    whole.forward();
    whole.backward();
    GpuLayer run(GetParam().model, batch(), policy, /*deterministic=*/true);
    const int64_t middle = run.unit.range(LayerBlock::mlp).begin, rest = run.unit.elements - middle;
    at::Tensor attention = run.weights.clone(), mlp = run.weights.clone();  // all ones is NaN in bf16
    attention.narrow(0, 2 * middle, 2 * rest).fill_(0xff);
    mlp.narrow(0, 0, 2 * middle).fill_(0xff);
    const MicroBatch tokens = run.batch.micro_batch();
    CudaCompute& compute = *run.compute;
    compute.block_forward(LayerBlock::attention, 0, attention.data_ptr(), tokens, run.input.data_ptr(),
                          run.saved.data_ptr(), nullptr);
    compute.block_forward(LayerBlock::mlp, 0, mlp.data_ptr(), tokens, nullptr, run.saved.data_ptr(),
                          run.output.data_ptr());
    EXPECT_TRUE(same_bits(whole.output, run.output));

    at::Tensor of_mlp = at::full_like(run.gradients, 7.0), of_attention = at::full_like(run.gradients, 7.0);
    compute.block_backward(LayerBlock::mlp, 0, mlp.data_ptr(), tokens, nullptr, run.saved.data_ptr(),
                           run.gradient.data_ptr(), of_mlp.data_ptr(), true);
    compute.block_backward(LayerBlock::attention, 0, attention.data_ptr(), tokens, run.input.data_ptr(),
                           run.saved.data_ptr(), run.gradient.data_ptr(), of_attention.data_ptr(), true);
    EXPECT_TRUE(same_bits(whole.gradient, run.gradient));
    EXPECT_TRUE(at::equal(of_attention.narrow(0, 0, middle), whole.gradients.narrow(0, 0, middle)));
    EXPECT_TRUE(at::equal(of_mlp.narrow(0, middle, rest), whole.gradients.narrow(0, middle, rest)));
    EXPECT_TRUE(at::all(of_attention.narrow(0, middle, rest) == 7.0).item<bool>());
    EXPECT_TRUE(at::all(of_mlp.narrow(0, 0, middle) == 7.0).item<bool>());
  }
}

INSTANTIATE_TEST_SUITE_P(Models, CudaLayerTest, testing::ValuesIn(cases()),
                         [](const auto& info) { return info.param.name; });

class CudaComputeTest : public NeedsGpu<> {};

// More documents than one call of the flash kernels takes: groups of them.
TEST_F(CudaComputeTest, ManyShortDocuments) {
  const ModelSpec model = llama_like();
  std::vector<int64_t> documents;
  for (int64_t row = 0; row < kRows; ++row) {
    for (int64_t left = kSeq; left > 0;) {
      documents.push_back(std::min<int64_t>(left, 1 + left % 3));
      left -= documents.back();
    }
  }
  ASSERT_GT(static_cast<int64_t>(documents.size()), flash_documents(kRows * kSeq));
  const TestBatch batch(model, kRows, kSeq, documents, 7);
  GpuLayer gpu(model, batch, ActivationPolicy::keep, false);
  gpu.forward();
  gpu.backward();
  expect_layers_agree(gpu, CpuLayer(model, batch));
}

TEST_F(CudaComputeTest, OneTokenDocuments) {
  const ModelSpec model = llama_like();
  const TestBatch batch(model, kRows, kSeq, std::vector<int64_t>(kRows * kSeq, 1), 7);
  GpuLayer gpu(model, batch, ActivationPolicy::keep, false);
  const CpuLayer cpu(model, batch);
  gpu.forward();
  gpu.backward();
  EXPECT_LT(one_minus_cosine(gpu.output, as_tensor(cpu.output)), kForwardBound);
  EXPECT_LT(one_minus_cosine(gpu.gradient, as_tensor(cpu.gradient)), kGradientBound);
}

struct HeadCase {
  bool tied;
  int64_t chunk;
  DType accumulator;
};
void PrintTo(const HeadCase& c, std::ostream* out) { *out << c.tied << " " << c.chunk << " " << name(c.accumulator); }

class CudaHeadTest : public NeedsGpu<testing::TestWithParam<HeadCase>> {};

TEST_P(CudaHeadTest, MatchesTheCpu) {
  ModelSpec model = smollm2_like();
  model.tied = GetParam().tied;
  const ModelLayout layout = make_layout(model);
  const TestBatch batch(model, kRows, kSeq, {17, 1, 130, 52, 200}, 7);
  const int64_t elements = kRows * kSeq * model.hidden;
  const Slot<uint16_t> weights = random_weights(layout.head(), 1), vocabulary = random_weights(layout.embedding(), 2);
  const at::Tensor hidden = random_hidden_bf16(model, 4);
  const UnitLayout& matrix_unit = model.tied ? layout.embedding() : layout.head();
  const TensorLayout& matrix = matrix_unit.at(model.tied ? TensorRole::embedding : TensorRole::lm_head);
  const TensorLayout& norm = layout.head().at(TensorRole::final_norm);

  Slot<float> cpu_hidden(elements), cpu_slope(elements), cpu_gradients(layout.head().elements),
      cpu_vocabulary_gradients(layout.embedding().elements);
  CpuLayer::fill(cpu_hidden, hidden);
  double cpu_loss = 0;
  make_aten_compute(model, layout, plan_for(model, kRows, kSeq))
      ->head(weights.data(), model.tied ? vocabulary.data() : nullptr, batch.micro_batch(), cpu_hidden.data(),
             cpu_slope.data(), cpu_gradients.data(), model.tied ? cpu_vocabulary_gradients.data() : nullptr, true,
             &cpu_loss);

  Plan plan = cuda_plan(model, ActivationPolicy::keep, GetParam().accumulator);
  plan.head_chunk_tokens = GetParam().chunk;
  const auto compute = make_cuda_compute(model, layout, plan, 0, nullptr);
  const GpuBatch gpu_batch(batch);
  const at::ScalarType slot_type = GetParam().accumulator == DType::fp32 ? at::kFloat : at::kBFloat16;
  const at::Tensor gpu_weights = on_gpu(weights.data(), weights.elements() * 2);
  const at::Tensor gpu_vocabulary = on_gpu(vocabulary.data(), vocabulary.elements() * 2);
  const at::Tensor gradients = unwritten({layout.head().elements}, slot_type);
  const at::Tensor vocabulary_gradients = unwritten({layout.embedding().elements}, slot_type);
  const at::Tensor loss = unwritten({1}, at::kDouble);
  for (const bool first : {true, false}) {
    const at::Tensor in_place = to_gpu(hidden);  // the gradient takes the place of the hidden states
    compute->head(gpu_weights.data_ptr(), model.tied ? gpu_vocabulary.data_ptr() : nullptr, gpu_batch.micro_batch(),
                  in_place.data_ptr(), in_place.data_ptr(), gradients.data_ptr(),
                  model.tied ? vocabulary_gradients.data_ptr() : nullptr, first, loss.data_ptr<double>());
    // Each bf16 logit, near 1, is off by up to 2^-9; over 300 tokens that averages out.
    EXPECT_NEAR(loss.item<double>(), cpu_loss, 1e-3 * cpu_loss);
    EXPECT_LT(one_minus_cosine(in_place, as_tensor(cpu_slope)), kGradientBound);
    const double times = first ? 1.0 : 2.0;
    const at::Tensor& matrix_slot = model.tied ? vocabulary_gradients : gradients;
    const Slot<float>& cpu_matrix_slot = model.tied ? cpu_vocabulary_gradients : cpu_gradients;
    const auto compare = [&](const at::Tensor& ours, const Slot<float>& cpu, const TensorLayout& tensor) {
      EXPECT_LT(relative_error(ours.narrow(0, tensor.offset, tensor.elements),
                               times * as_tensor(cpu).narrow(0, tensor.offset, tensor.elements)),
                std::sqrt(2 * kGradientBound))
          << tensor.name;
    };
    compare(matrix_slot, cpu_matrix_slot, matrix);
    compare(gradients, cpu_gradients, norm);
  }
  EXPECT_TRUE(at::isfinite(gradients).all().item<bool>());  // the gaps too
}

INSTANTIATE_TEST_SUITE_P(Cases, CudaHeadTest,
                         testing::Values(HeadCase{true, kRows* kSeq, DType::fp32}, HeadCase{false, 96, DType::fp32},
                                         HeadCase{true, 96, DType::bf16}, HeadCase{false, 1 << 20, DType::bf16}));

TEST_F(CudaComputeTest, EmbeddingMatchesTheCpu) {
  const ModelSpec model = smollm2_like();
  const ModelLayout layout = make_layout(model);
  const TestBatch batch(model, kRows, kSeq, {200, 200}, 7);
  const GpuBatch gpu_batch(batch);
  const Slot<uint16_t> weights = random_weights(layout.embedding(), 1);
  const at::Tensor slope = random_hidden_bf16(model, 3), gpu_slope = to_gpu(slope);
  const auto cpu = make_aten_compute(model, layout, plan_for(model, kRows, kSeq));
  const auto compute = make_cuda_compute(model, layout, cuda_plan(model, ActivationPolicy::keep), 0, nullptr);
  Slot<float> cpu_out(kRows * kSeq * model.hidden), cpu_slope(cpu_out.elements()),
      cpu_gradients(layout.embedding().elements);
  CpuLayer::fill(cpu_slope, slope);
  cpu->embedding_forward(weights.data(), batch.micro_batch(), cpu_out.data());
  cpu->embedding_backward(batch.micro_batch(), cpu_slope.data(), cpu_gradients.data(), model.vocabulary, true);

  const at::Tensor gpu_weights = on_gpu(weights.data(), weights.elements() * 2);
  const at::Tensor out = unwritten({kRows * kSeq * model.hidden}, at::kBFloat16);
  const at::Tensor gradients = unwritten({layout.embedding().elements}, at::kFloat);
  compute->embedding_forward(gpu_weights.data_ptr(), gpu_batch.micro_batch(), out.data_ptr());
  EXPECT_TRUE(at::equal(to_double(out), to_double(as_tensor(cpu_out))));
  for (const double times : {1.0, 2.0}) {
    compute->embedding_backward(gpu_batch.micro_batch(), gpu_slope.data_ptr(), gradients.data_ptr(), model.vocabulary,
                                times == 1.0);
    EXPECT_LT(relative_error(gradients, times * as_tensor(cpu_gradients)), 1e-6);  // fp32 sums
  }
}

// Peak and reserved memory against the planner's bound, over whole steps; and no more of it in the second one.
TEST_F(CudaComputeTest, TemporariesStayInsideTheBound) {
  for (const ModelSpec& model : gpu_models()) {
    for (const ActivationPolicy policy :
         {ActivationPolicy::keep, ActivationPolicy::selective, ActivationPolicy::recompute}) {
      for (const bool deterministic : {false, true}) {
        SCOPED_TRACE(model.name + " " + std::string(name(policy)) + (deterministic ? " deterministic" : ""));
        const TestBatch batch(model, kRows, kSeq, {17, 1, 130, 52, 200}, 7);
        const CudaTemporaries before = cuda_temporaries();
        GpuLayer layer(model, batch, policy, deterministic);
        const int64_t buffers = static_cast<int64_t>(layer.weights.nbytes() + layer.input.nbytes() * 3 +
                                                     layer.saved.nbytes() + layer.gradients.nbytes());
        reset_cuda_temporaries_peak();  // after the constructor's measurements, before the first step takes its memory
        layer.forward();
        layer.backward();
        const int64_t reserved = cuda_temporaries().reserved;
        const int64_t held = cuda_temporaries().in_use;
        layer.forward();
        layer.backward();
        const CudaTemporaries after = cuda_temporaries();
        EXPECT_EQ(after.reserved, reserved);
        EXPECT_EQ(after.in_use, held);
        Plan plan = cuda_plan(model, policy);
        const int64_t bound = temporary_bytes(model, plan);
        EXPECT_LE(after.peak - before.in_use - buffers, bound);
        std::printf("temporaries %lld of %lld bytes\n", static_cast<long long>(after.peak - before.in_use - buffers),
                    static_cast<long long>(bound));
      }
    }
  }
}

TEST_F(CudaComputeTest, WhatTheKernelsDoNotTakeIsRefused) {
  ModelSpec model = smollm2_like();
  const auto make = [&](const Plan& plan) { return make_cuda_compute(model, make_layout(model), plan, 0, nullptr); };
  EXPECT_THROW(make(plan_for(model, kRows, kSeq)), Error);  // fp32
  model.intermediate = 516;
  EXPECT_THROW(make(cuda_plan(model, ActivationPolicy::keep)), Error);
}

TEST_F(CudaComputeTest, ProductsOnTheirOwn) {
  const ModelSpec model = qwen3_like();
  const auto compute =
      make_cuda_compute(model, make_layout(model), cuda_plan(model, ActivationPolicy::keep), 0, nullptr);
  auto* products = dynamic_cast<MatrixProducts*>(compute.get());
  ASSERT_NE(products, nullptr);
  constexpr int64_t kTokens = 96, kInputs = 128, kOutputs = 192;
  const at::Tensor x = random_bf16({kTokens, kInputs}, 1), w = random_bf16({kOutputs, kInputs}, 2);
  const at::Tensor slope = random_bf16({kTokens, kOutputs}, 3);
  const at::Tensor x_gpu = to_gpu(x), w_gpu = to_gpu(w), slope_gpu = to_gpu(slope);
  const at::Tensor y = unwritten({kTokens, kOutputs}, at::kBFloat16), dx = unwritten({kTokens, kInputs}, at::kBFloat16);
  const at::Tensor dw = unwritten({kOutputs, kInputs}, at::kFloat);
  products->product(ProductPass::forward, kTokens, kInputs, kOutputs, x_gpu.data_ptr(), w_gpu.data_ptr(), y.data_ptr());
  products->product(ProductPass::input_gradient, kTokens, kInputs, kOutputs, slope_gpu.data_ptr(), w_gpu.data_ptr(),
                    dx.data_ptr());
  products->product(ProductPass::weight_gradient, kTokens, kInputs, kOutputs, slope_gpu.data_ptr(), x_gpu.data_ptr(),
                    dw.data_ptr());
  // One rounding to bf16 (2^-9 at most), and sums in fp32.
  EXPECT_LT(relative_error(y, at::matmul(to_double(x), to_double(w).t())), 4e-3);
  EXPECT_LT(relative_error(dx, at::matmul(to_double(slope), to_double(w))), 4e-3);
  EXPECT_LT(relative_error(dw, at::matmul(to_double(slope).t(), to_double(x))), 1e-4);
}

TEST_F(CudaComputeTest, CastRunsOnTheStreamThatTheOptionNames) {
  const ModelSpec model = smollm2_like();
  int asked = 0;
  const auto compute = make_cuda_compute(model, make_layout(model), cuda_plan(model, ActivationPolicy::keep), 0,
                                         nullptr, {.deterministic = true, .current_stream = [&]() -> void* {
                                                     ++asked;
                                                     return nullptr;
                                                   }});
  const at::Tensor values = to_gpu(at::randn({1000}, at::kFloat)), out = unwritten({1000}, at::kBFloat16);
  const int before = asked;
  compute->cast(values.data_ptr(), DType::fp32, out.data_ptr(), DType::bf16, 1000);
  EXPECT_EQ(asked, before + 1);
  EXPECT_TRUE(same_bits(out, values.to(at::kBFloat16)));
}

}  // namespace
}  // namespace slidedp::test
