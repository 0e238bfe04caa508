// Host DRAM as the cores see it.
#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <functional>

#include "model/base/format.h"
#include "profiler/adam_slice.h"
#include "profiler/probe.h"
#include "profiler/rolling.h"

namespace slidedp {
namespace {

// Eight independent sums, so that the loop is bound by loads and not by the latency of an addition.
uint64_t sum_words(const uint64_t* words, int64_t count) {
  std::array<uint64_t, 8> sums{};
  for (int64_t i = 0; i + 8 <= count; i += 8) {
    for (int64_t j = 0; j < 8; ++j) sums[static_cast<size_t>(j)] += words[i + j];
  }
  uint64_t total = 0;
  for (uint64_t sum : sums) total += sum;
  return total;
}

void triad(float* __restrict out, const float* __restrict a, const float* __restrict b, int64_t count) {
  for (int64_t i = 0; i < count; ++i) out[i] = a[i] + 3.0f * b[i];
}

void copy_floats(float* __restrict out, const float* __restrict a, int64_t count) {
  std::memcpy(out, a, static_cast<size_t>(count) * sizeof(float));
}

class DramProbe final : public Probe {
 public:
  std::string key() const override { return "host.dram"; }
  std::string method() const override {
    return "sums one array (read: 8 B a word), copies (8 B a float) and computes a = b + 3c (triad: 12 B a float; "
           "write-allocate not counted), by number of threads, each tied to a core; every repeat goes on where the "
           "last one ended, through at least 1 GiB or twice the last-level cache (--quick: 512 MiB, which a large "
           "cache may hold)";
  }

  std::optional<std::string> waived(const ProbeContext& context) const override {
    if (context.rolling_bytes >= (int64_t{3} << 20)) return std::nullopt;
    return fmt::format("only {} of memory may be used", format_bytes(context.rolling_bytes));
  }

  std::vector<Measurement> run(const ProbeContext& context) const override {
    Parts parts(context);
    const std::vector<int> teams = thread_counts(context);
    const Harness harness = context.harness(3 * static_cast<int>(teams.size()), 1.2);
    std::vector<Measurement> result;
    for (const int threads : teams) {
      const WorkerCores cores(threads, 0);
      const auto measure = [&](const char* name, int64_t bytes_a_worker, const std::function<void(float*)>& work) {
        const double bytes = static_cast<double>(bytes_a_worker) * threads;
        result.push_back(harness.measure({name, "s", {{"threads", threads}, {"bytes", bytes}}, {}, true}, [&] {
          const int64_t first = parts.take(threads);
          return seconds_together(
              threads, [&](int worker) { work(parts.at(first + worker)); }, [&](int worker) { cores.take(worker); });
        }));
      };
      // A third of a part for each of triad's arrays, a half for a copy's.
      const int64_t third = parts.floats() / 48 * 16, half = parts.floats() / 32 * 16;
      measure("read", parts.floats() / 16 * 64, [&](float* part) {
        sink_ = sink_ + sum_words(reinterpret_cast<const uint64_t*>(part), parts.floats() / 16 * 8);
      });
      measure("copy", half * 8, [&](float* part) { copy_floats(part, part + half, half); });
      measure("triad", third * 12, [&](float* part) { triad(part, part + third, part + 2 * third, third); });
    }
    return result;
  }

 private:
  // One buffer in as many parts as there are cores, handed out round and round.
  class Parts {
   public:
    explicit Parts(const ProbeContext& context)
        : buffer_(context.rolling_bytes, "the DRAM probe's arrays"), count_(context.cores) {}
    int64_t floats() const { return buffer_.bytes() / count_ / 256 * 64; }
    int64_t take(int parts) {
      const int64_t first = next_;
      next_ = (next_ + parts) % count_;
      return first;
    }
    float* at(int64_t part) const { return static_cast<float*>(buffer_.data()) + part % count_ * floats(); }

   private:
    RollingBuffer buffer_;
    int count_;
    int64_t next_ = 0;
  };

  mutable std::atomic<uint64_t> sink_ = 0;  // the sums are used, so the loop stays
};

}  // namespace

std::unique_ptr<Probe> make_host_dram() { return std::make_unique<DramProbe>(); }

}  // namespace slidedp
