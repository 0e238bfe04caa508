// The CPU optimizer: the functions of runtime/host that training runs, over buffers that roll through DRAM.
#include <algorithm>
#include <array>
#include <limits>
#include <set>

#include "model/base/format.h"
#include "profiler/probe.h"
#include "profiler/rolling.h"
#include "runtime/host/cpu_adam.h"

namespace slidedp {
namespace {

constexpr int64_t kElementsPerCall = int64_t{2} << 20;  // about a chunk
constexpr int64_t kStateBytes = 12;                     // hi, lo, m, v
constexpr int64_t kWireBytes = 2;                       // bf16
// What one update moves with one bf16 source: reads and writes hi, lo, m, v, reads the gradient.
constexpr double kAdamTraffic = 2 * kStateBytes + kWireBytes;

AdamScalars typical_scalars() {
  AdamScalars scalars;
  scalars.beta1 = 0.9f;
  scalars.beta2 = 0.999f;
  scalars.one_minus_beta1 = 0.1f;
  scalars.one_minus_beta2 = 0.001f;
  scalars.eps = 1e-8f;
  scalars.step_size = 1e-6f;
  scalars.bias_correction2_sqrt = 0.1f;
  scalars.decay = 1 - 1e-6f;
  scalars.gradient_scale = 1e-3f;
  return scalars;
}

// Training state and gradient sources of one worker.
class StateSlice {
 public:
  StateSlice(int64_t elements, int sources)
      : elements_(elements),
        hi_(2 * elements, "the Adam probe's hi"),
        lo_(2 * elements, "the Adam probe's lo"),
        m_(4 * elements, "the Adam probe's m"),
        v_(4 * elements, "the Adam probe's v") {
    for (int i = 0; i < sources; ++i) gradients_.emplace_back(kWireBytes * elements, "the Adam probe's gradients");
  }

  // The next `count` elements, from the first `sources` sources.
  void update(int64_t count, int sources, UpdatePart part = UpdatePart::whole) {
    if (position_ + count > elements_) position_ = 0;
    std::vector<const void*> pointers;
    for (int i = 0; i < sources; ++i) {
      pointers.push_back(static_cast<const uint16_t*>(gradients_[static_cast<size_t>(i)].data()) + position_);
    }
    adam_update(span<uint16_t>(hi_, count), span<uint16_t>(lo_, count), span<float>(m_, count), span<float>(v_, count),
                {pointers, sources, DType::bf16}, scalars_, true, part);
    position_ += count;
  }

 private:
  template <typename T>
  std::span<T> span(RollingBuffer& buffer, int64_t count) const {
    return {static_cast<T*>(buffer.data()) + position_, static_cast<size_t>(count)};
  }
  int64_t elements_, position_ = 0;
  RollingBuffer hi_, lo_, m_, v_;
  std::vector<RollingBuffer> gradients_;
  AdamScalars scalars_ = typical_scalars();
};

// Elements of each of `workers` slices that share the rolling memory.
int64_t slice_elements(const ProbeContext& context, int workers, int sources) {
  return context.rolling_bytes / (workers * (kStateBytes + sources * kWireBytes)) / kBlockElements * kBlockElements;
}

std::optional<std::string> too_little_memory(const ProbeContext& context) {
  if (slice_elements(context, context.cores, 4) >= kBlockElements) return std::nullopt;
  return fmt::format("only {} of memory may be used", format_bytes(context.rolling_bytes));
}

class AdamProbe final : public Probe {
 public:
  std::string key() const override { return "host.adam"; }
  std::string method() const override {
    return "adam_update over rolling hi, lo, m, v with one bf16 gradient source (26 B of traffic an element), with one "
           "thread and with all cores";
  }
  std::optional<std::string> waived(const ProbeContext& context) const override { return too_little_memory(context); }

  std::vector<Measurement> run(const ProbeContext& context) const override {
    const std::set<int> team_sizes{1, context.cores};
    const Harness harness = context.harness(static_cast<int>(team_sizes.size()));
    std::vector<Measurement> result;
    for (int threads : team_sizes) {
      const int64_t elements = slice_elements(context, threads, 1);
      const int64_t count = std::min(kElementsPerCall, elements);
      std::vector<StateSlice> slices;
      for (int i = 0; i < threads; ++i) slices.emplace_back(elements, 1);
      result.push_back(harness.measure(
          {"seconds", "s", {{"threads", threads}, {"elements", static_cast<double>(count * threads)}}, {}, true}, [&] {
            return seconds_together(threads, [&](int worker) { slices[static_cast<size_t>(worker)].update(count, 1); });
          }));
    }
    return result;
  }

  std::vector<Finding> fill(const ProbeContext& context, std::span<const Measurement> measured,
                            HardwareSpec& spec) const override {
    const auto rate = [](const Measurement& m) { return m.parameters.at("elements") / median(m.repeats); };
    const Measurement& alone = find(measured, "seconds", {{"threads", 1}});
    const Measurement& together = find(measured, "seconds", {{"threads", context.cores}});
    HostSpec& host = spec.host;
    host.adam_elements_per_s = rate(alone);
    std::vector<Finding> found{
        finding("host.adam_elements_per_s", host.adam_elements_per_s, "elements/s", relative_error(alone.repeats))};
    const double traffic_gbps = rate(together) * kAdamTraffic / 1e9;
    if (traffic_gbps > host.cpu_stream_gbps) {
      host.cpu_stream_gbps = traffic_gbps;
      found.push_back(finding("host.cpu_stream_gbps", traffic_gbps, "GB/s", relative_error(together.repeats)));
    }
    if (traffic_gbps > host.dram_gbps) {
      host.dram_gbps = traffic_gbps;
      found.push_back(finding("host.dram_gbps", traffic_gbps, "GB/s", relative_error(together.repeats)));
    }
    return found;
  }
};

class SplitProbe final : public Probe {
 public:
  std::string key() const override { return "host.split"; }
  std::string method() const override {
    return "the two passes of a split update in turn, adam_update's weights and moments (18 B of traffic an element "
           "each), with one bf16 gradient source and one thread";
  }
  std::optional<std::string> waived(const ProbeContext& context) const override { return too_little_memory(context); }

  std::vector<Measurement> run(const ProbeContext& context) const override {
    const int64_t elements = slice_elements(context, 1, 1);
    const int64_t count = std::min(kElementsPerCall, elements);
    StateSlice slice(elements, 1);
    std::vector<Measurement> points;
    for (UpdatePart part : kParts) {
      points.push_back(
          {"seconds", "s", {{"part", part_number(part)}, {"elements", static_cast<double>(count)}}, {}, true});
    }
    return context.harness(1).measure(std::move(points), [&] {
      std::vector<double> seconds;
      for (UpdatePart part : kParts) {
        seconds.push_back(seconds_together(1, [&](int) { slice.update(count, 1, part); }));
      }
      return seconds;
    });
  }

  std::vector<Finding> fill(const ProbeContext&, std::span<const Measurement> measured,
                            HardwareSpec& spec) const override {
    std::vector<Finding> found;
    const auto take = [&](UpdatePart part, double& rate, const std::string& field) {
      const Measurement& m = find(measured, "seconds", {{"part", part_number(part)}});
      rate = m.parameters.at("elements") / median(m.repeats);
      found.push_back(finding(field, rate, "elements/s", relative_error(m.repeats)));
    };
    take(UpdatePart::weights, spec.host.split_weights_elements_per_s, "host.split_weights_elements_per_s");
    take(UpdatePart::moments, spec.host.split_moments_elements_per_s, "host.split_moments_elements_per_s");
    return found;
  }

 private:
  static constexpr std::array<UpdatePart, 2> kParts{UpdatePart::weights, UpdatePart::moments};
  static double part_number(UpdatePart part) { return static_cast<double>(part); }
};

class NormProbe final : public Probe {
 public:
  std::string key() const override { return "host.norm"; }
  std::string method() const override {
    return "block_square_sums over one rolling bf16 gradient source, with one thread";
  }
  std::optional<std::string> waived(const ProbeContext& context) const override { return too_little_memory(context); }

  std::vector<Measurement> run(const ProbeContext& context) const override {
    const int64_t available = context.rolling_bytes / kWireBytes / kBlockElements * kBlockElements;
    const int64_t count = std::min(kElementsPerCall, available);
    RollingBuffer gradient(available * kWireBytes, "the norm probe's gradient");
    std::vector<double> sums(static_cast<size_t>(ceil_div(count, kBlockElements)));
    return {context.harness(1).measure({"seconds", "s", {{"elements", static_cast<double>(count)}}, {}, true}, [&] {
      const void* source = gradient.next(count * kWireBytes);
      return seconds_together(1, [&](int) { block_square_sums({{&source, 1}, 1, DType::bf16}, count, sums); });
    })};
  }

  std::vector<Finding> fill(const ProbeContext&, std::span<const Measurement> measured,
                            HardwareSpec& spec) const override {
    const Measurement& m = find(measured, "seconds");
    spec.host.norm_elements_per_s = m.parameters.at("elements") / median(m.repeats);
    return {
        finding("host.norm_elements_per_s", spec.host.norm_elements_per_s, "elements/s", relative_error(m.repeats))};
  }
};

class SourcesProbe final : public Probe {
 public:
  std::string key() const override { return "host.sources"; }
  std::string method() const override {
    return "adam_update with 1, 2 and 4 bf16 sources in turn, one thread; the cost of a further source is (t4 - t1) / "
           "3, "
           "its rate that source's bytes over it";
  }
  std::optional<std::string> waived(const ProbeContext& context) const override { return too_little_memory(context); }

  std::vector<Measurement> run(const ProbeContext& context) const override {
    const int64_t elements = slice_elements(context, 1, 4);
    const int64_t count = std::min(kElementsPerCall, elements);
    StateSlice slice(elements, 4);
    std::vector<Measurement> points;
    for (int sources : kSources) {
      points.push_back({"seconds", "s", {{"sources", sources}, {"elements", static_cast<double>(count)}}, {}, true});
    }
    // One after another in each repeat, so that drift hits all alike and differences stay clean.
    return context.harness(1).measure(std::move(points), [&] {
      std::vector<double> seconds;
      for (int sources : kSources) {
        seconds.push_back(seconds_together(1, [&](int) { slice.update(count, sources); }));
      }
      return seconds;
    });
  }

  std::vector<Finding> fill(const ProbeContext&, std::span<const Measurement> measured,
                            HardwareSpec& spec) const override {
    const Measurement& one = find(measured, "seconds", {{"sources", 1}});
    const Measurement& four = find(measured, "seconds", {{"sources", 4}});
    std::vector<double> further;
    for (size_t i = 0; i < one.repeats.size(); ++i) further.push_back((four.repeats[i] - one.repeats[i]) / 3);
    const double bytes = one.parameters.at("elements") * kWireBytes;
    const double seconds = median(further);
    // The rate at which the whole update moves its own bytes: no further source can be believed to be free.
    const double adam_gbps = one.parameters.at("elements") * kAdamTraffic / median(one.repeats) / 1e9;
    const double gbps = seconds > 0 ? bytes / seconds / 1e9 : std::numeric_limits<double>::infinity();
    constexpr double kMostOverAdam = 4;
    spec.host.source_gbps = std::min(gbps, kMostOverAdam * adam_gbps);
    Finding found = finding("host.source_gbps", spec.host.source_gbps, "GB/s", relative_error(further));
    if (gbps > kMostOverAdam * adam_gbps) {
      found.note =
          "host.sources: the cost of a further source is below the noise, so its rate is capped at four times "
          "that of the update itself";
    }
    return {found};
  }

 private:
  static constexpr std::array<int, 3> kSources{1, 2, 4};
};

}  // namespace

std::unique_ptr<Probe> make_host_adam() { return std::make_unique<AdamProbe>(); }
std::unique_ptr<Probe> make_host_split() { return std::make_unique<SplitProbe>(); }
std::unique_ptr<Probe> make_host_norm() { return std::make_unique<NormProbe>(); }
std::unique_ptr<Probe> make_host_sources() { return std::make_unique<SourcesProbe>(); }

}  // namespace slidedp
