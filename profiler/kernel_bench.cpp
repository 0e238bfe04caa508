#include "profiler/kernel_bench.h"

#include <algorithm>
#include <bit>
#include <random>

#include "model/cost/activations.h"
#include "model/cost/flops.h"

namespace slidedp {
namespace {

constexpr int64_t kPatternElements = 1 << 20;
constexpr int64_t kMostHeadChunk = 1024;  // tokens whose logits exist at once

Plan one_rank_plan(const std::string& backend, int64_t tokens) {
  Plan plan;
  plan.backend = backend;
  plan.ranks = 1;
  plan.activation = {ActivationPolicy::keep};
  plan.compute = DType::fp32;
  plan.accumulator = DType::fp32;
  plan.seq = tokens;
  plan.micro_batch_rows = 1;
  plan.head_chunk_tokens = std::min(tokens, kMostHeadChunk);
  plan.threads.compute_per_rank = 1;
  return plan;
}

int64_t vocabulary_bytes(const ModelSpec& model) { return model.vocabulary * model.hidden * (2 + 4); }

}  // namespace

ModelSpec measured_model(const ModelSpec& model) {
  ModelSpec measured = model;
  measured.layers = 1;
  const int64_t rows = std::max(kMostMatrixElements / model.hidden / kBlockElements, int64_t{1}) * kBlockElements;
  measured.vocabulary = std::min(model.vocabulary, rows);
  return measured;
}

int64_t bench_bytes(const ModelSpec& model, int64_t tokens) {
  const ModelLayout layout = make_layout(model);
  const Plan plan = one_rank_plan("cpu", tokens);
  return layout.elements * (2 + 4) + (model.tied ? vocabulary_bytes(model) : 0) +
         saved_layout(model, tokens, DType::fp32, ActivationPolicy::keep).bytes +
         3 * hidden_bytes(model, tokens, DType::fp32) + temporary_bytes(model, plan);
}

int64_t first_token_count(const ModelSpec& model) {
  constexpr double kMostFlops = 2e10;  // about a third of a second on one CPU core
  int64_t tokens = 64;
  while (tokens > 8 && 3 * layer_forward_flops(model, 1, tokens) > kMostFlops) tokens /= 2;
  return std::max(std::min(tokens, model.max_position / 4), int64_t{1});
}

int64_t last_token_count(const ModelSpec& model, bool quick) {
  return std::min<int64_t>(quick ? 256 : 1024, model.max_position);
}

KernelBench::KernelBench(const ProbeContext& context, const ModelSpec& measured, int64_t tokens)
    : model_(measured),
      layout_(make_layout(measured)),
      tokens_(tokens),
      backend_(make_backend(model_, layout_, one_rank_plan(context.backend, tokens), 0)),
      device_(backend_.devices.front().get()),
      lane_(std::make_unique<DeviceLane>(*device_, "compute")),
      pattern_bf16_(kPatternElements),
      pattern_fp32_(kPatternElements) {
  // Values of the size that real ones have: no denormals, no infinities, and never all alike.
  std::mt19937 random(1);
  std::uniform_real_distribution<float> weight(-0.05f, 0.05f), gradient(-1e-2f, 1e-2f);
  for (uint16_t& value : pattern_bf16_) value = static_cast<uint16_t>(std::bit_cast<uint32_t>(weight(random)) >> 16);
  for (float& value : pattern_fp32_) value = gradient(random);
  const int64_t hidden = tokens * model_.hidden;
  hidden_in_ = filled(hidden, DType::fp32);
  hidden_out_ = filled(hidden, DType::fp32);
  hidden_gradient_ = filled(hidden, DType::fp32);
  loss_ = device_->allocate(sizeof(double), "kernel probe's loss");
  std::uniform_int_distribution<int32_t> token(0, static_cast<int32_t>(model_.vocabulary - 1));
  std::vector<int32_t> batch(static_cast<size_t>(3 * tokens));
  for (int64_t t = 0; t < tokens; ++t) {
    batch[static_cast<size_t>(t)] = token(random);
    batch[static_cast<size_t>(tokens + t)] = token(random);
    batch[static_cast<size_t>(2 * tokens + t)] = static_cast<int32_t>(t);
  }
  batch_ = device_->allocate(3 * tokens * 4, "kernel probe's tokens");
  device_->copy_to_device(lane_->stream(), batch_.data(), batch.data(), batch_.bytes());
  device_->synchronize(lane_->stream());
}

DeviceMemory KernelBench::filled(int64_t elements, DType type) {
  DeviceMemory memory = device_->allocate(elements * size_of(type), "kernel probe's tensor");
  const void* pattern = type == DType::bf16 ? static_cast<const void*>(pattern_bf16_.data()) : pattern_fp32_.data();
  for (int64_t begin = 0; begin < elements; begin += kPatternElements) {
    const int64_t count = std::min(kPatternElements, elements - begin);
    void* to = static_cast<std::byte*>(memory.data()) + begin * size_of(type);
    device_->copy_to_device(lane_->stream(), to, pattern, count * size_of(type));
  }
  device_->synchronize(lane_->stream());
  return memory;
}

MicroBatch KernelBench::make_batch() {
  const auto* tokens = static_cast<const int32_t*>(batch_.data());
  MicroBatch batch;
  batch.rows = 1;
  batch.seq = tokens_;
  batch.ids = tokens;
  batch.targets = tokens + tokens_;
  batch.positions = tokens + 2 * tokens_;
  batch.document_starts = document_starts_;
  return batch;
}

double KernelBench::time(const std::function<void()>& work) {
  return timed(*lane_, [&](Device& device, Stream& stream) { device.launch(stream, work); });
}

double KernelBench::embedding_forward() {
  if (embedding_weights_.data() == nullptr) embedding_weights_ = filled(layout_.embedding().elements, DType::bf16);
  return time([&] {
    backend_.compute.front()->embedding_forward(embedding_weights_.data(), make_batch(), hidden_out_.data());
  });
}

double KernelBench::embedding_backward(bool first) {
  if (embedding_gradients_.data() == nullptr) embedding_gradients_ = filled(layout_.embedding().elements, DType::fp32);
  return time([&] {
    backend_.compute.front()->embedding_backward(make_batch(), hidden_gradient_.data(), embedding_gradients_.data(),
                                                 model_.vocabulary, first);
  });
}

std::vector<double> KernelBench::layer() {
  const UnitLayout& unit = layout_.units[1];
  if (layer_weights_.data() == nullptr) {
    layer_weights_ = filled(unit.elements, DType::bf16);
    layer_gradients_ = filled(unit.elements, DType::fp32);
    saved_ = device_->allocate(saved_layout(model_, tokens_, DType::fp32, ActivationPolicy::keep).bytes,
                               "kernel probe's activations");
  }
  Compute& compute = *backend_.compute.front();
  // Backward works in place: without a fresh gradient each time, repeats would run on ever smaller numbers.
  const int64_t hidden = tokens_ * model_.hidden;
  for (int64_t begin = 0; begin < hidden; begin += kPatternElements) {
    device_->copy_to_device(lane_->stream(), static_cast<float*>(hidden_gradient_.data()) + begin, pattern_fp32_.data(),
                            4 * std::min(kPatternElements, hidden - begin));
  }
  const double forward = time([&] {
    compute.layer_forward(0, layer_weights_.data(), make_batch(), hidden_in_.data(), saved_.data(), hidden_out_.data());
  });
  const double backward = time([&] {
    compute.layer_backward(0, layer_weights_.data(), make_batch(), hidden_in_.data(), saved_.data(),
                           hidden_gradient_.data(), layer_gradients_.data(), true);
  });
  return {forward, backward};
}

double KernelBench::head() {
  if (head_weights_.data() == nullptr) {
    head_weights_ = filled(layout_.head().elements, DType::bf16);
    head_gradients_ = filled(layout_.head().elements, DType::fp32);
    if (model_.tied) {
      embedding_weights_ = filled(layout_.embedding().elements, DType::bf16);
      embedding_gradients_ = filled(layout_.embedding().elements, DType::fp32);
    }
  }
  const void* vocabulary = model_.tied ? embedding_weights_.data() : nullptr;
  void* vocabulary_gradients = model_.tied ? embedding_gradients_.data() : nullptr;
  return time([&] {
    backend_.compute.front()->head(head_weights_.data(), vocabulary, make_batch(), hidden_in_.data(),
                                   hidden_gradient_.data(), head_gradients_.data(), vocabulary_gradients, true,
                                   static_cast<double*>(loss_.data()));
  });
}

}  // namespace slidedp
