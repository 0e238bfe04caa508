#include "profiler/kernel_bench.h"

#include <algorithm>
#include <bit>
#include <random>

#include "model/cost/activations.h"
#include "model/cost/flops.h"

namespace slidedp {
namespace {

// Tokens whose logits exist at once: on a device what the planner prefers.
int64_t most_head_chunk(const ProbeContext& context) { return context.on_host() ? 1024 : 4096; }

Plan one_rank_plan(const ProbeContext& context, const KernelShape& shape) {
  Plan plan;
  plan.backend = context.backend;
  plan.ranks = 1;
  plan.activation = {ActivationPolicy::keep};
  plan.compute = compute_type(context);
  plan.accumulator = DType::fp32;
  plan.seq = shape.seq;
  plan.micro_batch_rows = shape.rows;
  plan.head_chunk_tokens = std::min(shape.tokens(), most_head_chunk(context));
  plan.threads.compute_per_rank = 1;
  return plan;
}

int64_t vocabulary_bytes(const ModelSpec& model) { return model.vocabulary * model.hidden * (2 + 4); }

// From a small one to as many tokens as there are in a row of a small step.
std::vector<KernelShape> host_shapes(const ModelSpec& model, bool quick) {
  constexpr double kMostFlops = 2e10;  // about a third of a second on one CPU core
  int64_t first = 64;
  while (first > 8 && 3 * layer_forward_flops(model, 1, first) > kMostFlops) first /= 2;
  first = std::max(std::min(first, model.max_position / 4), int64_t{1});
  const int64_t last = std::min<int64_t>(quick ? 256 : 1024, model.max_position);
  std::vector<KernelShape> shapes;
  for (int64_t tokens = first; tokens <= last; tokens *= 2) shapes.push_back({1, tokens});
  return shapes;
}

}  // namespace

DType compute_type(const ProbeContext& context) { return context.on_host() ? DType::fp32 : DType::bf16; }

ModelSpec measured_model(const ProbeContext& context) {
  ModelSpec measured = context.model;
  measured.layers = 1;
  if (context.on_host()) {
    const int64_t rows = std::max(kMostMatrixElements / measured.hidden / kBlockElements, int64_t{1}) * kBlockElements;
    measured.vocabulary = std::min(measured.vocabulary, rows);
  }
  return measured;
}

int64_t whole_row(const ModelSpec& model) { return std::min<int64_t>(4096, model.max_position); }

std::vector<KernelShape> kernel_shapes(const ProbeContext& context, const ModelSpec& model) {
  if (context.on_host()) return host_shapes(model, context.quick);
  const int64_t seq = whole_row(model);
  std::vector<KernelShape> shapes{{1, std::max<int64_t>(seq / 4, 1)}, {1, seq}, {4, seq}, {8, seq}};
  if (!context.quick) shapes = {shapes[0], {1, std::max<int64_t>(seq / 2, 1)}, {1, seq}, {2, seq}, {4, seq}, {8, seq}};
  // Two at least: what does not fit then is why the probe is waived.
  while (shapes.size() > 2 && bench_bytes(context, model, shapes.back()) > context.device_available_bytes) {
    shapes.pop_back();
  }
  return shapes;
}

namespace {

// Of `numerator / denominator` the width, with heads of the same size.
ModelSpec scaled(const ModelSpec& model, int64_t numerator, int64_t denominator) {
  const auto scale = [&](int64_t width, int64_t grain) {
    return std::max(width * numerator / denominator / grain, int64_t{1}) * grain;
  };
  ModelSpec other = model;
  other.hidden = scale(model.hidden, kBlockElements);
  other.intermediate = scale(model.intermediate, kBlockElements);
  other.kv_heads = scale(model.kv_heads, 1);
  other.heads = other.kv_heads * (model.heads / model.kv_heads);
  other.vocabulary = std::min(model.vocabulary, 16 * kBlockElements);  // a layer has none
  return other;
}

}  // namespace

std::vector<LayerDesign> layer_designs(const ProbeContext& context) {
  const ModelSpec own = measured_model(context);
  std::vector<LayerDesign> designs;
  for (const KernelShape& shape : kernel_shapes(context, own)) designs.push_back({own, shape});
  if (context.quick) return designs;
  const size_t least = designs.size();
  const ModelSpec narrow = scaled(own, 1, 2), wide = scaled(own, 2, 1);
  if (context.on_host()) {
    const int64_t seq = designs.front().shape.seq;
    designs.insert(
        designs.end(),
        {{narrow, {1, seq}, false}, {narrow, {4, seq}, false}, {narrow, {1, 4 * seq}, false}, {own, {4, seq}}});
  } else {
    const int64_t seq = whole_row(own);
    for (const int64_t rows : {8, 32}) designs.push_back({own, {rows, std::max<int64_t>(seq / 8, 1)}});
    for (const int64_t longer : {2 * seq, 4 * seq}) designs.push_back({own, {1, longer}});
    // Documents that divide a row: the planner does not know of them, so these are for the record.
    for (const int64_t documents : {4, 16}) {
      if (seq % documents == 0) designs.push_back({own, {4, seq, documents}});
    }
    for (const ModelSpec& model : {narrow, wide}) {
      for (const KernelShape& shape : {KernelShape{1, seq}, {4, std::max<int64_t>(seq / 4, 1)}, {4, seq}}) {
        designs.push_back({model, shape, false});
      }
    }
  }
  const auto too_large = [&](const LayerDesign& design) {
    return design.shape.seq > own.max_position ||
           bench_bytes(context, design.model, design.shape) > context.device_available_bytes;
  };
  designs.erase(std::remove_if(designs.begin() + static_cast<std::ptrdiff_t>(least), designs.end(), too_large),
                designs.end());
  // A host's time may not suffice for all: short ones first.
  const auto flops = [](const LayerDesign& design) {
    return layer_forward_flops(design.model, design.shape.rows, design.shape.seq);
  };
  if (context.on_host()) {
    std::ranges::stable_sort(designs, {}, flops);
  }
  return designs;
}

int64_t bench_bytes(const ProbeContext& context, const ModelSpec& model, const KernelShape& shape) {
  const ModelLayout layout = make_layout(model);
  const DType type = compute_type(context);
  return layout.elements * (2 + 4) + (model.tied ? vocabulary_bytes(model) : 0) +
         saved_layout(model, shape.tokens(), type, ActivationPolicy::keep).bytes +
         4 * hidden_bytes(model, shape.tokens(), type) + temporary_bytes(model, one_rank_plan(context, shape));
}

Backend kernel_backend(const ProbeContext& context, const ModelSpec& model, const KernelShape& shape) {
  return make_backend(model, make_layout(model), one_rank_plan(context, shape));
}

void fill_random(Device& device, Stream& stream, const DeviceMemory& memory, DType type) {
  std::mt19937 random(1);
  std::uniform_real_distribution<float> value(-0.05f, 0.05f);
  const int64_t size = size_of(type);
  std::vector<std::byte> pattern(static_cast<size_t>(std::min(kFillElements * size, memory.bytes())));
  const auto elements = static_cast<int64_t>(pattern.size()) / size;
  for (int64_t i = 0; i < elements; ++i) {
    const uint32_t bits = std::bit_cast<uint32_t>(value(random));
    if (type == DType::bf16) {
      reinterpret_cast<uint16_t*>(pattern.data())[i] = static_cast<uint16_t>(bits >> 16);
    } else {
      reinterpret_cast<uint32_t*>(pattern.data())[i] = bits;
    }
  }
  for (int64_t begin = 0; begin < memory.bytes(); begin += static_cast<int64_t>(pattern.size())) {
    const int64_t bytes = std::min(static_cast<int64_t>(pattern.size()), memory.bytes() - begin);
    device.copy_to_device(stream, static_cast<std::byte*>(memory.data()) + begin, pattern.data(), bytes);
  }
  device.synchronize(stream);
}

KernelBench::KernelBench(const ProbeContext& context, const ModelSpec& measured, const KernelShape& shape)
    : model_(measured),
      layout_(make_layout(measured)),
      shape_(shape),
      hidden_type_(compute_type(context)),
      calls_(context.on_host() ? 1 : 4),
      backend_(kernel_backend(context, measured, shape)),
      device_(backend_.devices.front().get()),
      lane_(std::make_unique<DeviceLane>(*device_, "compute")) {
  for (int i = 0; i < calls_; ++i) {
    layer_events_.push_back({device_->create_event(), device_->create_event(), device_->create_event()});
  }
  const int64_t hidden = shape_.tokens() * model_.hidden;
  for (DeviceMemory* memory : {&hidden_in_, &hidden_out_, &hidden_gradient_, &fresh_gradient_}) {
    fill_once(*memory, hidden, hidden_type_);
  }
  loss_ = device_->allocate(sizeof(double), "kernel probe's loss");
  fill_batch();
}

void KernelBench::fill_once(DeviceMemory& memory, int64_t elements, DType type) {
  if (memory.data() != nullptr) return;
  memory = device_->allocate(elements * size_of(type), "kernel probe's tensor");
  fill_random(*device_, lane_->stream(), memory, type);
}

void KernelBench::fill_batch() {
  const int64_t tokens = shape_.tokens(), length = shape_.seq / shape_.documents;
  std::mt19937 random(2);
  std::uniform_int_distribution<int32_t> token(0, static_cast<int32_t>(model_.vocabulary - 1));
  std::vector<int32_t> batch(static_cast<size_t>(3 * tokens));
  for (int64_t t = 0; t < tokens; ++t) {
    batch[static_cast<size_t>(t)] = token(random);
    batch[static_cast<size_t>(tokens + t)] = token(random);
    batch[static_cast<size_t>(2 * tokens + t)] = static_cast<int32_t>(t % length);
  }
  for (int64_t start = 0; start < tokens; start += length) document_starts_.push_back(static_cast<int32_t>(start));
  batch_ = device_->allocate(3 * tokens * 4, "kernel probe's tokens");
  device_->copy_to_device(lane_->stream(), batch_.data(), batch.data(), batch_.bytes());
  device_->synchronize(lane_->stream());
}

MicroBatch KernelBench::make_batch() {
  const auto* tokens = static_cast<const int32_t*>(batch_.data());
  MicroBatch batch;
  batch.rows = shape_.rows;
  batch.seq = shape_.seq;
  batch.ids = tokens;
  batch.targets = tokens + shape_.tokens();
  batch.positions = tokens + 2 * shape_.tokens();
  batch.document_starts = document_starts_;
  return batch;
}

double KernelBench::time(const std::function<void()>& work) {
  return timed(*lane_,
               [&](Device& device, Stream& stream) {
                 for (int i = 0; i < calls_; ++i) device.launch(stream, work);
               }) /
         calls_;
}

double KernelBench::embedding_forward() {
  fill_once(embedding_weights_, layout_.embedding().elements, DType::bf16);
  return time([&] {
    backend_.compute.front()->embedding_forward(embedding_weights_.data(), make_batch(), hidden_out_.data());
  });
}

double KernelBench::embedding_backward(bool first) {
  fill_once(embedding_gradients_, layout_.embedding().elements, DType::fp32);
  return time([&] {
    backend_.compute.front()->embedding_backward(make_batch(), fresh_gradient_.data(), embedding_gradients_.data(),
                                                 model_.vocabulary, first);
  });
}

std::vector<double> KernelBench::layer() {
  const UnitLayout& unit = layout_.units[1];
  fill_once(layer_weights_, unit.elements, DType::bf16);
  fill_once(layer_gradients_, unit.elements, DType::fp32);
  if (saved_.data() == nullptr) {
    saved_ = device_->allocate(saved_layout(model_, shape_.tokens(), hidden_type_, ActivationPolicy::keep).bytes,
                               "kernel probe's activations");
  }
  Compute& compute = *backend_.compute.front();
  Stream& stream = lane_->stream();
  for (const LayerEvents& events : layer_events_) {
    // Backward works in place: without a fresh gradient each time, repeats would run on ever smaller numbers.
    device_->launch(stream, [&] {
      compute.cast(fresh_gradient_.data(), hidden_type_, hidden_gradient_.data(), hidden_type_,
                   shape_.tokens() * model_.hidden);
    });
    device_->record(stream, *events.begin);
    device_->launch(stream, [&] {
      compute.layer_forward(0, layer_weights_.data(), make_batch(), hidden_in_.data(), saved_.data(),
                            hidden_out_.data());
    });
    device_->record(stream, *events.middle);
    device_->launch(stream, [&] {
      compute.layer_backward(0, layer_weights_.data(), make_batch(), hidden_in_.data(), saved_.data(),
                             hidden_gradient_.data(), layer_gradients_.data(), true);
    });
    device_->record(stream, *events.end);
  }
  device_->synchronize(stream);
  double forward = 0, backward = 0;
  for (const LayerEvents& events : layer_events_) {
    const double middle = device_->timestamp(*events.middle);
    forward += middle - device_->timestamp(*events.begin);
    backward += device_->timestamp(*events.end) - middle;
  }
  return {forward / calls_, backward / calls_};
}

double KernelBench::head() {
  fill_once(head_weights_, layout_.head().elements, DType::bf16);
  fill_once(head_gradients_, layout_.head().elements, DType::fp32);
  if (model_.tied) {
    fill_once(embedding_weights_, layout_.embedding().elements, DType::bf16);
    fill_once(embedding_gradients_, layout_.embedding().elements, DType::fp32);
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
