// Host DRAM as the cores see it.
#include <algorithm>
#include <atomic>
#include <functional>

#include "model/base/format.h"
#include "profiler/adam_slice.h"
#include "profiler/probe.h"
#include "profiler/rolling.h"
#include "profiler/stream_team.h"
#include "profiler/streams.h"

namespace slidedp {
namespace {

constexpr int64_t kMiB = int64_t{1} << 20;
constexpr int64_t kLine = 16;          // floats of a cache line
constexpr int64_t kGap = 17 * kLine;   // between arrays, so that none lies at the same place of its page as another
constexpr int64_t kMostFloats = kMiB;  // of one array in one call

// One worker's part of the buffer, gone through round and round from somewhere inside.
class Part {
 public:
  Part(const RollingBuffer& buffer, int worker, int workers)
      : floats_(buffer.bytes() / 4 / workers / kLine * kLine),
        begin_(static_cast<float*>(buffer.data()) + worker * floats_),
        rounds_(floats_, staggered(worker, floats_) / kLine * kLine) {}
  // Floats of each of so many arrays that one call takes.
  int64_t count(int arrays) const { return std::min(kMostFloats, (floats_ / arrays - kGap) / kLine * kLine); }
  // The first of them; each begins count() + kGap after the one before.
  float* next(int arrays) { return begin_ + rounds_.next(arrays * (count(arrays) + kGap)); }

 private:
  int64_t floats_;
  float* begin_;
  Rounds rounds_;
};

// What is done with arrays that lie `step` floats apart.
struct Stream {
  const char* name;
  int arrays;
  int64_t bytes;  // a float
  std::function<void(float* first, int64_t step, int64_t count)> work;
};

class DramProbe final : public Probe {
 public:
  std::string key() const override { return "host.dram"; }
  std::string method() const override {
    return "sums an array (read: 4 B a float), copies (8 B), computes a = b + 3c (triad: 12 B) and a = -a (in_place: 8 "
           "B; write-allocate not counted), by number of threads, each tied to a core, on through parts of at least 4 "
           "GiB in all or eight times the last-level cache (--quick: 1 GiB, which a large cache may hold in part); sum "
           "of the threads' rates in a window in which all run; copy and fewer threads for the record";
  }

  std::optional<std::string> waived(const ProbeContext& context) const override {
    if (context.rolling_bytes / context.cores >= kMiB) return std::nullopt;
    return fmt::format("only {} of memory may be used", format_bytes(context.rolling_bytes));
  }

  std::vector<Measurement> run(const ProbeContext& context) const override {
    const RollingBuffer buffer(context.rolling_bytes, "the DRAM probe's arrays");
    std::atomic<uint64_t> sink = 0;  // the sums are used, so the loop stays
    const std::vector<Stream> streams{
        {"read", 1, 4, [&](float* a, int64_t, int64_t count) { sink += streams::read(a, count); }},
        {"copy", 2, 8, [](float* a, int64_t step, int64_t count) { streams::copy(a, a + step, count); }},
        {"triad", 3, 12,
         [](float* a, int64_t step, int64_t count) { streams::triad(a, a + step, a + 2 * step, count); }},
        {"in_place", 1, 8, [](float* a, int64_t, int64_t count) { streams::negate(a, count); }}};
    const std::vector<int> teams = thread_counts(context);
    const Harness harness = context.warm_harness(static_cast<int>(streams.size() * teams.size()));
    std::vector<Measurement> result;
    for (const int threads : teams) {
      std::vector<Part> parts;
      for (int i = 0; i < threads; ++i) parts.emplace_back(buffer, i, threads);
      WorkerCores cores(threads, 0);
      for (const Stream& stream : streams) {
        const int64_t count = parts.front().count(stream.arrays);
        const auto bytes = static_cast<double>(stream.bytes * count);
        const StreamWork work = [&](int worker) {
          stream.work(parts[static_cast<size_t>(worker)].next(stream.arrays), count + kGap, count);
          return bytes;
        };
        const double each = bytes * threads;
        result.push_back(harness.measure({stream.name, "s", {{"threads", threads}, {"bytes", each}}, {}, true}, [&] {
          cores.turn();
          return each / rate_together(threads, cores, context.window_s(), work);
        }));
      }
    }
    return result;
  }
};

}  // namespace

std::unique_ptr<Probe> make_host_dram() { return std::make_unique<DramProbe>(); }

}  // namespace slidedp
