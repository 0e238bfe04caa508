// Runs a step graph: each task when what it depends on is done, each lane in its order. Decides nothing else.
//
// Threads: one issuing thread a rank, the update pool's workers, and whatever the devices bring. One caller thread uses
// the public functions. The first failure anywhere stops everything and comes out of collect() as one exception.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "model/graph/step_graph.h"
#include "runtime/device/backends.h"
#include "runtime/exec/graph_memory.h"
#include "runtime/exec/step_io.h"
#include "runtime/exec/task_bodies.h"
#include "runtime/host/update_pool.h"

namespace slidedp {

// Called on a worker before each task of the pool; may take its time and may throw, as a task may. So that tests can
// disturb the pool as they can disturb a backend, which is all interfaces.
using PoolHook = std::function<void(const Task&)>;

struct ExecutorOptions {
  UpdateOrder update_order = UpdateOrder::need;
  PoolHook before_pool_task = {};
};

class Executor {
 public:
  // Allocates the graph's buffers. Graph, backend and state must outlive it.
  Executor(const StepGraph& graph, Backend& backend, HostState& state, ExecutorOptions options = {});
  ~Executor();  // stops what runs
  Executor(const Executor&) = delete;
  Executor& operator=(const Executor&) = delete;

  // What is slower than it could be, in sentences for the user.
  const std::vector<std::string>& notes() const { return memory_.notes(); }
  // Where the tokens of the next submitted step go (Plan::batch_bytes, all but the places in lists of touched rows);
  // free to be written until submit(), while at most one execution is under way.
  int32_t* batch(int rank);
  // Starts a step. At most two executions may be under way: collect the older first. Throws Error for a token outside
  // the vocabulary if the plan lists touched rows.
  void submit(StepInput input);
  // Starts the updates that the last step left behind (deferred), if any; returns whether there are any. Its outcome is
  // collected like a step's, with phase `flush`.
  bool submit_flush();
  int in_flight() const { return static_cast<int>(submitted_ - collected_); }
  // Waits for the oldest execution; nullopt after `timeout`. Throws the first failure.
  std::optional<StepOutcome> collect(std::chrono::milliseconds timeout);
  // Stops all work as soon as tasks that run now end; collect() then throws an Error with `reason`.
  void cancel(const std::string& reason);

 private:
  struct Execution;
  struct RankLanes;

  void stop();
  void start(Phase phase, StepInput input);
  void issue_loop(int rank);
  bool issue_next(int rank, RankLanes& lanes, int lane);
  bool ready(const Execution& execution, TaskId task) const;
  void issue(int rank, Execution& execution, TaskId task, Stream& stream);
  void wait_for(Device& device, Stream& stream, const Execution& execution, const std::vector<TaskId>& deps);
  void end_lane(int rank, Execution& execution, Stream& stream);
  void submit_to_pool(Execution& execution, TaskId task);
  void finish(int64_t sequence, TaskId task);
  void lane_finished(int64_t sequence);
  void fail(std::exception_ptr error);
  Execution& execution(int64_t sequence) { return *ring_[static_cast<size_t>(sequence % kRing)]; }
  const Execution& execution(int64_t sequence) const { return *ring_[static_cast<size_t>(sequence % kRing)]; }
  Timeline timeline(const Execution& execution);
  bool in_pool(TaskId task) const { return graph_.tasks[static_cast<size_t>(task)].lane.kind == LaneKind::update; }

  // Buffers of step data have two halves (alternates()), so two executions at most are under way.
  static constexpr int kMostInFlight = 2;
  // An execution's events stay valid until those that may wait for them are collected.
  static constexpr int kRing = kMostInFlight + 1;

  const StepGraph& graph_;
  Backend& backend_;
  const HostState& state_;
  const ExecutorOptions options_;
  GraphMemory memory_;
  TaskBodies bodies_;
  // For each task, the pool tasks that wait for it: in its own step and in the next.
  std::vector<std::vector<TaskId>> pool_successors_, pool_next_successors_;
  std::vector<std::string> task_names_;  // of device tasks

  mutable std::mutex mutex_;
  std::condition_variable wake_ranks_, wake_caller_;
  std::vector<std::unique_ptr<Execution>> ring_;
  int64_t submitted_ = 0, collected_ = 0;
  bool updates_pending_ = false;
  bool stopping_ = false;
  std::exception_ptr error_;
  double last_end_s_ = 0;

  std::vector<std::vector<std::unique_ptr<Stream>>> streams_;  // by rank, lane; null without tasks
  std::unique_ptr<UpdatePool> pool_;
  std::vector<std::thread> issuers_;
};

}  // namespace slidedp
