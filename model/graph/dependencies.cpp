#include "model/graph/dependencies.h"

#include <algorithm>
#include <utility>

namespace slidedp {
namespace {

// Task executions of the two unrolled steps: step * tasks + task.
using Execution = int32_t;

// Who last touched which bytes of one buffer: segments between all the places where accesses begin or end.
class BufferHistory {
 public:
  void add_boundaries(const Access& access) {
    boundaries_.push_back(access.begin);
    boundaries_.push_back(access.end);
  }
  void cut() {
    std::sort(boundaries_.begin(), boundaries_.end());
    boundaries_.erase(std::unique(boundaries_.begin(), boundaries_.end()), boundaries_.end());
    segments_.resize(boundaries_.size());  // the last is empty
  }
  void forget() { segments_.assign(segments_.size(), {}); }

  // Appends what an access at this point must wait for, and notes the access.
  void touch(Execution execution, const Access& access, std::vector<Execution>& conflicts) {
    const auto begin = std::lower_bound(boundaries_.begin(), boundaries_.end(), access.begin);
    for (auto at = begin; *at < access.end; ++at) {
      Segment& segment = segments_[static_cast<size_t>(at - boundaries_.begin())];
      if (segment.writer >= 0) conflicts.push_back(segment.writer);
      if (!writes(access.mode)) {
        segment.readers.push_back(execution);
        continue;
      }
      conflicts.insert(conflicts.end(), segment.readers.begin(), segment.readers.end());
      segment.writer = execution;
      segment.readers.clear();
    }
  }

 private:
  struct Segment {
    Execution writer = -1;
    std::vector<Execution> readers;  // since the last write
  };
  std::vector<int64_t> boundaries_;
  std::vector<Segment> segments_;  // by the boundary where it begins
};

// Knows, for every execution, how far each in-order lane has come at least when it starts: the lane's executions up to
// that place happen before it. (A vector clock. Pool executions have no order of their own.)
class Clocks {
 public:
  explicit Clocks(const StepGraph& graph)
      : graph_(graph), tasks_(static_cast<Execution>(graph.tasks.size())), lanes_(graph.lanes.size() - 1) {
    position_.resize(graph.tasks.size());
    lane_.resize(graph.tasks.size());
    for (size_t l = 0; l < graph.lanes.size(); ++l) {
      for (size_t i = 0; i < graph.lanes[l].size(); ++i) {
        position_[static_cast<size_t>(graph.lanes[l][i])] = static_cast<int32_t>(i);
        lane_[static_cast<size_t>(graph.lanes[l][i])] = l;
      }
    }
    clocks_.assign(2 * graph.tasks.size() * lanes_, -1);
  }

  bool in_pool(Execution execution) const { return lane(execution) == lanes_; }
  size_t lane(Execution execution) const { return lane_[task(execution)]; }
  // Place on its lane, counted over both steps.
  int32_t place(Execution execution) const {
    const auto length = static_cast<int32_t>(graph_.lanes[lane(execution)].size());
    return (execution >= tasks_ ? length : 0) + position_[task(execution)];
  }
  // The execution before it on its in-order lane, or -1.
  Execution lane_predecessor(Execution execution) const {
    const auto& tasks = graph_.lanes[lane(execution)];
    const bool second = execution >= tasks_;
    const auto index = static_cast<size_t>(position_[task(execution)]);
    if (index > 0) return (second ? tasks_ : 0) + tasks[index - 1];
    return second ? tasks.back() : -1;
  }
  bool happens_before(Execution device_execution, Execution other) const {
    return clock(other)[lane(device_execution)] >= place(device_execution);
  }
  // `self` starts after `before`.
  void add(Execution self, Execution before) {
    int32_t* mine = clock(self);
    const int32_t* theirs = clock(before);
    for (size_t i = 0; i < lanes_; ++i) mine[i] = std::max(mine[i], theirs[i]);
    if (!in_pool(before)) mine[lane(before)] = std::max(mine[lane(before)], place(before));
  }

 private:
  size_t task(Execution execution) const {
    return static_cast<size_t>(execution >= tasks_ ? execution - tasks_ : execution);
  }
  int32_t* clock(Execution execution) { return clocks_.data() + static_cast<size_t>(execution) * lanes_; }
  const int32_t* clock(Execution execution) const { return clocks_.data() + static_cast<size_t>(execution) * lanes_; }

  const StepGraph& graph_;
  const Execution tasks_;
  const size_t lanes_;             // in-order ones
  std::vector<int32_t> position_;  // in its lane, by task
  std::vector<size_t> lane_;       // by task
  std::vector<int32_t> clocks_;    // by execution, in-order lane
};

// Leaves out what the task's own lane or another conflict implies, and notes the task's clock. Pool executions all
// stay.
class Pruner {
 public:
  explicit Pruner(const StepGraph& graph) : clocks_(graph), last_(graph.lanes.size() - 1) {}

  // Reduces `conflicts` in place; sorted.
  void prune(std::vector<Execution>& conflicts, Execution self) {
    keep_last(conflicts, self);
    const Execution before = clocks_.in_pool(self) ? -1 : clocks_.lane_predecessor(self);
    kept_.clear();
    for (const Execution execution : conflicts) {
      const bool implied = !clocks_.in_pool(execution) &&
                           ((before >= 0 && (execution == before || clocks_.happens_before(execution, before))) ||
                            std::any_of(conflicts.begin(), conflicts.end(), [&](Execution other) {
                              return other != execution && clocks_.happens_before(execution, other);
                            }));
      if (!implied) kept_.push_back(execution);
    }
    if (before >= 0) clocks_.add(self, before);
    for (const Execution execution : kept_) clocks_.add(self, execution);
    std::swap(conflicts, kept_);
  }

 private:
  // Of an in-order lane the last conflict implies the others.
  void keep_last(std::vector<Execution>& conflicts, Execution self) {
    std::fill(last_.begin(), last_.end(), -1);
    kept_.clear();
    for (const Execution execution : conflicts) {
      if (execution == self) continue;
      if (clocks_.in_pool(execution)) {
        kept_.push_back(execution);
        continue;
      }
      Execution& last = last_[clocks_.lane(execution)];
      if (last < 0 || clocks_.place(last) < clocks_.place(execution)) last = execution;
    }
    for (const Execution execution : last_) {
      if (execution >= 0) kept_.push_back(execution);
    }
    std::sort(kept_.begin(), kept_.end());
    kept_.erase(std::unique(kept_.begin(), kept_.end()), kept_.end());
    std::swap(conflicts, kept_);
  }

  Clocks clocks_;
  std::vector<Execution> last_;  // by lane
  std::vector<Execution> kept_;
};

// The histories of all buffers, before the first task.
std::vector<BufferHistory> empty_histories(const StepGraph& graph) {
  std::vector<BufferHistory> histories(graph.buffers.size());
  for (const Task& task : graph.tasks) {
    for (const Access& access : task.accesses) histories[static_cast<size_t>(access.buffer)].add_boundaries(access);
  }
  for (BufferHistory& history : histories) history.cut();
  return histories;
}

}  // namespace

bool alternates(BufferKind kind) {
  return kind == BufferKind::batch || kind == BufferKind::batch_host || kind == BufferKind::loss ||
         kind == BufferKind::loss_host;
}

void derive_dependencies(StepGraph& graph) {
  const auto tasks = static_cast<Execution>(graph.tasks.size());
  graph.lanes.assign(static_cast<size_t>(graph.ranks()) * kDeviceLanes + 1, {});
  for (TaskId id = 0; id < tasks; ++id) {
    graph.lanes[static_cast<size_t>(graph.lane_index(graph.tasks[static_cast<size_t>(id)].lane))].push_back(id);
  }
  Pruner pruner(graph);
  std::vector<BufferHistory> histories = empty_histories(graph);
  std::vector<Execution> conflicts;
  for (Execution step = 0; step < 2; ++step) {
    if (step == 1) {
      for (size_t buffer = 0; buffer < graph.buffers.size(); ++buffer) {
        if (alternates(graph.buffers[buffer].kind)) histories[buffer].forget();
      }
    }
    for (TaskId id = 0; id < tasks; ++id) {
      Task& task = graph.tasks[static_cast<size_t>(id)];
      const Execution self = step * tasks + id;
      conflicts.clear();
      for (const Access& access : task.accesses) {
        histories[static_cast<size_t>(access.buffer)].touch(self, access, conflicts);
      }
      pruner.prune(conflicts, self);
      if (step == 0) continue;
      for (const Execution execution : conflicts) {
        (execution >= tasks ? task.deps : task.previous_deps).push_back(execution % tasks);
      }
    }
  }
}

}  // namespace slidedp
