// Copies between host and device memory: alone, both directions at once, all ranks at once.
#include <algorithm>
#include <limits>
#include <optional>

#include "model/base/format.h"
#include "profiler/copier.h"
#include "profiler/probe.h"
#include "runtime/device/backends.h"

namespace slidedp {
namespace {

constexpr int64_t kKiB = 1024, kMiB = 1024 * kKiB, kGiB = 1024 * kMiB;

std::optional<std::string> too_little_memory(const ProbeContext& context) {
  if (context.rolling_bytes / (4 * context.ranks) >= kMiB) return std::nullopt;
  return fmt::format("only {} of memory may be used", format_bytes(context.rolling_bytes));
}

// From the first start to the last end of all copiers, each copying `pieces` times `bytes`.
double run_together(std::span<const std::unique_ptr<Copier>> copiers, int64_t bytes, int pieces) {
  for (const auto& copier : copiers) copier->issue(bytes, pieces);
  double first = std::numeric_limits<double>::infinity(), last = 0;
  for (const auto& copier : copiers) {
    copier->lane().finish();
    first = std::min(first, copier->lane().start_s());
    last = std::max(last, copier->lane().end_s());
  }
  return last - first;
}

class CopyAloneProbe final : public Probe {
 public:
  explicit CopyAloneProbe(Direction direction) : h2d_(direction == Direction::h2d) {}
  std::string key() const override { return h2d_ ? "copy.h2d" : "copy.d2h"; }
  std::string method() const override {
    return std::string(h2d_ ? "Device::copy_to_device from" : "Device::copy_to_host to") +
           " registered rolling host memory, one rank alone, by size; latency and rate are fitted";
  }
  std::optional<std::string> waived(const ProbeContext& context) const override { return too_little_memory(context); }

  std::vector<Measurement> run(const ProbeContext& context) const override {
    std::vector<int64_t> sizes{64 * kKiB, 256 * kKiB, kMiB, 4 * kMiB, 16 * kMiB, 64 * kMiB};
    if (!context.quick) sizes.insert(sizes.end(), {256 * kMiB, kGiB});
    std::erase_if(sizes, [&](int64_t bytes) { return bytes > context.rolling_bytes / 4; });
    Backend backend = make_backend(context.backend, 1);
    Copier copier(*backend.devices.front(), h2d_ ? Direction::h2d : Direction::d2h, context.rolling_bytes,
                  sizes.back());
    const Harness harness = context.harness(static_cast<int>(sizes.size()));
    std::vector<Measurement> result;
    for (int64_t bytes : sizes) {
      result.push_back(harness.measure({"seconds", "s", {{"bytes", static_cast<double>(bytes)}}, {}, true}, [&] {
        copier.issue(bytes, 1);
        copier.lane().finish();
        return copier.lane().seconds();
      }));
    }
    return result;
  }

 private:
  bool h2d_;
};

// Large copies in a row, so that lanes overlap for nearly all of the time.
struct Burst {
  int64_t bytes;  // of one copy
  int pieces;
  // A device starts its lanes one after another, some 10 us apart: its bursts take milliseconds.
  Burst(const ProbeContext& context, int lanes)
      : bytes(std::min(context.rolling_bytes / lanes / 2, (context.on_host() ? (context.quick ? 16 : 32) : 64) * kMiB)),
        pieces(context.on_host() ? 4 : 8) {}
  double total() const { return static_cast<double>(bytes) * pieces; }
};

class DuplexProbe final : public Probe {
 public:
  std::string key() const override { return "copy.duplex"; }
  std::string method() const override {
    return "large copies in both directions at once on two streams of one rank; sum of both directions' rates while "
           "both run";
  }
  std::optional<std::string> waived(const ProbeContext& context) const override { return too_little_memory(context); }

  std::vector<Measurement> run(const ProbeContext& context) const override {
    const Burst burst(context, 2);
    Backend backend = make_backend(context.backend, 1);
    Device& device = *backend.devices.front();
    std::vector<std::unique_ptr<Copier>> copiers;
    for (Direction direction : {Direction::h2d, Direction::d2h}) {
      copiers.push_back(std::make_unique<Copier>(device, direction, context.rolling_bytes / 2, burst.bytes));
    }
    return {context.harness(1).measure({"seconds", "s", {{"bytes", 2 * burst.total()}}, {}, true},
                                       [&] { return 2 * burst.total() / duplex_rate(copiers, burst); })};
  }

 private:
  // Bytes/s while both run.
  static double duplex_rate(std::span<const std::unique_ptr<Copier>> copiers, const Burst& burst) {
    return first_overlap("copy.duplex: copies", [&]() -> std::optional<double> {
      for (const auto& copier : copiers) copier->issue_marked(burst.bytes, burst.pieces);
      std::vector<ProgressCurve> curves;
      for (const auto& copier : copiers) {
        copier->lane().finish();
        curves.push_back(copier->curve());
      }
      const Window window = common_window(curves);
      if (window.empty()) return std::nullopt;
      return summed_rate(curves, window);
    });
  }
};

class RootProbe final : public Probe {
 public:
  std::string key() const override { return "copy.root"; }
  std::string method() const override {
    return "large copies of all ranks at once in one direction, then the other; sum over ranks over the time until the "
           "last ends";
  }
  std::optional<std::string> waived(const ProbeContext& context) const override { return too_little_memory(context); }

  std::vector<Measurement> run(const ProbeContext& context) const override {
    const Burst burst(context, context.ranks);
    const Harness harness = context.harness(2);
    Backend backend = make_backend(context.backend, context.ranks);
    std::vector<Measurement> result;
    for (Direction direction : {Direction::h2d, Direction::d2h}) {
      std::vector<std::unique_ptr<Copier>> copiers;
      for (const auto& device : backend.devices) {
        copiers.push_back(
            std::make_unique<Copier>(*device, direction, context.rolling_bytes / context.ranks, burst.bytes));
      }
      const double bytes = burst.total() * context.ranks;
      result.push_back(harness.measure(
          {direction == Direction::h2d ? "h2d" : "d2h", "s", {{"bytes", bytes}, {"ranks", context.ranks}}, {}, true},
          [&] { return run_together(copiers, burst.bytes, burst.pieces); }));
    }
    return result;
  }
};

}  // namespace

std::unique_ptr<Probe> make_copy_h2d() { return std::make_unique<CopyAloneProbe>(Direction::h2d); }
std::unique_ptr<Probe> make_copy_d2h() { return std::make_unique<CopyAloneProbe>(Direction::d2h); }
std::unique_ptr<Probe> make_copy_duplex() { return std::make_unique<DuplexProbe>(); }
std::unique_ptr<Probe> make_copy_root() { return std::make_unique<RootProbe>(); }

}  // namespace slidedp
