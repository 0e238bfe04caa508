// The CPU optimizer: the functions of runtime/host that training runs, over buffers that roll through DRAM.
#include <algorithm>
#include <array>
#include <limits>
#include <set>

#include "model/base/format.h"
#include "model/calibration/contention_fit.h"
#include "profiler/adam_slice.h"
#include "profiler/probe.h"
#include "profiler/rolling.h"
#include "runtime/host/cpu_adam.h"

namespace slidedp {
namespace {

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

 private:
  static constexpr std::array<int, 3> kSources{1, 2, 4};
};

}  // namespace

std::unique_ptr<Probe> make_host_adam() { return std::make_unique<AdamProbe>(); }
std::unique_ptr<Probe> make_host_split() { return std::make_unique<SplitProbe>(); }
std::unique_ptr<Probe> make_host_norm() { return std::make_unique<NormProbe>(); }
std::unique_ptr<Probe> make_host_sources() { return std::make_unique<SourcesProbe>(); }

}  // namespace slidedp
