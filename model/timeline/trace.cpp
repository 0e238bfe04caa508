// Chrome trace-event format: docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU; read by Perfetto.
#include <algorithm>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <ostream>
#include <set>

#include "model/base/atomic_file.h"
#include "model/base/format.h"
#include "model/timeline/timeline.h"

namespace slidedp {
namespace {

using Json = nlohmann::json;

// Events go out one by one: a large model's trace would not be small in memory.
class TraceWriter {
 public:
  explicit TraceWriter(std::ostream& out) : out_(&out) { *out_ << "{\"displayTimeUnit\":\"ms\",\"traceEvents\":["; }
  void event(const Json& event) {
    *out_ << (first_ ? "\n" : ",\n") << event.dump();
    first_ = false;
  }
  void end() { *out_ << "\n]}\n"; }

 private:
  std::ostream* out_;
  bool first_ = true;
};

struct Place {
  int process;
  int thread;
};

// Predicted and measured steps of one graph stand below each other: two blocks of processes, the host first.
int process_id(const StepGraph& graph, TimelineSource source, int rank) {
  const int block = source == TimelineSource::predicted ? 0 : graph.ranks() + 1;
  return 1 + block + (rank + 1);
}

// The worker threads of the pool's tasks, by task: each task takes the first worker that is free at its start.
std::map<TaskId, int> assign_workers(const StepGraph& graph, const Timeline& timeline) {
  std::vector<TaskRecord> records;
  for (TaskId task : graph.lanes.back()) {
    const TaskRecord& record = timeline.records[static_cast<size_t>(task)];
    if (record.end_s > record.start_s) records.push_back(record);
  }
  std::stable_sort(records.begin(), records.end(),
                   [](const TaskRecord& a, const TaskRecord& b) { return a.start_s < b.start_s; });
  std::vector<double> free_from;
  std::map<TaskId, int> workers;
  for (const TaskRecord& record : records) {
    auto worker = std::find_if(free_from.begin(), free_from.end(), [&](double end) { return end <= record.start_s; });
    if (worker == free_from.end()) worker = free_from.insert(worker, 0);
    *worker = record.end_s;
    workers[record.task] = static_cast<int>(worker - free_from.begin());
  }
  return workers;
}

Json task_event(const StepGraph& graph, const Timeline& timeline, const TaskRecord& record, Place place,
                double origin_s) {
  const Task& task = graph.tasks[static_cast<size_t>(record.task)];
  Json arguments{{"task", record.task}, {"step", timeline.step}};
  if (task.work.link_bytes > 0) arguments["link_bytes"] = task.work.link_bytes;
  if (task.work.flops > 0) arguments["flops"] = task.work.flops;
  if (task.work.elements > 0) arguments["elements"] = task.work.elements;
  return {{"ph", "X"},
          {"name", graph.describe(record.task)},
          {"cat", std::string(name(task.kind))},
          {"pid", place.process},
          {"tid", place.thread},
          {"ts", (record.start_s - origin_s) * 1e6},
          {"dur", (record.end_s - record.start_s) * 1e6},
          {"args", std::move(arguments)}};
}

Json name_event(const char* what, int process, int thread, const std::string& text) {
  return {{"ph", "M"}, {"name", what}, {"pid", process}, {"tid", thread}, {"args", {{"name", text}}}};
}

void write_names(const StepGraph& graph, TimelineSource source, int workers, TraceWriter& out) {
  const int host = process_id(graph, source, -1);
  out.event(name_event("process_name", host, 0, fmt::format("host ({})", name(source))));
  for (int worker = 0; worker < workers; ++worker) {
    out.event(name_event("thread_name", host, worker, fmt::format("update worker {}", worker)));
  }
  for (int rank = 0; rank < graph.ranks(); ++rank) {
    const int process = process_id(graph, source, rank);
    out.event(name_event("process_name", process, 0, fmt::format("rank {} ({})", rank, name(source))));
    for (int lane = 0; lane < kDeviceLanes; ++lane) {
      out.event(name_event("thread_name", process, lane, std::string(name(static_cast<LaneKind>(lane)))));
    }
  }
}

void write_events(const StepGraph& graph, const std::vector<Timeline>& timelines, TraceWriter& out) {
  double origin_s = std::numeric_limits<double>::infinity();
  for (const Timeline& timeline : timelines) {
    for (const TaskRecord& record : timeline.records) origin_s = std::min(origin_s, record.start_s);
  }
  std::map<TimelineSource, int> workers;
  for (const Timeline& timeline : timelines) {
    const std::map<TaskId, int> worker_of = assign_workers(graph, timeline);
    int& most = workers[timeline.source];
    for (const auto& [task, worker] : worker_of) most = std::max(most, worker + 1);
    for (const TaskRecord& record : timeline.records) {
      if (record.end_s <= record.start_s) continue;  // outside the phase
      const Lane& lane = graph.tasks[static_cast<size_t>(record.task)].lane;
      const Place place = lane.kind == LaneKind::update
                              ? Place{process_id(graph, timeline.source, -1), worker_of.at(record.task)}
                              : Place{process_id(graph, timeline.source, lane.rank), static_cast<int>(lane.kind)};
      out.event(task_event(graph, timeline, record, place, origin_s));
    }
  }
  for (const auto& [source, count] : workers) write_names(graph, source, count, out);
}

}  // namespace

void write_trace(const StepGraph& graph, const std::vector<Timeline>& timelines, const std::filesystem::path& file) {
  AtomicFile out(file);
  TraceWriter writer(out.stream());
  write_events(graph, timelines, writer);
  writer.end();
  out.commit();
}

}  // namespace slidedp
