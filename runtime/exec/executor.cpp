#include "runtime/exec/executor.h"

#include <algorithm>
#include <array>
#include <stdexcept>
#include <utility>

#include "model/base/error.h"
#include "runtime/device/clock.h"
#include "runtime/host/worker_cores.h"

namespace slidedp {

// One run through the graph. Flags and counters are guarded by Executor::mutex_.
struct Executor::Execution {
  int64_t sequence = -1;
  StepContext context;
  std::vector<uint8_t> issued;                     // device tasks: the end event has been recorded
  std::vector<uint8_t> done;                       // pool tasks, and device tasks that pool tasks wait for
  std::vector<int32_t> waiting;                    // pool tasks: unfinished dependencies
  std::vector<TaskRecord> times;                   // pool tasks: filled by the worker
  std::vector<std::unique_ptr<Event>> start, end;  // device tasks
  int64_t pool_left = 0, lanes_left = 0;
  bool complete() const { return pool_left == 0 && lanes_left == 0; }
};

// Where an issuing thread stands in each of its lanes.
struct Executor::RankLanes {
  struct Cursor {
    int64_t sequence = 0;
    size_t next = 0;
  };
  std::array<Cursor, kDeviceLanes> cursors;
};

Executor::Executor(const StepGraph& graph, Backend& backend, HostState& state, ExecutorOptions options)
    : graph_(graph),
      backend_(backend),
      state_(state),
      options_(std::move(options)),
      memory_(graph, backend.devices, state),
      bodies_(graph, backend, state, memory_),
      pool_successors_(graph.tasks.size()),
      pool_next_successors_(graph.tasks.size()) {
  for (TaskId task = 0; task < static_cast<TaskId>(graph_.tasks.size()); ++task) {
    task_names_.push_back(in_pool(task) ? "" : graph_.describe(task));
  }
  for (TaskId task = 0; task < static_cast<TaskId>(graph_.tasks.size()); ++task) {
    if (!in_pool(task)) continue;
    for (const TaskId dep : graph_.tasks[static_cast<size_t>(task)].deps) {
      pool_successors_[static_cast<size_t>(dep)].push_back(task);
    }
    for (const TaskId dep : graph_.tasks[static_cast<size_t>(task)].previous_deps) {
      pool_next_successors_[static_cast<size_t>(dep)].push_back(task);
    }
  }
  for (int rank = 0; rank < graph_.ranks(); ++rank) {
    Device& device = *backend_.devices[static_cast<size_t>(rank)];
    device.set_error_handler([this](std::exception_ptr error) { fail(std::move(error)); });
    auto& streams = streams_.emplace_back();
    for (int lane = 0; lane < kDeviceLanes; ++lane) {
      const auto kind = static_cast<LaneKind>(lane);
      const bool used = !graph_.lanes[static_cast<size_t>(graph_.lane_index({kind, rank}))].empty();
      streams.push_back(used ? device.create_stream(std::string(name(kind))) : nullptr);
    }
  }
  for (int i = 0; i < kRing; ++i) {
    auto& execution = *ring_.emplace_back(std::make_unique<Execution>());
    for (const Task& task : graph_.tasks) {
      const bool device = task.lane.kind != LaneKind::update;
      Device* of_rank = device ? backend_.devices[static_cast<size_t>(task.rank)].get() : nullptr;
      execution.start.push_back(device ? of_rank->create_event() : nullptr);
      execution.end.push_back(device ? of_rank->create_event() : nullptr);
    }
  }
  const ThreadSplit& threads = graph_.plan.threads;
  const int others = graph_.ranks() * threads.compute_per_rank;
  pool_ = std::make_unique<UpdatePool>(
      threads.update, [this](std::exception_ptr error) { fail(std::move(error)); },
      worker_places(numa_nodes(), threads.update, others), options_.update_order);
  try {
    for (int rank = 0; rank < graph_.ranks(); ++rank) {
      issuers_.emplace_back([this, rank] { issue_loop(rank); });
    }
  } catch (...) {
    stop();
    throw;
  }
}

Executor::~Executor() { stop(); }

// Afterwards nothing uses the buffers. pool_ stays until the members go: its workers may still report an error.
void Executor::stop() {
  if (in_flight() > 0) fail(std::make_exception_ptr(Error("the executor was stopped with work under way")));
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  wake_ranks_.notify_all();
  for (std::thread& issuer : issuers_) issuer.join();
  for (size_t rank = 0; rank < streams_.size(); ++rank) {
    for (const auto& stream : streams_[rank]) {
      if (stream != nullptr) backend_.devices[rank]->synchronize(*stream);
    }
  }
  for (const auto& device : backend_.devices) device->set_error_handler(nullptr);
}

int32_t* Executor::batch(int rank) {
  return static_cast<int32_t*>(memory_.base(memory_.of_rank(BufferKind::batch_host, rank), submitted_));
}

void Executor::submit(StepInput input) {
  const bool deferred = graph_.plan.update != UpdatePolicy::eager;
  start(deferred && !updates_pending_ ? Phase::first : Phase::steady, std::move(input));
  updates_pending_ = deferred;
}

bool Executor::submit_flush() {
  if (!updates_pending_) return false;
  StepInput input;
  input.batches.resize(static_cast<size_t>(graph_.ranks()));
  start(Phase::flush, std::move(input));
  updates_pending_ = false;
  return true;
}

void Executor::start(Phase phase, StepInput input) {
  if (in_flight() >= kMostInFlight) throw std::logic_error("two executions are under way: collect the older one first");
  RowLists rows;
  if (graph_.touched.capacity > 0 && phase != Phase::flush) rows = list_touched_rows(graph_, memory_, submitted_);
  std::vector<TaskId> ready_now;
  {
    const std::lock_guard lock(mutex_);
    Execution& next = execution(submitted_);
    next.sequence = submitted_;
    next.context = {submitted_, phase, std::move(input), std::move(rows), nullptr, {}, {}};
    if (submitted_ > 0) next.context.previous_rows = &execution(submitted_ - 1).context.rows;
    const bool eager = graph_.plan.update == UpdatePolicy::eager;
    if (eager) bodies_.begin_eager(next.context);
    const size_t tasks = graph_.tasks.size();
    next.issued.assign(tasks, 0);
    next.done.assign(tasks, 0);
    next.waiting.assign(tasks, 0);
    next.times.assign(tasks, {});
    next.pool_left = static_cast<int64_t>(graph_.lanes.back().size());
    next.lanes_left = std::count_if(graph_.lanes.begin(), graph_.lanes.end() - 1,
                                    [](const std::vector<TaskId>& lane) { return !lane.empty(); });
    for (const TaskId id : graph_.lanes.back()) {
      const Task& task = graph_.tasks[static_cast<size_t>(id)];
      int32_t& waiting = next.waiting[static_cast<size_t>(id)];
      waiting = static_cast<int32_t>(task.deps.size());
      if (submitted_ > 0) {
        const Execution& previous = execution(submitted_ - 1);
        waiting +=
            static_cast<int32_t>(std::count_if(task.previous_deps.begin(), task.previous_deps.end(), [&](TaskId dep) {
              return previous.done[static_cast<size_t>(dep)] == 0;
            }));
      }
      if (waiting == 0) ready_now.push_back(id);
    }
    ++submitted_;
    for (const TaskId id : ready_now) submit_to_pool(next, id);
  }
  wake_ranks_.notify_all();
}

// The issuing thread of a rank: goes round its lanes and issues one ready task of each, so that a lane whose next task
// waits for the host does not hold up the others.
void Executor::issue_loop(int rank) {
  RankLanes lanes;
  try {
    for (;;) {
      bool progress = false;
      for (int lane = 0; lane < kDeviceLanes; ++lane) {
        progress = issue_next(rank, lanes, lane) || progress;
      }
      if (progress) continue;
      std::unique_lock lock(mutex_);
      const auto can_move = [&] {
        if (stopping_ || error_ != nullptr) return true;
        for (int lane = 0; lane < kDeviceLanes; ++lane) {
          const auto& cursor = lanes.cursors[static_cast<size_t>(lane)];
          const auto& tasks = graph_.lanes[static_cast<size_t>(graph_.lane_index({static_cast<LaneKind>(lane), rank}))];
          if (cursor.sequence >= submitted_ || tasks.empty()) continue;
          if (ready(execution(cursor.sequence), tasks[cursor.next])) return true;
        }
        return false;
      };
      wake_ranks_.wait(lock, can_move);
      if (stopping_ || error_ != nullptr) return;
    }
  } catch (...) {
    fail(std::current_exception());
  }
}

// Issues the lane's next task if it is ready; returns whether it did.
bool Executor::issue_next(int rank, RankLanes& lanes, int lane) {
  auto& cursor = lanes.cursors[static_cast<size_t>(lane)];
  const auto& tasks = graph_.lanes[static_cast<size_t>(graph_.lane_index({static_cast<LaneKind>(lane), rank}))];
  if (tasks.empty()) return false;
  Execution* current = nullptr;
  const TaskId task = tasks[cursor.next];
  {
    const std::lock_guard lock(mutex_);
    if (stopping_ || error_ != nullptr || cursor.sequence >= submitted_) return false;
    current = &execution(cursor.sequence);
    if (!ready(*current, task)) return false;
  }
  Stream& stream = *streams_[static_cast<size_t>(rank)][static_cast<size_t>(lane)];
  issue(rank, *current, task, stream);
  {
    const std::lock_guard lock(mutex_);
    current->issued[static_cast<size_t>(task)] = 1;
  }
  wake_ranks_.notify_all();
  if (++cursor.next == tasks.size()) {
    end_lane(rank, *current, stream);
    cursor = {cursor.sequence + 1, 0};
  }
  return true;
}

// A device task can be issued when the events that its stream will wait for have been recorded, and the host tasks
// that it needs are done. Requires mutex_.
bool Executor::ready(const Execution& current, TaskId id) const {
  const Task& task = graph_.tasks[static_cast<size_t>(id)];
  const auto met = [this](const Execution& execution, TaskId dep) {
    return (in_pool(dep) ? execution.done : execution.issued)[static_cast<size_t>(dep)] != 0;
  };
  for (const TaskId dep : task.deps) {
    if (!met(current, dep)) return false;
  }
  if (current.sequence == 0) return true;
  for (const TaskId dep : task.previous_deps) {
    if (!met(execution(current.sequence - 1), dep)) return false;
  }
  return true;
}

void Executor::issue(int rank, Execution& current, TaskId id, Stream& stream) {
  const Task& task = graph_.tasks[static_cast<size_t>(id)];
  const auto index = static_cast<size_t>(id);
  Device& device = *backend_.devices[static_cast<size_t>(rank)];
  device.begin_task(stream, task_names_[index]);
  wait_for(device, stream, current, task.deps);
  if (current.sequence > 0) wait_for(device, stream, execution(current.sequence - 1), task.previous_deps);
  device.record(stream, *current.start[index]);
  if ((task.phases & phase_bit(current.context.phase)) != 0) bodies_.issue(id, current.context, stream);
  device.record(stream, *current.end[index]);
  device.end_task(stream);
  if (!pool_successors_[index].empty() || !pool_next_successors_[index].empty()) {
    device.notify(stream, [this, sequence = current.sequence, id] { finish(sequence, id); });
  }
}

void Executor::wait_for(Device& device, Stream& stream, const Execution& from, const std::vector<TaskId>& deps) {
  for (const TaskId dep : deps) {
    if (!in_pool(dep)) device.wait(stream, *from.end[static_cast<size_t>(dep)]);
  }
}

void Executor::end_lane(int rank, Execution& current, Stream& stream) {
  backend_.devices[static_cast<size_t>(rank)]->notify(stream,
                                                      [this, sequence = current.sequence] { lane_finished(sequence); });
}

void Executor::lane_finished(int64_t sequence) {
  const std::lock_guard lock(mutex_);
  --execution(sequence).lanes_left;
  wake_caller_.notify_all();
}

// Requires mutex_ (the pool has its own, and calls nothing while it holds it).
void Executor::submit_to_pool(Execution& current, TaskId id) {
  const Task& task = graph_.tasks[static_cast<size_t>(id)];
  pool_->submit(
      current.sequence, task.need,
      [this, &current, &task, id](int) {
        TaskRecord& times = current.times[static_cast<size_t>(id)];
        times.start_s = process_seconds();
        if (options_.before_pool_task) options_.before_pool_task(task);
        if ((task.phases & phase_bit(current.context.phase)) != 0) bodies_.run(id, current.context);
        times.end_s = process_seconds();
        finish(current.sequence, id);
      },
      task.unit < 0 ? 0 : state_.node(task.unit));
}

// A pool task, or a device task that pool tasks wait for, is done.
void Executor::finish(int64_t sequence, TaskId id) {
  const auto index = static_cast<size_t>(id);
  {
    const std::lock_guard lock(mutex_);
    if (error_ != nullptr) return;
    Execution& current = execution(sequence);
    current.done[index] = 1;
    for (const TaskId next : pool_successors_[index]) {
      if (--current.waiting[static_cast<size_t>(next)] == 0) submit_to_pool(current, next);
    }
    if (sequence + 1 < submitted_) {
      Execution& following = execution(sequence + 1);
      for (const TaskId next : pool_next_successors_[index]) {
        if (--following.waiting[static_cast<size_t>(next)] == 0) submit_to_pool(following, next);
      }
    }
    if (in_pool(id)) --current.pool_left;
  }
  wake_ranks_.notify_all();
  wake_caller_.notify_all();
}

std::optional<StepOutcome> Executor::collect(std::chrono::milliseconds timeout) {
  if (in_flight() == 0) throw std::logic_error("nothing to collect");
  std::unique_lock lock(mutex_);
  Execution& oldest = execution(collected_);
  wake_caller_.wait_for(lock, timeout, [&] { return error_ != nullptr || oldest.complete(); });
  if (error_ != nullptr) std::rethrow_exception(error_);
  if (!oldest.complete()) return std::nullopt;
  lock.unlock();

  StepOutcome outcome = std::move(oldest.context.outcome);
  outcome.input = std::move(oldest.context.input);
  outcome.phase = oldest.context.phase;
  outcome.timeline = timeline(oldest);
  if (outcome.phase != Phase::flush) {
    double sum = 0;
    for (int rank = 0; rank < graph_.ranks(); ++rank) {
      const auto* losses =
          static_cast<const double*>(memory_.base(memory_.of_rank(BufferKind::loss_host, rank), oldest.sequence));
      for (int64_t i = 0; i < graph_.plan.micro_batches_per_step(); ++i) sum += losses[i];
    }
    outcome.loss = sum / static_cast<double>(outcome.input.target_tokens);
  }
  ++collected_;
  return outcome;
}

Timeline Executor::timeline(const Execution& finished) {
  Timeline timeline;
  timeline.source = TimelineSource::measured;
  timeline.step = finished.context.input.step;
  double first_start = -1, last_end = 0;
  for (TaskId id = 0; id < static_cast<TaskId>(graph_.tasks.size()); ++id) {
    const auto index = static_cast<size_t>(id);
    const Task& task = graph_.tasks[index];
    TaskRecord record = finished.times[index];
    record.task = id;
    if (!in_pool(id)) {
      const Device& device = *backend_.devices[static_cast<size_t>(task.rank)];
      record.start_s = device.timestamp(*finished.start[index]);
      record.end_s = device.timestamp(*finished.end[index]);
    }
    if (first_start < 0 || record.start_s < first_start) first_start = record.start_s;
    last_end = std::max(last_end, record.end_s);
    timeline.records.push_back(record);
  }
  timeline.step_s = last_end - (finished.sequence == 0 ? first_start : last_end_s_);
  last_end_s_ = last_end;
  return timeline;
}

void Executor::cancel(const std::string& reason) {
  fail(std::make_exception_ptr(Error(reason, ExitCode::interrupted)));
}

void Executor::fail(std::exception_ptr error) {
  {
    const std::lock_guard lock(mutex_);
    if (error_ == nullptr) error_ = std::move(error);
  }
  for (const auto& device : backend_.devices) device->abort();
  backend_.collective->abort();
  pool_->abort();
  wake_ranks_.notify_all();
  wake_caller_.notify_all();
}

}  // namespace slidedp
