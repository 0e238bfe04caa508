// Compute kernels at the model's shapes, through the Compute object that training uses.
#include <algorithm>

#include "model/base/format.h"
#include "model/cost/flops.h"
#include "model/cost/layer_work.h"
#include "profiler/kernel_bench.h"
#include "profiler/probe.h"

namespace slidedp {
namespace {

// A kernel needs two sizes at least, or its fixed cost cannot be told from its rate.
constexpr int kFewestSizes = 2;
// Kernels take this many times a probe's usual time: one repeat at a step's own size is long. On a device the last
// sizes are a step's own, and the time is only there for what is far too slow.
constexpr double kTimeShare = 2.5, kDeviceTimeShare = 10;

using MeasureDesign = std::function<std::vector<Measurement>(KernelBench&, const LayerDesign&, const Harness&)>;

// Brings a GPU to the clock that it holds under this load (training is limited by its power, not by its highest clock),
// and loads and chooses kernels.
void warm_up(const ProbeContext& context, const Harness& harness, const std::function<void()>& call) {
  if (context.on_host()) return;  // the harness's own repeat suffices
  constexpr int kFewest = 3;
  const double end = steady_seconds() + (context.quick ? 0.2 : 0.35);
  for (int i = 0; i < kFewest || steady_seconds() < end; ++i) {
    harness.check_stop();
    call();
  }
}

// One design after the other while the probe's time lasts.
std::vector<Measurement> over_designs(const ProbeContext& context, std::span<const LayerDesign> designs,
                                      const MeasureDesign& measure) {
  const Harness harness = context.harness(4);
  const double begin = steady_seconds();
  const double most = (context.on_host() ? kTimeShare : kDeviceTimeShare) * context.probe_seconds / context.rounds;
  std::vector<Measurement> result;
  int sizes = 0;
  for (const LayerDesign& design : designs) {
    const double size_begin = steady_seconds();
    KernelBench bench(context, design.model, design.shape);
    std::vector<Measurement> at_size = measure(bench, design, harness);
    std::move(at_size.begin(), at_size.end(), std::back_inserter(result));
    const double now = steady_seconds();
    // The next size takes up to twice as long.
    const double next_end = now + 2 * (now - size_begin);
    if (++sizes >= kFewestSizes && next_end > begin + most) break;
  }
  return result;
}

Measurement timed_at(const char* value_name, const KernelShape& shape, double flops) {
  const auto number = [](int64_t value) { return static_cast<double>(value); };
  return {value_name,
          "s",
          {{"tokens", number(shape.tokens())}, {"seq", number(shape.seq)}, {"flops", flops}, {"threads", 1}},
          {},
          true};
}

class KernelProbe : public Probe {
 public:
  std::optional<std::string> waived(const ProbeContext& context) const override {
    const ModelSpec measured = measured_model(context);
    const int64_t bytes = bench_bytes(context, measured, kernel_shapes(context, measured).back());
    if (bytes <= context.device_available_bytes) return std::nullopt;
    return fmt::format("needs up to {} for one layer and the vocabulary of {}, but only {} is available",
                       format_bytes(bytes), context.model.name, format_bytes(context.device_available_bytes));
  }
};

class LayerProbe final : public KernelProbe {
 public:
  std::string key() const override { return "kernel.layer"; }
  std::string method() const override {
    return "layer_forward and layer_backward of one decoder layer in turn, by tokens, length of rows and width of the "
           "model (one document a row; GPU: several calls in a row after warming up, and rows of several documents for "
           "the record), one intra-op thread; flops and bytes as the planner counts them";
  }
  std::vector<Measurement> run(const ProbeContext& context) const override {
    const DType compute = compute_type(context);
    return over_designs(
        context, layer_designs(context), [&](KernelBench& bench, const LayerDesign& design, const Harness& harness) {
          const ModelSpec& model = design.model;
          const KernelShape& shape = design.shape;
          warm_up(context, harness, [&] { bench.layer(); });
          // Attention stays inside a document.
          const int64_t documents = shape.rows * shape.documents, length = shape.seq / shape.documents;
          const bool packed = shape.documents > 1;
          return harness.measure(
              {layer_point(packed ? "packed forward" : "forward", design,
                           layer_forward_work(model, documents, length, compute)),
               layer_point(packed ? "packed backward" : "backward", design,
                           layer_backward_work(model, documents, length, compute, DType::fp32, /*first=*/true))},
              [&] { return bench.layer(); });
        });
  }

 private:
  static Measurement layer_point(const char* value_name, const LayerDesign& design, const LayerWork& work) {
    Measurement point = timed_at(value_name, design.shape, work.flops());
    point.parameters["attention_flops"] = work.attention_flops;
    point.parameters["layer_bytes"] = work.bytes;
    point.parameters["documents"] = static_cast<double>(design.shape.documents);
    point.parameters["hidden"] = static_cast<double>(design.model.hidden);
    point.parameters["own_model"] = design.own ? 1 : 0;
    return point;
  }
};

class HeadProbe final : public KernelProbe {
 public:
  std::string key() const override { return "kernel.head"; }
  std::string method() const override {
    return "final norm, LM head and cross-entropy, forward and backward, by tokens, one intra-op thread; on the CPU "
           "backend a vocabulary matrix of at most 64 Mi elements";
  }
  std::vector<Measurement> run(const ProbeContext& context) const override {
    return over_designs(context, head_designs(context),
                        [&context](KernelBench& bench, const LayerDesign& design, const Harness& harness) {
                          warm_up(context, harness, [&] { bench.head(); });
                          return std::vector{harness.measure(
                              timed_at("seconds", design.shape, head_flops(design.model, design.shape.tokens())),
                              [&] { return bench.head(); })};
                        });
  }

 private:
  // On a device also few tokens, which show what does not grow with them.
  static std::vector<LayerDesign> head_designs(const ProbeContext& context) {
    const ModelSpec model = measured_model(context);
    std::vector<LayerDesign> designs;
    const std::vector<KernelShape> shapes = kernel_shapes(context, model);
    if (!context.on_host()) {
      for (const int64_t part : {4, 2})
        designs.push_back({model, {1, std::max<int64_t>(shapes.front().seq / part, 1)}});
    }
    for (const KernelShape& shape : shapes) designs.push_back({model, shape});
    return designs;
  }
};

class EmbeddingProbe final : public KernelProbe {
 public:
  std::string key() const override { return "kernel.embedding"; }
  std::string method() const override {
    return "embedding_backward that overwrites the whole gradient matrix, by vocabulary size (1/16, 1/4, all), one "
           "intra-op thread; work is counted in elements written. embedding_forward is recorded, too short to matter";
  }
  std::vector<Measurement> run(const ProbeContext& context) const override {
    const ModelSpec all = measured_model(context);
    const std::vector<KernelShape> shapes = kernel_shapes(context, all);
    const KernelShape shape = shapes[shapes.size() / 2];
    const Harness harness = context.harness(6);
    std::vector<Measurement> result;
    for (int64_t divisor : {16, 4, 1}) {
      ModelSpec part = all;
      part.vocabulary = std::max(all.vocabulary / divisor, kBlockElements);
      KernelBench bench(context, part, shape);
      const int64_t tokens = shape.tokens();
      result.push_back(harness.measure(timed_at("forward", shape, embedding_forward_elements(part, tokens)),
                                       [&] { return bench.embedding_forward(); }));
      result.push_back(harness.measure(timed_at("backward", shape, embedding_backward_elements(part, tokens, true)),
                                       [&] { return bench.embedding_backward(true); }));
    }
    return result;
  }
};

class CastProbe final : public Probe {
 public:
  std::string key() const override { return "kernel.cast"; }
  std::string method() const override {
    return "Compute::cast of fp32 to bf16 over a gradient slot of 16 Mi elements (GPU: 128 Mi), chunk by chunk; bytes "
           "read and written";
  }
  std::optional<std::string> waived(const ProbeContext& context) const override {
    const int64_t bytes = context.on_host() ? context.rolling_bytes : context.device_available_bytes / 2;
    if (bytes >= slot_elements(context) * 4) return std::nullopt;
    return fmt::format("only {} of memory may be used", format_bytes(bytes));
  }

  std::vector<Measurement> run(const ProbeContext& context) const override {
    const ModelSpec measured = measured_model(context);
    Backend backend = kernel_backend(context, measured, kernel_shapes(context, measured).front());
    Compute& compute = *backend.compute.front();
    Device& device = *backend.devices.front();
    DeviceLane lane(device, "compute");
    const int64_t slot_size = slot_elements(context), chunk = slot_size / kChunks;
    const DeviceMemory slot = device.allocate(slot_size * 4, "cast probe's gradient slot");
    const DeviceMemory wire = device.allocate(chunk * 2, "cast probe's wire slot");
    fill_random(device, lane.stream(), slot, DType::fp32);
    int64_t next = 0;
    // A GPU's chunks are short beside the time of an event.
    const int64_t casts = context.on_host() ? 1 : kChunks;
    return {context.harness(1).measure({"seconds", "s", {{"bytes", static_cast<double>(chunk * 6)}}, {}, true}, [&] {
      const double seconds = timed(lane, [&](Device& on, Stream& stream) {
        for (int64_t i = 0; i < casts; ++i) {
          const float* from = static_cast<const float*>(slot.data()) + next++ % kChunks * chunk;
          on.launch(stream, [&compute, &wire, from, chunk] {
            compute.cast(from, DType::fp32, wire.data(), DType::bf16, chunk);
          });
        }
      });
      return seconds / static_cast<double>(casts);
    })};
  }

 private:
  static constexpr int64_t kChunks = 8;
  // On a GPU far more than its cache holds.
  static int64_t slot_elements(const ProbeContext& context) { return int64_t{context.on_host() ? 16 : 128} << 20; }
};

}  // namespace

std::unique_ptr<Probe> make_kernel_layer() { return std::make_unique<LayerProbe>(); }
std::unique_ptr<Probe> make_kernel_head() { return std::make_unique<HeadProbe>(); }
std::unique_ptr<Probe> make_kernel_embedding() { return std::make_unique<EmbeddingProbe>(); }
std::unique_ptr<Probe> make_kernel_cast() { return std::make_unique<CastProbe>(); }

}  // namespace slidedp
