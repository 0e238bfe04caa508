// Host DRAM as the cores see it.
#include <algorithm>
#include <array>
#include <set>

#include "model/base/format.h"
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

class DramProbe final : public Probe {
 public:
  std::string key() const override { return "host.dram"; }
  std::string method() const override {
    return "sums one array (read: 8 B a word) and computes a = b + 3c over three (triad: 12 B a float, write-allocate "
           "not "
           "counted), with one thread and with all cores, over at least 1 GiB or twice the last-level cache (--quick: "
           "512 MiB, which a large cache may hold)";
  }

  std::optional<std::string> waived(const ProbeContext& context) const override {
    if (context.rolling_bytes >= (int64_t{3} << 20)) return std::nullopt;
    return fmt::format("only {} of memory may be used", format_bytes(context.rolling_bytes));
  }

  std::vector<Measurement> run(const ProbeContext& context) const override {
    RollingBuffer buffer(context.rolling_bytes, "the DRAM probe's arrays");
    const std::set<int> team_sizes{1, context.cores};
    const Harness harness = context.harness(2 * static_cast<int>(team_sizes.size()));
    std::vector<Measurement> result;
    for (int threads : team_sizes) {
      const double bytes = static_cast<double>(part_words(buffer, threads) * threads * 8);
      result.push_back(harness.measure({"read", "s", {{"threads", threads}, {"bytes", bytes}}, {}, true},
                                       [&] { return read_once(buffer, threads); }));
      const double triad_bytes = static_cast<double>(part_floats(buffer, threads) * threads * 12);
      result.push_back(harness.measure({"triad", "s", {{"threads", threads}, {"bytes", triad_bytes}}, {}, true},
                                       [&] { return triad_once(buffer, threads); }));
    }
    return result;
  }

 private:
  static int64_t part_words(const RollingBuffer& buffer, int threads) { return buffer.bytes() / threads / 64 * 8; }
  static int64_t part_floats(const RollingBuffer& buffer, int threads) {
    return buffer.bytes() / 3 / threads / 64 * 16;
  }

  static double read_once(const RollingBuffer& buffer, int threads) {
    const int64_t words = part_words(buffer, threads);
    const auto* data = static_cast<const uint64_t*>(buffer.data());
    std::vector<uint64_t> sums(static_cast<size_t>(threads));
    const double seconds = seconds_together(
        threads, [&](int worker) { sums[static_cast<size_t>(worker)] = sum_words(data + worker * words, words); });
    volatile uint64_t sink = 0;  // the sums are used, so the loop stays
    for (uint64_t sum : sums) sink = sink + sum;
    return seconds;
  }

  static double triad_once(const RollingBuffer& buffer, int threads) {
    const int64_t floats = part_floats(buffer, threads);
    auto* data = static_cast<float*>(buffer.data());
    return seconds_together(threads, [&](int worker) {
      float* out = data + worker * 3 * floats;
      triad(out, out + floats, out + 2 * floats, floats);
    });
  }
};

}  // namespace

std::unique_ptr<Probe> make_host_dram() { return std::make_unique<DramProbe>(); }

}  // namespace slidedp
