// What happened when: the same type for the simulator and the executor.
#pragma once

#include <array>
#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "model/graph/step_graph.h"

namespace slidedp {

enum class TimelineSource : uint8_t { predicted, measured };
std::string_view name(TimelineSource);

struct TaskRecord {
  TaskId task = -1;
  double start_s = 0;  // since the timeline's origin
  double end_s = 0;
};

// One execution of a step graph. Records are in task order; a task outside the step's phase has start = end.
struct Timeline {
  TimelineSource source{};
  int64_t step = 0;
  double step_s = 0;  // duration of the step in steady state
  std::vector<TaskRecord> records;
};

// Totals by task kind: busy seconds (sum over tasks and ranks), count of the tasks that took time, and exposed seconds:
// time that tasks of this kind made a compute lane wait (averaged over ranks).
//
// A gap on a compute lane is charged to the kind of the dependency that ended last before the gap closed, up to that
// end; what is left of the gap (launch or wake-up of the waiting task itself) to the waiting task's own kind. The gap
// before the lane's first task counts from the lane's last task one step_s earlier, since steps repeat; so all exposed
// seconds together are step_s less what the compute lanes are busy.
struct KindTotals {
  int64_t count = 0;
  double busy_s = 0;
  double exposed_s = 0;
};
std::array<KindTotals, kTaskKinds> totals_by_kind(const StepGraph& graph, const Timeline& timeline);

// Chrome/Perfetto trace-event JSON: one process per source and rank (and one for the host), one thread per lane or
// worker. Pool tasks are put on as few worker threads as they overlap.
// Written atomically; throws Error that names the file.
void write_trace(const StepGraph& graph, const std::vector<Timeline>& timelines, const std::filesystem::path& file);

}  // namespace slidedp
