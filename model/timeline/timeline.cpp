#include "model/timeline/timeline.h"

#include <algorithm>

namespace slidedp {
namespace {

bool took_time(const TaskRecord& record) { return record.end_s > record.start_s; }

struct Cause {
  TaskKind kind{};
  double end_s = 0;
  bool found = false;
};

// The dependency of `task` that ended last; the previous step's tasks ended step_s before this step's.
Cause last_dependency(const StepGraph& graph, const Timeline& timeline, const Task& task) {
  Cause cause;
  const auto consider = [&](TaskId dep, double shift) {
    const double end = timeline.records[static_cast<size_t>(dep)].end_s - shift;
    if (!cause.found || end > cause.end_s) cause = {graph.tasks[static_cast<size_t>(dep)].kind, end, true};
  };
  for (TaskId dep : task.deps) consider(dep, 0);
  for (TaskId dep : task.previous_deps) consider(dep, timeline.step_s);
  return cause;
}

// Charges the gaps of one compute lane.
void charge_gaps(const StepGraph& graph, const Timeline& timeline, const std::vector<TaskId>& lane,
                 std::array<KindTotals, kTaskKinds>& totals) {
  const auto record = [&](TaskId task) -> const TaskRecord& { return timeline.records[static_cast<size_t>(task)]; };
  const auto last = std::find_if(lane.rbegin(), lane.rend(), [&](TaskId task) { return took_time(record(task)); });
  if (last == lane.rend()) return;
  double opened = record(*last).end_s - timeline.step_s;
  for (TaskId id : lane) {
    if (!took_time(record(id))) continue;
    const Task& task = graph.tasks[static_cast<size_t>(id)];
    const double closed = record(id).start_s;
    if (closed > opened) {
      const Cause cause = last_dependency(graph, timeline, task);
      const double caused_until = cause.found ? std::clamp(cause.end_s, opened, closed) : opened;
      totals[static_cast<size_t>(cause.kind)].exposed_s += (caused_until - opened) / graph.ranks();
      totals[static_cast<size_t>(task.kind)].exposed_s += (closed - caused_until) / graph.ranks();
    }
    opened = std::max(opened, record(id).end_s);
  }
}

}  // namespace

std::string_view name(TimelineSource source) { return source == TimelineSource::predicted ? "predicted" : "measured"; }

std::array<KindTotals, kTaskKinds> totals_by_kind(const StepGraph& graph, const Timeline& timeline) {
  std::array<KindTotals, kTaskKinds> totals{};
  for (const TaskRecord& record : timeline.records) {
    if (!took_time(record)) continue;
    KindTotals& total = totals[static_cast<size_t>(graph.tasks[static_cast<size_t>(record.task)].kind)];
    ++total.count;
    total.busy_s += record.end_s - record.start_s;
  }
  for (int rank = 0; rank < graph.ranks(); ++rank) {
    charge_gaps(graph, timeline, graph.lanes[static_cast<size_t>(graph.lane_index({LaneKind::compute, rank}))], totals);
  }
  return totals;
}

}  // namespace slidedp
