#include "runtime/run/run_report.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "model/base/format.h"
#include "model/timeline/comparison.h"

namespace slidedp {
namespace {

constexpr int64_t kWarmUpSteps = 2;
constexpr size_t kKeptSteps = 64;

// The task kind whose busy time differs most between prediction and measurement, per step.
std::string largest_difference(const StepGraph& graph, const Simulation& predicted, const MeasuredSteps& measured) {
  const auto expected = totals_by_kind(graph, predicted.timeline);
  std::array<double, kTaskKinds> busy{};
  for (const Timeline& timeline : measured.timelines()) {
    const auto totals = totals_by_kind(graph, timeline);
    for (size_t kind = 0; kind < busy.size(); ++kind) busy[kind] += totals[kind].busy_s;
  }
  size_t worst = 0;
  double worst_difference = -1;
  for (size_t kind = 0; kind < busy.size(); ++kind) {
    busy[kind] /= static_cast<double>(measured.timelines().size());
    const double difference = std::abs(busy[kind] - expected[kind].busy_s);
    if (difference > worst_difference) {
      worst = kind;
      worst_difference = difference;
    }
  }
  return fmt::format("The largest difference is in {}: {} busy a step over all ranks, predicted {}.",
                     name(static_cast<TaskKind>(worst)), format_seconds(busy[worst]),
                     format_seconds(expected[worst].busy_s));
}

std::string time_section(const StepGraph& graph, const Simulation& predicted, const MeasuredSteps& measured) {
  if (measured.empty()) {
    return fmt::format("Predicted step time: {}. Too few steps to compare: the first two are warm-up.\n",
                       format_seconds(predicted.step.seconds));
  }
  const double median = measured.median().seconds;
  const std::vector<Timeline> expected{predicted.timeline};
  return fmt::format(
      "Step time: predicted {}, measured {} (median of {} steps from the third on), {:+.1f} % against the prediction. "
      "Predicted bottleneck: {}. {}\n\n```\n{}```\n",
      format_seconds(predicted.step.seconds), format_seconds(median), measured.steps(),
      100 * (median / predicted.step.seconds - 1), predicted.bottleneck, largest_difference(graph, predicted, measured),
      comparison_table({graph, expected}, {graph, measured.timelines()}));
}

}  // namespace

void MeasuredSteps::add(const Timeline& timeline) {
  if (++seen_ <= kWarmUpSteps) return;
  seconds_.push_back(timeline.step_s);
  if (kept_.size() == kKeptSteps) kept_.erase(kept_.begin());
  kept_.push_back(timeline);
}

MeasuredSeconds MeasuredSteps::median() const {
  std::vector<double> seconds = seconds_;
  std::sort(seconds.begin(), seconds.end());
  const size_t middle = seconds.size() / 2;
  return {seconds.size() % 2 != 0 ? seconds[middle] : (seconds[middle - 1] + seconds[middle]) / 2};
}

std::string run_report(const StepGraph& graph, const Simulation& predicted, const MeasuredSteps& measured,
                       const MemoryTable& planned, const MemoryPeaks& peaks, double steal_share) {
  // Below a hundredth it explains nothing.
  const std::string steal =
      steal_share < 0.01 ? ""
                         : fmt::format(
                               "\nOther guests of this virtual machine's host took {:.0f} % of the CPU time that "
                               "this machine wanted during training; the prediction knows nothing of that.\n",
                               100 * steal_share);
  const std::string whole_device =
      peaks.device_used == 0 ? ""
                             : fmt::format("| whole device, with context and other processes | {} | {} |\n",
                                           format_bytes(peaks.device_planned), format_bytes(peaks.device_used));
  return fmt::format(
      "# Run report\n\n## Time\n\n{}{}\n## Memory\n\n"
      "| what | planned | measured peak |\n| --- | --- | --- |\n"
      "| device buffers, one rank | {} | {} |\n| temporaries, all ranks | {} | {} |\n{}",
      time_section(graph, predicted, measured), steal, format_bytes(planned.device_buffer_bytes),
      format_bytes(peaks.device_buffers), format_bytes(planned.temporary_bytes * graph.ranks()),
      format_bytes(peaks.temporaries), whole_device);
}

}  // namespace slidedp
