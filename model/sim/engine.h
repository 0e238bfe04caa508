// The event loop of the simulator: executes a step graph step after step in simulated time.
#pragma once

#include <cstdint>
#include <functional>
#include <queue>
#include <span>
#include <tuple>
#include <vector>

#include "model/graph/step_graph.h"
#include "model/sim/fair_share.h"
#include "model/sim/task_cost.h"
#include "model/timeline/timeline.h"

namespace slidedp {

// One completed step. Times are seconds of simulated time since the first step began.
struct SimulatedStep {
  double end_s = 0;  // when this step and all before it were complete
  std::vector<TaskRecord> records;
};

// Follows the executor's rules: two steps are open at a time, and step s + 2 opens when step s is complete. In-order
// lanes run their tasks in graph order, step after step. A collective starts when all its members are at the head of
// their lanes with all dependencies met. A free pool worker takes the ready task with the smallest (step, need, id).
// The first step has Phase::first, all others Phase::steady; tasks outside the phase take no time and no worker, but
// wait and are waited for. Every open step's bookkeeping is O(tasks), an event costs O(running tasks), and
// a sharing O(their different loads).
class StepEngine {
 public:
  // Refers to all three, which must outlive it; costs are by task.
  StepEngine(const StepGraph& graph, std::span<const TaskCost> costs, std::span<const Resource> resources);

  // Runs until the next step is complete. Throws std::logic_error that names a blocked task if nothing can run.
  SimulatedStep next_step();

 private:
  // One of the two open steps, by parity.
  struct OpenStep {
    int64_t step = -1;
    TaskId left = 0;               // tasks not complete
    std::vector<int32_t> pending;  // unmet dependencies by task
    std::vector<uint8_t> done;
    std::vector<int32_t> arrived;  // by group: members at the head of their lanes
    std::vector<TaskRecord> records;
  };
  struct InOrderLane {
    int64_t step = 0;     // of the task at the head
    size_t position = 0;  // of the head in graph.lanes
    bool busy = false;
    bool arrived = false;  // the head waits for the rest of its group
  };
  struct Running {
    int64_t step;
    TaskId task;
    double work_from_s;    // end of the latency
    double remaining_s;    // of the work, at full speed
    bool working = false;  // else its latency passes
    double speed = 0;
  };
  // Tasks with the same loads run at the same speed.
  struct LoadClass {
    std::span<const Load> loads;
    int working = 0;  // how many tasks
    int shared = 0;   // how many there were when the speeds were last shared out
    double speed = 0;
  };
  struct Ready {
    int64_t step;
    int32_t need;
    TaskId task;
    bool operator>(const Ready& other) const {
      return std::tie(step, need, task) > std::tie(other.step, other.need, other.task);
    }
  };
  // Lists of integers by index, flat.
  struct Adjacency {
    std::vector<int32_t> begin, items;
    std::span<const int32_t> of(int32_t index) const {
      return {items.data() + begin[static_cast<size_t>(index)], items.data() + begin[static_cast<size_t>(index) + 1]};
    }
  };

  static Adjacency invert(const std::vector<Task>& tasks, const std::vector<TaskId> Task::*edges);
  void index_groups();
  void index_loads(std::span<const TaskCost> costs, std::span<const Resource> resources);
  OpenStep& open(int64_t step) { return steps_[static_cast<size_t>(step % 2)]; }
  bool runs(int64_t step, TaskId task) const;
  bool pooled(TaskId task) const { return graph_->tasks[static_cast<size_t>(task)].lane.kind == LaneKind::update; }

  void open_step(int64_t step);
  void start_all();
  void try_lane(int lane);
  void begin(int64_t step, TaskId task);
  void complete(int64_t step, TaskId task);
  void met(int64_t step, TaskId task);  // one dependency of the task is met
  void advance();
  void start_work();
  void count(TaskId task, int change);
  void update_speeds();
  [[noreturn]] void report_deadlock();

  const StepGraph* graph_;
  std::span<const TaskCost> costs_;
  FairShare sharing_;
  Adjacency successors_, next_step_successors_;
  Adjacency group_members_;
  std::vector<Load> loads_;
  std::vector<LoadClass> classes_;
  std::vector<int32_t> class_of_;  // by task

  double now_ = 0;
  int64_t current_ = -1;  // the last completed step
  OpenStep steps_[2];
  std::vector<InOrderLane> lanes_;
  std::vector<int> lanes_to_try_;
  std::vector<std::pair<int64_t, TaskId>> idle_tasks_;  // pool tasks outside the phase, ready to complete
  std::priority_queue<Ready, std::vector<Ready>, std::greater<>> ready_;
  int free_workers_ = 0;
  std::vector<Running> running_;
  int starting_ = 0;         // of them, in their latency
  int changed_classes_ = 0;  // whose number of working tasks is not that of the last sharing
  // Scratch of update_speeds.
  std::vector<Load> class_loads_;
  std::vector<std::span<const Load>> sharers_;
  std::vector<double> speeds_;
};

}  // namespace slidedp
