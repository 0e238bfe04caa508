#include "model/sim/engine.h"

#include <algorithm>
#include <limits>
#include <map>
#include <stdexcept>
#include <string>

namespace slidedp {
namespace {

// Events closer than this are one event: symmetric ranks finish together whatever rounding did to them.
constexpr double kSameTime = 1e-12;

}  // namespace

StepEngine::StepEngine(const StepGraph& graph, std::span<const TaskCost> costs, std::span<const Resource> resources)
    : graph_(&graph),
      costs_(costs),
      sharing_(resources),
      successors_(invert(graph.tasks, &Task::deps)),
      next_step_successors_(invert(graph.tasks, &Task::previous_deps)),
      lanes_(graph.lanes.empty() ? 0 : graph.lanes.size() - 1),
      free_workers_(std::max(1, graph.plan.threads.update)) {
  index_groups();
  index_loads(costs, resources);
}

StepEngine::Adjacency StepEngine::invert(const std::vector<Task>& tasks, const std::vector<TaskId> Task::*edges) {
  Adjacency result;
  result.begin.assign(tasks.size() + 1, 0);
  for (const Task& task : tasks) {
    for (TaskId dep : task.*edges) ++result.begin[static_cast<size_t>(dep) + 1];
  }
  for (size_t i = 0; i < tasks.size(); ++i) result.begin[i + 1] += result.begin[i];
  result.items.resize(static_cast<size_t>(result.begin.back()));
  std::vector<int32_t> next(result.begin.begin(), result.begin.end() - 1);
  for (size_t i = 0; i < tasks.size(); ++i) {
    for (TaskId dep : tasks[i].*edges) {
      result.items[static_cast<size_t>(next[static_cast<size_t>(dep)]++)] = static_cast<int32_t>(i);
    }
  }
  return result;
}

void StepEngine::index_groups() {
  std::vector<std::vector<int32_t>> members;
  for (size_t i = 0; i < graph_->tasks.size(); ++i) {
    const Task& task = graph_->tasks[i];
    if (task.group < 0) continue;
    if (task.lane.kind == LaneKind::update) throw std::logic_error("a task of the update pool cannot be in a group");
    const auto group = static_cast<size_t>(task.group);
    if (group >= members.size()) members.resize(group + 1);
    members[group].push_back(static_cast<int32_t>(i));
  }
  group_members_.begin.push_back(0);
  for (const std::vector<int32_t>& group : members) {
    group_members_.items.insert(group_members_.items.end(), group.begin(), group.end());
    group_members_.begin.push_back(static_cast<int32_t>(group_members_.items.size()));
  }
}

// Leaves out the resources that can never be full: those that suffice even when every lane and worker runs its most
// demanding task, unless contention is about them.
void StepEngine::index_loads(std::span<const TaskCost> costs, std::span<const Resource> resources) {
  const auto full_rate = [](const TaskCost& cost, const Demand& demand) { return demand.amount / cost.solo_s; };
  std::vector<double> most(resources.size(), 0), in_lane(resources.size());
  for (const std::vector<TaskId>& lane : graph_->lanes) {
    std::fill(in_lane.begin(), in_lane.end(), 0);
    const bool pool = &lane == &graph_->lanes.back();
    for (TaskId task : lane) {
      const TaskCost& cost = costs[static_cast<size_t>(task)];
      for (const Demand& demand : cost.demands) {
        double& peak = in_lane[static_cast<size_t>(demand.resource)];
        peak = std::max(peak, full_rate(cost, demand) * (pool ? free_workers_ : 1));
      }
    }
    for (size_t r = 0; r < most.size(); ++r) most[r] += in_lane[r];
  }
  std::vector<bool> counts(resources.size());
  for (size_t r = 0; r < resources.size(); ++r) {
    const Contention& contention = resources[r].contention;
    if (contention.any() || most[r] > resources[r].capacity * (1 + 1e-12)) counts[r] = true;
    for (const Beside& one : contention.beside) counts[static_cast<size_t>(one.other)] = true;
  }
  using Loads = std::vector<std::pair<ResourceId, double>>;
  std::map<Loads, int32_t> known;
  Loads loads;
  std::vector<size_t> begin;
  for (const TaskCost& cost : costs) {
    loads.clear();
    for (const Demand& demand : cost.demands) {
      if (counts[static_cast<size_t>(demand.resource)]) loads.emplace_back(demand.resource, full_rate(cost, demand));
    }
    const auto [place, added] = known.try_emplace(loads, static_cast<int32_t>(known.size()));
    class_of_.push_back(place->second);
    if (!added) continue;
    begin.push_back(loads_.size());
    for (const auto& [resource, rate] : place->first) loads_.push_back({resource, rate});
  }
  begin.push_back(loads_.size());
  for (size_t i = 0; i + 1 < begin.size(); ++i) {
    classes_.push_back({std::span(loads_).subspan(begin[i], begin[i + 1] - begin[i])});
  }
}

bool StepEngine::runs(int64_t step, TaskId task) const {
  const Phase phase = step == 0 ? Phase::first : Phase::steady;
  return (graph_->tasks[static_cast<size_t>(task)].phases & phase_bit(phase)) != 0 &&
         costs_[static_cast<size_t>(task)].alone_s() > 0;
}

void StepEngine::open_step(int64_t step) {
  const size_t count = graph_->tasks.size();
  OpenStep& opened = open(step);
  const OpenStep& previous = open(step + 1);  // the same place as step - 1
  opened.step = step;
  opened.left = static_cast<TaskId>(count);
  opened.pending.resize(count);
  opened.done.assign(count, 0);
  opened.arrived.assign(group_members_.begin.size() - 1, 0);
  opened.records.assign(count, TaskRecord{});
  for (size_t i = 0; i < count; ++i) {
    const Task& task = graph_->tasks[i];
    opened.pending[i] = static_cast<int32_t>(task.deps.size());
    if (step > 0) {
      opened.pending[i] +=
          static_cast<int32_t>(std::count_if(task.previous_deps.begin(), task.previous_deps.end(),
                                             [&](TaskId dep) { return previous.done[static_cast<size_t>(dep)] == 0; }));
    }
    opened.records[i].task = static_cast<TaskId>(i);
  }
  for (size_t i = 0; i < lanes_.size(); ++i) lanes_to_try_.push_back(static_cast<int>(i));
  for (size_t i = 0; i < count; ++i) {
    if (opened.pending[i] == 0 && pooled(static_cast<TaskId>(i))) {
      opened.pending[i] = 1;
      met(step, static_cast<TaskId>(i));
    }
  }
}

void StepEngine::met(int64_t step, TaskId task) {
  if (--open(step).pending[static_cast<size_t>(task)] > 0) return;
  const Task& ready = graph_->tasks[static_cast<size_t>(task)];
  if (ready.lane.kind != LaneKind::update) {
    lanes_to_try_.push_back(graph_->lane_index(ready.lane));
  } else if (runs(step, task)) {
    ready_.push({step, ready.need, task});
  } else {
    idle_tasks_.emplace_back(step, task);
  }
}

void StepEngine::start_all() {
  while (!lanes_to_try_.empty() || !idle_tasks_.empty()) {
    if (!idle_tasks_.empty()) {
      const auto [step, task] = idle_tasks_.back();
      idle_tasks_.pop_back();
      begin(step, task);
    } else {
      const int lane = lanes_to_try_.back();
      lanes_to_try_.pop_back();
      try_lane(lane);
    }
  }
  // Last, when all that is ready now has been queued. What the pool starts takes time, so it readies nothing.
  while (free_workers_ > 0 && !ready_.empty()) {
    const Ready next = ready_.top();
    ready_.pop();
    --free_workers_;
    begin(next.step, next.task);
  }
}

void StepEngine::try_lane(int index) {
  InOrderLane& lane = lanes_[static_cast<size_t>(index)];
  const std::vector<TaskId>& order = graph_->lanes[static_cast<size_t>(index)];
  while (!lane.busy && !lane.arrived && !order.empty()) {
    OpenStep& step = open(lane.step);
    if (step.step != lane.step) return;  // not open yet
    const TaskId task = order[lane.position];
    if (step.pending[static_cast<size_t>(task)] > 0) return;
    const int32_t group = graph_->tasks[static_cast<size_t>(task)].group;
    if (group < 0) {
      begin(lane.step, task);
      continue;
    }
    lane.arrived = true;
    const std::span<const int32_t> members = group_members_.of(group);
    if (++step.arrived[static_cast<size_t>(group)] < static_cast<int32_t>(members.size())) return;
    for (TaskId member : members) begin(step.step, member);
  }
}

void StepEngine::begin(int64_t step, TaskId task) {
  open(step).records[static_cast<size_t>(task)].start_s = now_;
  if (!pooled(task)) {
    InOrderLane& lane = lanes_[static_cast<size_t>(graph_->lane_index(graph_->tasks[static_cast<size_t>(task)].lane))];
    lane.busy = true;
    lane.arrived = false;
  }
  if (!runs(step, task)) {
    complete(step, task);
    return;
  }
  const TaskCost& cost = costs_[static_cast<size_t>(task)];
  running_.push_back({step, task, now_ + cost.latency_s, cost.solo_s});
  ++starting_;
}

void StepEngine::complete(int64_t step, TaskId task) {
  OpenStep& in = open(step);
  in.records[static_cast<size_t>(task)].end_s = now_;
  in.done[static_cast<size_t>(task)] = 1;
  --in.left;
  if (pooled(task)) {
    if (runs(step, task)) ++free_workers_;
  } else {
    const int index = graph_->lane_index(graph_->tasks[static_cast<size_t>(task)].lane);
    InOrderLane& lane = lanes_[static_cast<size_t>(index)];
    lane.busy = false;
    if (++lane.position == graph_->lanes[static_cast<size_t>(index)].size()) {
      lane.position = 0;
      ++lane.step;
    }
    lanes_to_try_.push_back(index);
  }
  for (TaskId next : successors_.of(task)) met(step, next);
  if (open(step + 1).step == step + 1) {
    for (TaskId next : next_step_successors_.of(task)) met(step + 1, next);
  }
}

void StepEngine::count(TaskId task, int change) {
  LoadClass& of = classes_[static_cast<size_t>(class_of_[static_cast<size_t>(task)])];
  if (of.working == of.shared) ++changed_classes_;
  of.working += change;
  if (of.working == of.shared) --changed_classes_;
}

// Tasks of one class share as one that wants what they want together.
void StepEngine::update_speeds() {
  if (changed_classes_ == 0) return;
  changed_classes_ = 0;
  size_t wanted = 0;
  for (LoadClass& of : classes_) {
    of.shared = of.working;
    if (of.working > 0) wanted += of.loads.size();
  }
  class_loads_.clear();
  class_loads_.reserve(wanted);  // the spans below stay valid
  sharers_.clear();
  for (const LoadClass& of : classes_) {
    if (of.working == 0) continue;
    const size_t first = class_loads_.size();
    for (const Load& load : of.loads) class_loads_.push_back({load.resource, of.working * load.rate});
    sharers_.push_back(std::span(class_loads_).subspan(first));
  }
  speeds_.resize(sharers_.size());
  sharing_.share(sharers_, speeds_);
  size_t next = 0;
  for (LoadClass& of : classes_) {
    if (of.working > 0) of.speed = speeds_[next++];
  }
  for (Running& task : running_) {
    if (task.working) task.speed = classes_[static_cast<size_t>(class_of_[static_cast<size_t>(task.task)])].speed;
  }
}

// Those whose latency is over begin their work.
void StepEngine::start_work() {
  if (starting_ == 0) return;
  for (Running& task : running_) {
    if (task.working || task.work_from_s > now_ + kSameTime) continue;
    task.working = true;
    --starting_;
    count(task.task, +1);
    task.speed = classes_[static_cast<size_t>(class_of_[static_cast<size_t>(task.task)])].speed;
  }
}

void StepEngine::advance() {
  if (running_.empty()) report_deadlock();
  start_work();
  update_speeds();
  double wait = std::numeric_limits<double>::infinity();
  for (const Running& task : running_) {
    wait = std::min(wait, task.working ? task.remaining_s / task.speed : task.work_from_s - now_);
  }
  now_ += wait;
  // Complete in order of start; `complete` starts nothing, so running_ only shrinks here.
  size_t kept = 0;
  for (size_t i = 0; i < running_.size(); ++i) {
    Running& task = running_[i];
    if (task.working) {
      task.remaining_s -= task.speed * wait;
      if (task.remaining_s <= task.speed * kSameTime) {
        count(task.task, -1);
        complete(task.step, task.task);
        continue;
      }
    } else if (task.work_from_s <= now_ + kSameTime && task.remaining_s <= 0) {
      --starting_;
      complete(task.step, task.task);  // latency only
      continue;
    }
    if (kept != i) running_[kept] = task;
    ++kept;
  }
  running_.resize(kept);
}

void StepEngine::report_deadlock() {
  const OpenStep& step = open(current_ + 1);
  for (const Task& task : graph_->tasks) {
    const auto id = static_cast<TaskId>(&task - graph_->tasks.data());
    if (step.done[static_cast<size_t>(id)] != 0) continue;
    throw std::logic_error("the step graph is deadlocked: nothing can run, and \"" + graph_->describe(id) +
                           "\" is blocked (its dependencies, or its place in its lane, form a circle)");
  }
  throw std::logic_error("the step graph is deadlocked");
}

SimulatedStep StepEngine::next_step() {
  if (current_ < 0) open_step(0);
  open_step(current_ + 2);
  OpenStep& step = open(current_ + 1);
  start_all();
  while (step.left > 0) {
    advance();
    start_all();
  }
  ++current_;
  return {now_, std::move(step.records)};
}

}  // namespace slidedp
