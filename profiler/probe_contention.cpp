// Copies beside the CPU optimizer: what each loses to the other.
#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <latch>
#include <limits>
#include <thread>

#include "model/base/format.h"
#include "model/calibration/contention_fit.h"
#include "profiler/adam_slice.h"
#include "profiler/copier.h"
#include "profiler/probe.h"
#include "profiler/progress_curve.h"
#include "runtime/device/backends.h"
#include "runtime/device/clock.h"

namespace slidedp {
namespace {

constexpr int64_t kMiB = int64_t{1} << 20;
constexpr double kGiga = 1e9;

// The update workers of a plan for one rank: its launching thread and the program itself keep a core.
int planned_threads(const ProbeContext& context) { return std::max(1, context.cores - 2); }

// Update workers that run from construction until finish().
class AdamTeam {
 public:
  AdamTeam(std::vector<StateSlice>& slices, int64_t elements) : curves_(slices.size()), started_(slices.size() + 1) {
    for (size_t i = 0; i < slices.size(); ++i) {
      team_.emplace_back([this, &slice = slices[i], &curve = curves_[i], elements] { work(slice, curve, elements); });
    }
    started_.arrive_and_wait();
  }
  ~AdamTeam() { stop_ = true; }
  AdamTeam(const AdamTeam&) = delete;
  AdamTeam& operator=(const AdamTeam&) = delete;

  // Bytes moved by each worker, from before the constructor returned until after this call.
  std::vector<ProgressCurve> finish() {
    stop_ = true;
    team_.clear();
    return std::move(curves_);
  }

 private:
  void work(StateSlice& slice, ProgressCurve& curve, int64_t elements) {
    slice.update(elements, 1);
    double bytes = 0;
    curve.push_back({process_seconds(), bytes});
    started_.arrive_and_wait();
    do {  // once at least, so that the curve ends after the stop
      slice.update(elements, 1);
      curve.push_back({process_seconds(), bytes += static_cast<double>(elements) * kAdamBytes});
    } while (!stop_);
  }

  std::atomic<bool> stop_ = false;
  std::vector<ProgressCurve> curves_;
  std::latch started_;
  std::vector<std::jthread> team_;  // last: joined before the rest goes
};

// One rank's two copy lanes and the update workers' memory.
class Bench {
 public:
  explicit Bench(const ProbeContext& context)
      : piece_(std::min((context.on_host() ? 16 : 64) * kMiB, context.rolling_bytes / 4)),
        window_s_(context.probe_seconds / 12),  // four situations, three repeats of each at least
        backend_(make_backend(context.backend, 1, 0)),
        elements_(slice_elements(context, planned_threads(context), 1)) {
    for (const Direction direction : {Direction::h2d, Direction::d2h}) {
      copiers_.push_back(
          std::make_unique<Copier>(*backend_.devices.front(), direction, context.rolling_bytes / 2, piece_));
      Copier& copier = *copiers_.back();
      constexpr int kTried = 2;
      double seconds = 0;
      for (int i = 0; i < 2; ++i) {  // the first time warms up
        copier.issue(piece_, kTried);
        copier.lane().finish();
        seconds = copier.lane().seconds();
      }
      pieces_.push_back(static_cast<int>(std::clamp(window_s_ / (seconds / kTried), 4.0, 1000.0)));
    }
    for (int i = 0; i < planned_threads(context); ++i) slices_.emplace_back(elements_, 1);
  }

  // Rates while all that shall run does.
  TogetherRates run(bool h2d, bool d2h) {
    const std::array<bool, 2> wanted{h2d, d2h};
    AdamTeam team(slices_, std::min(kElementsPerCall, elements_));
    for (size_t i = 0; i < 2; ++i) {
      if (wanted[i]) copiers_[i]->issue_marked(piece_, pieces_[i]);
    }
    std::array<ProgressCurve, 2> copied;
    for (size_t i = 0; i < 2; ++i) {
      if (!wanted[i]) continue;
      copiers_[i]->lane().finish();
      copied[i] = copiers_[i]->curve();
    }
    if (!h2d && !d2h) std::this_thread::sleep_for(std::chrono::duration<double>(window_s_));
    const std::vector<ProgressCurve> updated = team.finish();

    double begin = 0, end = std::numeric_limits<double>::infinity();
    const auto narrow = [&](const ProgressCurve& curve) {
      if (curve.empty()) return;
      begin = std::max(begin, curve.front().seconds);
      end = std::min(end, curve.back().seconds);
    };
    std::for_each(copied.begin(), copied.end(), narrow);
    std::for_each(updated.begin(), updated.end(), narrow);
    TogetherRates rates;
    if (h2d) rates.h2d_gbps = rate_between(copied[0], begin, end) / kGiga;
    if (d2h) rates.d2h_gbps = rate_between(copied[1], begin, end) / kGiga;
    for (const ProgressCurve& curve : updated) rates.adam_gbps += rate_between(curve, begin, end) / kGiga;
    return rates;
  }

 private:
  int64_t piece_;
  double window_s_;
  Backend backend_;
  int64_t elements_;  // of each worker's slice
  std::vector<std::unique_ptr<Copier>> copiers_;
  std::vector<int> pieces_;
  std::vector<StateSlice> slices_;
};

class ContentionProbe final : public Probe {
 public:
  std::string key() const override { return "host.contention"; }
  std::string method() const override {
    return "adam_update by the planned number of threads beside large copies of one rank: none, each direction, both; "
           "rates (Adam: 26 B an element) while all run; what each loses to the others is fitted";
  }
  std::optional<std::string> waived(const ProbeContext& context) const override {
    // Copies of CPU ranks are work of the cores; the caps of the cores and of the memory controller cover them.
    if (context.on_host()) return "CPU ranks have no copy engines that work beside the cores";
    if (context.rolling_bytes / 4 < kMiB || slice_elements(context, planned_threads(context), 1) < kBlockElements) {
      return fmt::format("only {} of memory may be used", format_bytes(context.rolling_bytes));
    }
    return std::nullopt;
  }

  std::vector<Measurement> run(const ProbeContext& context) const override {
    Bench bench(context);
    const Harness harness = context.harness(static_cast<int>(kSituations.size()));
    std::vector<Measurement> result;
    for (const auto& [h2d, d2h] : kSituations) {
      std::vector<Measurement> points;
      const auto add = [&, h2d = h2d, d2h = d2h](bool runs, const char* name) {
        if (!runs) return;
        points.push_back({name, "GB/s", parameters(h2d, d2h), {}, true});
        points.back().parameters["threads"] = planned_threads(context);
      };
      add(h2d, "h2d");
      add(d2h, "d2h");
      add(true, "adam");
      points = harness.measure(std::move(points), [&, h2d = h2d, d2h = d2h] {
        const TogetherRates rates = bench.run(h2d, d2h);
        std::vector<double> values;
        if (h2d) values.push_back(rates.h2d_gbps);
        if (d2h) values.push_back(rates.d2h_gbps);
        values.push_back(rates.adam_gbps);
        return values;
      });
      std::move(points.begin(), points.end(), std::back_inserter(result));
    }
    return result;
  }

 private:
  // {h2d, d2h}; Adam always runs. Alone it is for the record: its cap comes from host.adam.
  static constexpr std::array<std::pair<bool, bool>, 4> kSituations{
      {{false, false}, {true, false}, {false, true}, {true, true}}};

  static std::map<std::string, double> parameters(bool h2d, bool d2h) {
    return {{"h2d", h2d ? 1.0 : 0.0}, {"d2h", d2h ? 1.0 : 0.0}};
  }
};

}  // namespace

std::unique_ptr<Probe> make_host_contention() { return std::make_unique<ContentionProbe>(); }

}  // namespace slidedp
