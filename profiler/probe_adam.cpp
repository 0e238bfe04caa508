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

constexpr int kMostSources = 4;
// Chunks that one thread updates in a repeat: memory is not everywhere equally fast, and one chunk takes milliseconds.
constexpr int kChunks = 8;

std::optional<std::string> too_little_memory(const ProbeContext& context) {
  if (StatePool::elements_in(context.state_memory(), kMostSources) / context.cores >= kBlockElements) {
    return std::nullopt;
  }
  return fmt::format("only {} of memory may be used", format_bytes(context.rolling_bytes));
}

// Elements that seconds_of_chunks() updates.
double chunks_elements(const StateSlice& slice) { return static_cast<double>(slice.chunk()) * kChunks; }

double seconds_of_chunks(StateSlice& slice, int sources, UpdatePart part) {
  return seconds_together(1, [&](int) {
    for (int i = 0; i < kChunks; ++i) slice.update(sources, part);
  });
}

class AdamProbe final : public Probe {
 public:
  std::string key() const override { return "host.adam"; }
  std::string method() const override {
    return "adam_update over rolling hi, lo, m, v with one bf16 gradient source (26 B of traffic an element), by "
           "number of threads, each tied to a core";
  }
  std::optional<std::string> waived(const ProbeContext& context) const override { return too_little_memory(context); }

  std::vector<Measurement> run(const ProbeContext& context) const override {
    const std::vector<int> teams = thread_counts(context);
    const Harness harness = context.harness(static_cast<int>(teams.size()), 1.2);
    StatePool pool(context.state_memory(), 1);
    std::vector<Measurement> result;
    for (const int threads : teams) {
      std::vector<StateSlice> slices = slices_of(pool, threads);
      const WorkerCores cores(threads, 0);
      const double elements = static_cast<double>(slices.front().chunk()) * kChunks * threads;
      result.push_back(harness.measure({"seconds", "s", {{"threads", threads}, {"elements", elements}}, {}, true}, [&] {
        return seconds_together(
            threads,
            [&](int worker) {
              for (int i = 0; i < kChunks; ++i) slices[static_cast<size_t>(worker)].update(1);
            },
            [&](int worker) { cores.take(worker); });
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
    StatePool pool(context.state_memory(), 1);
    StateSlice slice(pool, 0, 1);
    std::vector<Measurement> points;
    for (UpdatePart part : kParts) {
      points.push_back({"seconds", "s", {{"part", part_number(part)}, {"elements", chunks_elements(slice)}}, {}, true});
    }
    // Both over the same memory, which the caches have lost meanwhile.
    return context.harness(1).measure(std::move(points), [&] {
      std::vector<double> seconds;
      const int64_t position = slice.position();
      for (UpdatePart part : kParts) {
        slice.seek(position);
        seconds.push_back(seconds_of_chunks(slice, 1, part));
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
    constexpr int kCalls = 4 * kChunks;  // a chunk takes a tenth of what its update takes
    const double elements = static_cast<double>(count) * kCalls;
    return {context.harness(1).measure({"seconds", "s", {{"elements", elements}}, {}, true}, [&] {
      return seconds_together(1, [&](int) {
        for (int i = 0; i < kCalls; ++i) {
          const void* source = gradient.next(count * kWireBytes);
          block_square_sums({{&source, 1}, 1, DType::bf16}, count, sums);
        }
      });
    })};
  }
};

class SourcesProbe final : public Probe {
 public:
  std::string key() const override { return "host.sources"; }
  std::string method() const override {
    return "adam_update with 1, 2 and 4 bf16 sources in turn, one thread; the cost of a further source is (t4 - t1) / "
           "3, its rate that source's bytes over it";
  }
  std::optional<std::string> waived(const ProbeContext& context) const override { return too_little_memory(context); }

  std::vector<Measurement> run(const ProbeContext& context) const override {
    StatePool pool(context.state_memory(), kMostSources);
    StateSlice slice(pool, 0, 1);
    std::vector<Measurement> points;
    for (int sources : kSources) {
      points.push_back({"seconds", "s", {{"sources", sources}, {"elements", chunks_elements(slice)}}, {}, true});
    }
    // One after another in each repeat over the same memory, which the caches have lost meanwhile: drift and the place
    // hit all alike, and differences stay clean.
    return context.harness(1, 1.2).measure(std::move(points), [&] {
      std::vector<double> seconds;
      const int64_t position = slice.position();
      for (int sources : kSources) {
        slice.seek(position);
        seconds.push_back(seconds_of_chunks(slice, sources, UpdatePart::whole));
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
