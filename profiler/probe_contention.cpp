// Copies beside the CPU optimizer: what each loses to the other.
#include <algorithm>
#include <array>
#include <chrono>
#include <iterator>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <thread>

#include "model/base/format.h"
#include "model/calibration/contention_fit.h"
#include "profiler/adam_slice.h"
#include "profiler/copier.h"
#include "profiler/probe.h"
#include "profiler/stream_team.h"
#include "runtime/device/backends.h"

namespace slidedp {
namespace {

constexpr int64_t kMiB = int64_t{1} << 20;
constexpr double kGiga = 1e9;

// What runs at once, and the parameters that a sample is stored under.
struct Situation {
  Together running;
  std::vector<Measurement> points() const {
    std::vector<Measurement> result;
    const auto add = [&](bool runs, const char* name) {
      if (!runs) return;
      result.push_back({name,
                        "GB/s",
                        {{"h2d", running.h2d ? 1.0 : 0.0},
                         {"d2h", running.d2h ? 1.0 : 0.0},
                         {"threads", static_cast<double>(running.adam_threads)}},
                        {},
                        true});
    };
    add(running.h2d, "h2d");
    add(running.d2h, "d2h");
    add(running.adam_threads > 0, "adam");
    return result;
  }
  std::vector<double> values(const TogetherRates& rates) const {
    std::vector<double> result;
    if (running.h2d) result.push_back(rates.h2d_gbps);
    if (running.d2h) result.push_back(rates.d2h_gbps);
    if (running.adam_threads > 0) result.push_back(rates.adam_gbps);
    return result;
  }
};

// Copies alone, Adam alone and both, with a third, two thirds and all of the planned threads.
std::vector<Situation> situations(const ProbeContext& context) {
  const int planned = planned_threads(context);
  std::set<int> teams{0, planned};
  if (!context.quick) teams.insert({(planned + 2) / 3, (2 * planned + 2) / 3});
  std::vector<Situation> result;
  for (const int threads : teams) {
    for (const auto& [h2d, d2h] : {std::pair(false, false), {true, false}, {false, true}, {true, true}}) {
      if (threads > 0 || h2d || d2h) result.push_back({{h2d, d2h, threads}});
    }
  }
  return result;
}

// One rank's two copy lanes and the update workers' memory.
class Bench {
 public:
  Bench(const ProbeContext& context, double window_s)
      : piece_(std::min((context.on_host() ? 16 : 32) * kMiB, context.rolling_bytes / 4)),
        window_s_(window_s),
        backend_(make_backend(context.backend, 1)),
        pool_(context.state_memory(), 1) {
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
    for (const Situation& situation : situations(context)) {
      const int threads = situation.running.adam_threads;
      cores_.try_emplace(threads, threads, /*others=*/1);
      if (threads > 0) slices_.try_emplace(threads, slices_of(pool_, threads));
    }
  }

  // Rates while all that shall run does.
  TogetherRates run(const Together& running) {
    return first_overlap("host.contention: copies and updates", [&] { return attempt(running); });
  }

 private:
  // Nothing if the time in which all of it runs is empty.
  std::optional<TogetherRates> attempt(const Together& running) {
    const std::array<bool, 2> wanted{running.h2d, running.d2h};
    // Bytes moved.
    const StreamWork update = [&](int worker) {
      return kAdamBytes * static_cast<double>(slices_.at(running.adam_threads)[static_cast<size_t>(worker)].update(1));
    };
    const WorkerCores& cores = cores_.at(running.adam_threads);
    std::optional<StreamTeam> team;
    if (running.adam_threads > 0) team.emplace(running.adam_threads, cores, update);
    for (size_t i = 0; i < 2; ++i) {
      if (wanted[i]) copiers_[i]->issue_marked(piece_, pieces_[i]);
    }
    std::vector<ProgressCurve> curves;
    for (size_t i = 0; i < 2; ++i) {
      if (!wanted[i]) continue;
      copiers_[i]->lane().finish();
      curves.push_back(copiers_[i]->curve());
    }
    if (curves.empty()) std::this_thread::sleep_for(std::chrono::duration<double>(window_s_));
    const size_t copied = curves.size();
    if (team) {
      std::vector<ProgressCurve> updated = team->finish();
      std::move(updated.begin(), updated.end(), std::back_inserter(curves));
    }
    const Window window = common_window(curves);
    if (window.empty()) return std::nullopt;
    TogetherRates rates;
    if (running.h2d) rates.h2d_gbps = rate_in(curves.front(), window) / kGiga;
    if (running.d2h) rates.d2h_gbps = rate_in(curves[copied - 1], window) / kGiga;
    rates.adam_gbps = summed_rate(std::span(curves).subspan(copied), window) / kGiga;
    return rates;
  }

  int64_t piece_;
  double window_s_;
  Backend backend_;
  StatePool pool_;
  std::vector<std::unique_ptr<Copier>> copiers_;
  std::vector<int> pieces_;
  // By the number of threads.
  std::map<int, std::vector<StateSlice>> slices_;  // each over the whole pool
  std::map<int, WorkerCores> cores_;
};

class ContentionProbe final : public Probe {
 public:
  std::string key() const override { return "host.contention"; }
  std::string method() const override {
    return "adam_update by no, some and the planned number of threads beside large copies of one rank in no, each and "
           "both directions, all situations in turn; rates (Adam: 26 B an element) while all run; how much longer each "
           "takes beside the others is fitted";
  }
  std::optional<std::string> waived(const ProbeContext& context) const override {
    // Copies of CPU ranks are work of the cores; the caps of the cores and of the memory controller cover them.
    if (context.on_host()) return "CPU ranks have no copy engines that work beside the cores";
    if (context.rolling_bytes / 4 < kMiB ||
        StatePool::elements_in(context.state_memory(), 1) / planned_threads(context) < kBlockElements) {
      return fmt::format("only {} of memory may be used", format_bytes(context.rolling_bytes));
    }
    return std::nullopt;
  }

  // One repeat is a round through all situations, so that what changes with time changes all of them alike.
  std::vector<Measurement> run(const ProbeContext& context) const override {
    const std::vector<Situation> all = situations(context);
    constexpr int kFewest = 4;  // a warm-up and three repeats
    const double round_s = context.probe_seconds * kTimeShare / context.rounds / kFewest;
    Bench bench(context, round_s / static_cast<double>(all.size()));
    std::vector<Measurement> points;
    for (const Situation& situation : all) {
      std::vector<Measurement> some = situation.points();
      std::move(some.begin(), some.end(), std::back_inserter(points));
    }
    return context.harness(1, kTimeShare).measure(std::move(points), [&] {
      std::vector<double> values;
      for (const Situation& situation : all) {
        const std::vector<double> some = situation.values(bench.run(situation.running));
        values.insert(values.end(), some.begin(), some.end());
      }
      return values;
    });
  }

 private:
  // The most important input of the model for a machine whose host is busy.
  static constexpr double kTimeShare = 5;
};

}  // namespace

std::unique_ptr<Probe> make_host_contention() { return std::make_unique<ContentionProbe>(); }

}  // namespace slidedp
