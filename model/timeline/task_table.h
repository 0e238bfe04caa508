// The SQLite table of task records, shared by the planner (predicted) and the runtime (measured, and its prediction).
#pragma once

#include <cstdint>
#include <filesystem>
#include <vector>

#include "model/timeline/timeline.h"

namespace SQLite {
class Database;
}

namespace slidedp {

// Columns of `tasks`: run_id, source ('predicted' or 'measured'), step, task (position in the graph), kind, lane
// ('compute', 'h2d', 'd2h', 'comm', 'update'), rank, unit, chunk, micro_batch, wave (NULL where the task has none),
// start_s and end_s (seconds since the timeline's origin), bytes (over the link; for tasks without a link the bytes on
// the host's DRAM, else on the device), flops, elements. One row per task that took time; key (run_id, source, step,
// task).
void create_task_table(SQLite::Database& database);  // if it is not there

// Adds one timeline's records in one transaction of its own (none may be open). Replaces rows of the same key. Throws
// SQLite::Exception.
void insert_tasks(SQLite::Database& database, int64_t run_id, const StepGraph& graph, const Timeline& timeline);

// Opens or creates the database `file` and adds the timelines there. Throws Error that names the file.
void write_tasks(const std::filesystem::path& file, int64_t run_id, const StepGraph& graph,
                 const std::vector<Timeline>& timelines);

}  // namespace slidedp
