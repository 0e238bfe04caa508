#include "model/timeline/comparison.h"

#include <array>
#include <vector>

#include "model/base/format.h"

namespace slidedp {
namespace {

struct MeanTotals {
  struct Kind {
    double count = 0, busy_s = 0, exposed_s = 0;
  };
  std::array<Kind, kTaskKinds> kinds{};
  Kind sum;
  double step_s = 0;
};

MeanTotals mean_totals(const StepSet& set) {
  MeanTotals mean;
  const auto steps = static_cast<double>(set.timelines.size());
  for (const Timeline& timeline : set.timelines) {
    const std::array<KindTotals, kTaskKinds> totals = totals_by_kind(set.graph, timeline);
    for (size_t kind = 0; kind < totals.size(); ++kind) {
      const double count = static_cast<double>(totals[kind].count) / steps;
      const double busy_s = totals[kind].busy_s / steps, exposed_s = totals[kind].exposed_s / steps;
      for (MeanTotals::Kind* row : {&mean.kinds[kind], &mean.sum}) {
        row->count += count;
        row->busy_s += busy_s;
        row->exposed_s += exposed_s;
      }
    }
    mean.step_s += timeline.step_s / steps;
  }
  return mean;
}

std::string row(std::string_view title, const MeanTotals::Kind& predicted, const MeanTotals::Kind& measured) {
  return fmt::format("{:<16}{:>8.6g}{:>16}{:>16}{:>18}{:>18}\n", title, measured.count,
                     format_seconds(predicted.busy_s), format_seconds(measured.busy_s),
                     format_seconds(predicted.exposed_s), format_seconds(measured.exposed_s));
}

}  // namespace

std::string comparison_table(const StepSet& predicted, const StepSet& measured) {
  const MeanTotals expected = mean_totals(predicted), found = mean_totals(measured);
  std::string text = fmt::format("{:<16}{:>8}{:>16}{:>16}{:>18}{:>18}\n", "kind", "count", "predicted busy",
                                 "measured busy", "predicted exposed", "measured exposed");
  for (size_t kind = 0; kind < kTaskKinds; ++kind) {
    if (expected.kinds[kind].count == 0 && found.kinds[kind].count == 0) continue;
    text += row(name(static_cast<TaskKind>(kind)), expected.kinds[kind], found.kinds[kind]);
  }
  text += row("sum", expected.sum, found.sum);
  text += fmt::format("step time: predicted {}, measured {}\n", format_seconds(expected.step_s),
                      format_seconds(found.step_s));
  return text;
}

}  // namespace slidedp
