// The CPU optimizer: the functions of runtime/host that training runs, over buffers that roll through DRAM.
#include <algorithm>
#include <array>

#include "model/base/format.h"
#include "profiler/adam_slice.h"
#include "profiler/probe.h"
#include "profiler/rolling.h"
#include "profiler/stream_team.h"
#include "runtime/host/cpu_adam.h"

namespace slidedp {
namespace {

constexpr int kMostSources = 4;

std::optional<std::string> too_little_memory(const ProbeContext& context) {
  if (StatePool::elements_in(context.state_memory(), kMostSources) / context.cores >= kBlockElements) {
    return std::nullopt;
  }
  return fmt::format("only {} of memory may be used", format_bytes(context.rolling_bytes));
}

// Seconds of one chunk where one worker updates chunk after chunk.
double seconds_of_a_chunk(const ProbeContext& context, const WorkerCores& cores, StateSlice& slice, int sources,
                          UpdatePart part) {
  const auto elements = static_cast<double>(slice.chunk());
  return elements / rate_together(1, cores, context.window_s(),
                                  [&](int) { return static_cast<double>(slice.update(sources, part)); });
}

class AdamProbe final : public Probe {
 public:
  std::string key() const override { return "host.adam"; }
  std::string method() const override {
    return "adam_update over rolling hi, lo, m, v with one bf16 gradient source (26 B of traffic an element), by the "
           "number of threads, each tied to a core; sum of their rates in a window in which all run";
  }
  std::optional<std::string> waived(const ProbeContext& context) const override { return too_little_memory(context); }

  std::vector<Measurement> run(const ProbeContext& context) const override {
    const std::vector<int> teams = thread_counts(context);
    const Harness harness = context.warm_harness(static_cast<int>(teams.size()), 1.2);
    StatePool pool(context.state_memory(), 1);
    std::vector<Measurement> result;
    for (const int threads : teams) {
      std::vector<StateSlice> slices = slices_of(pool, threads);
      WorkerCores cores(threads, 0);
      const StreamWork update = [&](int worker) {
        return static_cast<double>(slices[static_cast<size_t>(worker)].update(1));
      };
      const double elements = static_cast<double>(slices.front().chunk()) * threads;
      result.push_back(harness.measure({"seconds", "s", {{"threads", threads}, {"elements", elements}}, {}, true}, [&] {
        cores.turn();
        return elements / rate_together(threads, cores, context.window_s(), update);
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
           "each), with one bf16 gradient source and one thread, on another core each time";
  }
  std::optional<std::string> waived(const ProbeContext& context) const override { return too_little_memory(context); }

  std::vector<Measurement> run(const ProbeContext& context) const override {
    StatePool pool(context.state_memory(), 1);
    StateSlice slice(pool, 0, 1);
    std::vector<Measurement> points;
    for (UpdatePart part : kParts) {
      points.push_back(
          {"seconds", "s", {{"part", part_number(part)}, {"elements", static_cast<double>(slice.chunk())}}, {}, true});
    }
    WorkerCores cores(1, 0);
    // Both from the same place, which the caches have lost meanwhile.
    return context.warm_harness(1).measure(std::move(points), [&] {
      cores.turn();
      std::vector<double> seconds;
      const int64_t position = slice.position();
      for (UpdatePart part : kParts) {
        slice.seek(position);
        seconds.push_back(seconds_of_a_chunk(context, cores, slice, 1, part));
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
    return "block_square_sums over one rolling bf16 gradient source, with one thread, on another core each time";
  }
  std::optional<std::string> waived(const ProbeContext& context) const override { return too_little_memory(context); }

  std::vector<Measurement> run(const ProbeContext& context) const override {
    const int64_t available = context.rolling_bytes / kWireBytes / kBlockElements * kBlockElements;
    const int64_t count = std::min(kElementsPerCall, available);
    RollingBuffer gradient(available * kWireBytes, "the norm probe's gradient");
    std::vector<double> sums(static_cast<size_t>(ceil_div(count, kBlockElements)));
    const auto elements = static_cast<double>(count);
    const StreamWork square = [&](int) {
      const void* source = gradient.next(count * kWireBytes);
      block_square_sums({{&source, 1}, 1, DType::bf16}, count, sums);
      return elements;
    };
    WorkerCores cores(1, 0);
    return {context.warm_harness(1, 0.5).measure({"seconds", "s", {{"elements", elements}}, {}, true}, [&] {
      cores.turn();
      return elements / rate_together(1, cores, context.window_s(), square);
    })};
  }
};

class SourcesProbe final : public Probe {
 public:
  std::string key() const override { return "host.sources"; }
  std::string method() const override {
    return "adam_update with 1, 2 and 4 bf16 sources in turn, one thread, on another core each time; the cost of a "
           "further source is (t4 - t1) / 3, its rate that source's bytes over it";
  }
  std::optional<std::string> waived(const ProbeContext& context) const override { return too_little_memory(context); }

  std::vector<Measurement> run(const ProbeContext& context) const override {
    StatePool pool(context.state_memory(), kMostSources);
    StateSlice slice(pool, 0, 1);
    std::vector<Measurement> points;
    for (int sources : kSources) {
      points.push_back(
          {"seconds", "s", {{"sources", sources}, {"elements", static_cast<double>(slice.chunk())}}, {}, true});
    }
    WorkerCores cores(1, 0);
    // One after another in each repeat from the same place, which the caches have lost meanwhile: drift and the place
    // hit all alike, and differences stay clean.
    return context.warm_harness(1, 1.2).measure(std::move(points), [&] {
      cores.turn();
      std::vector<double> seconds;
      const int64_t position = slice.position();
      for (int sources : kSources) {
        slice.seek(position);
        seconds.push_back(seconds_of_a_chunk(context, cores, slice, sources, UpdatePart::whole));
      }
      return seconds;
    });
  }

 private:
  static constexpr std::array<int, 3> kSources{1, 2, kMostSources};
};

}  // namespace

std::unique_ptr<Probe> make_host_adam() { return std::make_unique<AdamProbe>(); }
std::unique_ptr<Probe> make_host_split() { return std::make_unique<SplitProbe>(); }
std::unique_ptr<Probe> make_host_norm() { return std::make_unique<NormProbe>(); }
std::unique_ptr<Probe> make_host_sources() { return std::make_unique<SourcesProbe>(); }

}  // namespace slidedp
