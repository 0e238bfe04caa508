// Compute kernels at the model's shapes, through the Compute object that training uses.
#include <algorithm>

#include "model/base/format.h"
#include "model/cost/flops.h"
#include "profiler/kernel_bench.h"
#include "profiler/probe.h"

namespace slidedp {
namespace {

// A kernel needs two sizes at least, or its fixed cost cannot be told from its rate.
constexpr int kFewestSizes = 2;
// Kernels take this many times a probe's usual time: one repeat at a step's own size is long.
constexpr double kTimeShare = 2.5;

using MeasureAtTokens =
    std::function<std::vector<Measurement>(KernelBench&, const ModelSpec& measured, int64_t tokens, const Harness&)>;

// Doubles the token count while the probe's time lasts.
std::vector<Measurement> over_token_counts(const ProbeContext& context, const MeasureAtTokens& measure) {
  const ModelSpec measured = measured_model(context.model);
  const int64_t first = first_token_count(measured), last = last_token_count(measured, context.quick);
  const Harness harness = context.harness(4);
  const double begin = steady_seconds();
  std::vector<Measurement> result;
  int sizes = 0;
  for (int64_t tokens = first; tokens <= last; tokens *= 2) {
    const double size_begin = steady_seconds();
    KernelBench bench(context, measured, tokens);
    std::vector<Measurement> at_size = measure(bench, measured, tokens, harness);
    std::move(at_size.begin(), at_size.end(), std::back_inserter(result));
    const double now = steady_seconds();
    // The next size takes up to twice as long.
    const double next_end = now + 2 * (now - size_begin);
    if (++sizes >= kFewestSizes && next_end > begin + kTimeShare * context.probe_seconds) break;
  }
  return result;
}

Measurement timed_at(const char* value_name, int64_t tokens, double flops) {
  return {value_name, "s", {{"tokens", static_cast<double>(tokens)}, {"flops", flops}, {"threads", 1}}, {}, true};
}

class KernelProbe : public Probe {
 public:
  std::optional<std::string> waived(const ProbeContext& context) const override {
    const ModelSpec measured = measured_model(context.model);
    const int64_t bytes = bench_bytes(measured, last_token_count(measured, context.quick));
    if (bytes <= context.available_bytes) return std::nullopt;
    return fmt::format("needs up to {} for one layer and the vocabulary of {}, but only {} is available",
                       format_bytes(bytes), context.model.name, format_bytes(context.available_bytes));
  }

 protected:
  static std::vector<Finding> fit(std::span<const Measurement* const> measured, const std::string& key,
                                  const std::string& field, KernelRate& rate) {
    const KernelFit fitted = fit_kernel(fit_samples(measured, "flops"), key);
    rate = fitted.rate;
    return findings("kernels." + field, fitted);
  }
};

class LayerProbe final : public KernelProbe {
 public:
  std::string key() const override { return "kernel.layer"; }
  std::string method() const override {
    return "layer_forward and layer_backward of one decoder layer, by tokens (one row, one document), one intra-op "
           "thread; flops as the planner counts them";
  }
  std::vector<Measurement> run(const ProbeContext& context) const override {
    return over_token_counts(context, [](KernelBench& bench, const ModelSpec& model, int64_t tokens, const Harness& h) {
      return h.measure({timed_at("forward", tokens, layer_forward_flops(model, 1, tokens)),
                        timed_at("backward", tokens, layer_backward_flops(model, 1, tokens))},
                       [&] { return bench.layer(); });
    });
  }
  std::vector<Finding> fill(const ProbeContext&, std::span<const Measurement> measured,
                            HardwareSpec& spec) const override {
    std::vector<Finding> found = fit(select(measured, "forward"), key(), "layer_fwd", spec.kernels.layer_fwd);
    std::vector<Finding> backward = fit(select(measured, "backward"), key(), "layer_bwd", spec.kernels.layer_bwd);
    std::move(backward.begin(), backward.end(), std::back_inserter(found));
    return found;
  }
};

class HeadProbe final : public KernelProbe {
 public:
  std::string key() const override { return "kernel.head"; }
  std::string method() const override {
    return "final norm, LM head and cross-entropy, forward and backward, by tokens, one intra-op thread, a vocabulary "
           "matrix of at most 64 Mi elements";
  }
  std::vector<Measurement> run(const ProbeContext& context) const override {
    return over_token_counts(context, [](KernelBench& bench, const ModelSpec& model, int64_t tokens, const Harness& h) {
      return std::vector{
          h.measure(timed_at("seconds", tokens, head_flops(model, tokens)), [&] { return bench.head(); })};
    });
  }
  std::vector<Finding> fill(const ProbeContext&, std::span<const Measurement> measured,
                            HardwareSpec& spec) const override {
    return fit(select(measured, "seconds"), key(), "head", spec.kernels.head);
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
    const ModelSpec all = measured_model(context.model);
    const int64_t tokens = last_token_count(all, true);
    const Harness harness = context.harness(6);
    std::vector<Measurement> result;
    for (int64_t divisor : {16, 4, 1}) {
      ModelSpec part = all;
      part.vocabulary = std::max(all.vocabulary / divisor, kBlockElements);
      KernelBench bench(context, part, tokens);
      result.push_back(harness.measure(timed_at("forward", tokens, embedding_forward_elements(part, tokens)),
                                       [&] { return bench.embedding_forward(); }));
      result.push_back(harness.measure(timed_at("backward", tokens, embedding_backward_elements(part, tokens, true)),
                                       [&] { return bench.embedding_backward(true); }));
    }
    return result;
  }
  std::vector<Finding> fill(const ProbeContext&, std::span<const Measurement> measured,
                            HardwareSpec& spec) const override {
    return fit(select(measured, "backward"), key(), "embedding", spec.kernels.embedding);
  }
};

class CastProbe final : public Probe {
 public:
  std::string key() const override { return "kernel.cast"; }
  std::string method() const override {
    return "Compute::cast of fp32 to bf16 over a gradient slot of 16 Mi elements, chunk by chunk; bytes read and "
           "written";
  }
  std::optional<std::string> waived(const ProbeContext& context) const override {
    if (context.rolling_bytes >= kSlot * 4) return std::nullopt;
    return fmt::format("only {} of memory may be used", format_bytes(context.rolling_bytes));
  }

  std::vector<Measurement> run(const ProbeContext& context) const override {
    const ModelSpec measured = measured_model(context.model);
    const ModelLayout layout = make_layout(measured);
    Plan plan;
    plan.backend = context.backend;
    plan.seq = plan.head_chunk_tokens = 1;
    plan.activation = {ActivationPolicy::keep};
    Backend backend = make_backend(measured, layout, plan, 0);
    Device& device = *backend.devices.front();
    DeviceLane lane(device, "compute");
    const DeviceMemory slot = device.allocate(kSlot * 4, "cast probe's gradient slot");
    const DeviceMemory wire = device.allocate(kChunk * 2, "cast probe's wire slot");
    int64_t chunk = 0;
    return {context.harness(1).measure({"seconds", "s", {{"bytes", kChunk * 6.0}}, {}, true}, [&] {
      const float* from = static_cast<const float*>(slot.data()) + chunk++ % (kSlot / kChunk) * kChunk;
      return timed(lane, [&](Device& on, Stream& stream) {
        on.launch(stream, [&] { backend.compute.front()->cast(from, DType::fp32, wire.data(), DType::bf16, kChunk); });
      });
    })};
  }

  std::vector<Finding> fill(const ProbeContext&, std::span<const Measurement> measured,
                            HardwareSpec& spec) const override {
    const Measurement& m = find(measured, "seconds");
    spec.kernels.elementwise_gbps = m.parameters.at("bytes") / median(m.repeats) / 1e9;
    return {finding("kernels.elementwise_gbps", spec.kernels.elementwise_gbps, "GB/s", relative_error(m.repeats))};
  }

 private:
  static constexpr int64_t kChunk = int64_t{2} << 20, kSlot = int64_t{16} << 20;  // elements
};

}  // namespace

std::unique_ptr<Probe> make_kernel_layer() { return std::make_unique<LayerProbe>(); }
std::unique_ptr<Probe> make_kernel_head() { return std::make_unique<HeadProbe>(); }
std::unique_ptr<Probe> make_kernel_embedding() { return std::make_unique<EmbeddingProbe>(); }
std::unique_ptr<Probe> make_kernel_cast() { return std::make_unique<CastProbe>(); }

}  // namespace slidedp
