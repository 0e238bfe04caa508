#include "model/graph/dependencies.h"

#include <algorithm>
#include <limits>
#include <utility>

namespace slidedp {
namespace {

// Task executions of the two unrolled steps: step * tasks + task.
using Execution = int32_t;

// What one execution must wait for, each execution once.
class Conflicts {
 public:
  explicit Conflicts(size_t executions) : of_(executions, -1) {}
  void start(Execution self) {
    self_ = self;
    found_.clear();
    last_.clear();
  }
  void add(Execution execution) {
    if (execution == self_ || of_[static_cast<size_t>(execution)] == self_) return;
    of_[static_cast<size_t>(execution)] = self_;
    found_.push_back(execution);
  }
  // Many segments have the same many writers.
  void add(const std::vector<Execution>& executions) {
    if (executions.size() > 1) {
      if (executions == last_) return;
      last_ = executions;
    }
    for (const Execution execution : executions) add(execution);
  }
  const std::vector<Execution>& found() const { return found_; }

 private:
  Execution self_ = -1;
  std::vector<Execution> of_;  // by execution: for whom it was found last
  std::vector<Execution> found_;
  std::vector<Execution> last_;  // several that were added together
};

// An execution with its in-order lane; -1 for the pool.
struct Accessor {
  Execution execution, step;
  int lane;
};

struct Segment {
  std::vector<Execution> writers;                   // the last one, or all of one partition and step
  std::vector<Accessor> readers;                    // since the last write; of each in-order lane the last one
  std::pair<Execution, int32_t> partition{-1, -1};  // of the writers: step and number; -1 if none
  std::vector<Execution> before;                    // what the writers of a partition wait for
};

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

  // Adds what an access at this point must wait for, and notes the access.
  void touch(const Accessor& accessor, const Access& access, Conflicts& conflicts) {
    const auto begin = std::lower_bound(boundaries_.begin(), boundaries_.end(), access.begin);
    for (auto at = begin; *at < access.end; ++at) {
      Segment& segment = segments_[static_cast<size_t>(at - boundaries_.begin())];
      if (!writes(access.mode)) {
        conflicts.add(segment.writers);
        note_reader(accessor, segment);
      } else {
        write(accessor.execution, {accessor.step, access.partition}, segment, conflicts);
      }
    }
  }

 private:
  static void note_reader(const Accessor& accessor, Segment& segment) {
    for (Accessor& reader : segment.readers) {
      if (accessor.lane < 0 || reader.lane != accessor.lane) continue;
      reader = accessor;
      return;
    }
    segment.readers.push_back(accessor);
  }

  // A write of the partition that wrote last joins it, unless somebody has read since. Readers wait for the writers, so
  // who waits for them need not.
  static void write(Execution execution, std::pair<Execution, int32_t> partition, Segment& segment,
                    Conflicts& conflicts) {
    const bool parts = partition.second >= 0;
    if (parts && partition == segment.partition && segment.readers.empty()) {
      conflicts.add(segment.before);
      segment.writers.push_back(execution);
      return;
    }
    segment.before.clear();
    if (segment.readers.empty()) {
      conflicts.add(segment.writers);
      if (parts) segment.before.swap(segment.writers);
    }
    for (const Accessor& reader : segment.readers) {
      conflicts.add(reader.execution);
      if (parts) segment.before.push_back(reader.execution);
    }
    segment.partition = partition;
    segment.writers.assign(1, execution);
    segment.readers.clear();
  }

  std::vector<int64_t> boundaries_;
  std::vector<Segment> segments_;  // by the boundary where it begins
};

// Knows, for every execution, how far each in-order lane has come at least when it starts: the lane's executions up to
// that place happen before it. (A vector clock.) Pool executions have no order of their own; of those it knows from
// which place of each lane on they have happened before.
class Clocks {
 public:
  explicit Clocks(const StepGraph& graph) : graph_(graph), tasks_(static_cast<Execution>(graph.tasks.size())) {
    position_.resize(graph.tasks.size());
    lane_.resize(graph.tasks.size());
    for (size_t l = 0; l < graph.lanes.size(); ++l) {
      for (size_t i = 0; i < graph.lanes[l].size(); ++i) {
        position_[static_cast<size_t>(graph.lanes[l][i])] = static_cast<int32_t>(i);
        lane_[static_cast<size_t>(graph.lanes[l][i])] = l;
      }
    }
    for (size_t lane = 0; lane + 1 < graph.lanes.size(); ++lane) {
      column_.push_back(lanes_);
      if (!graph.lanes[lane].empty()) ++lanes_;
    }
    clocks_.assign(2 * graph.tasks.size() * lanes_, -1);
    known_.assign(2 * graph.lanes.back().size() * lanes_, std::numeric_limits<int32_t>::max());
  }

  bool in_pool(Execution execution) const { return lane(execution) == column_.size(); }
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
    return clock(other)[column_[lane(device_execution)]] >= place(device_execution);
  }
  // `self` starts after `before`.
  void add(Execution self, Execution before) {
    int32_t* mine = clock(self);
    const int32_t* theirs = clock(before);
    for (size_t i = 0; i < lanes_; ++i) mine[i] = std::max(mine[i], theirs[i]);
    if (in_pool(before)) return;
    int32_t& of_lane = mine[column_[lane(before)]];
    of_lane = std::max(of_lane, place(before));
  }

  // A device execution starts after this one of the pool.
  void note(Execution device_execution, Execution of_pool) {
    int32_t& from = known(of_pool)[column_[lane(device_execution)]];
    from = std::min(from, place(device_execution));
  }
  // Whether what `self` is known to start after includes a device execution that starts after this one of the pool.
  bool follows(Execution self, Execution of_pool) {
    const int32_t *mine = clock(self), *from = known(of_pool);
    for (size_t i = 0; i < lanes_; ++i) {
      if (mine[i] >= from[i]) return true;
    }
    return false;
  }

 private:
  size_t task(Execution execution) const {
    return static_cast<size_t>(execution >= tasks_ ? execution - tasks_ : execution);
  }
  int32_t* known(Execution of_pool) { return known_.data() + static_cast<size_t>(place(of_pool)) * lanes_; }
  int32_t* clock(Execution execution) { return clocks_.data() + static_cast<size_t>(execution) * lanes_; }
  const int32_t* clock(Execution execution) const { return clocks_.data() + static_cast<size_t>(execution) * lanes_; }

  const StepGraph& graph_;
  const Execution tasks_;
  size_t lanes_ = 0;            // in-order ones with tasks
  std::vector<size_t> column_;  // of a clock, by in-order lane
  std::vector<size_t> lane_;    // by task
  std::vector<int32_t> position_, clocks_, known_;
};

// Leaves out what the task's own lane or another conflict implies, and notes what happens before the task.
class Pruner {
 public:
  explicit Pruner(const StepGraph& graph) : clocks_(graph), last_(graph.lanes.size() - 1) {}

  // The in-order lane of an execution; -1 for the pool.
  int lane(Execution execution) const {
    return clocks_.in_pool(execution) ? -1 : static_cast<int>(clocks_.lane(execution));
  }

  // What of the conflicts is left, sorted; until the next call.
  const std::vector<Execution>& prune(const std::vector<Execution>& conflicts, Execution self) {
    last_of_lanes(conflicts);
    const bool in_pool = clocks_.in_pool(self);
    const Execution before = in_pool ? -1 : clocks_.lane_predecessor(self);
    kept_.clear();
    for (const Execution execution : candidates_) {
      if (!implied(execution, before)) kept_.push_back(execution);
    }
    if (before >= 0) clocks_.add(self, before);
    for (const Execution execution : kept_) clocks_.add(self, execution);
    std::erase_if(kept_, [&](Execution execution) {
      if (!clocks_.in_pool(execution)) return false;
      const bool known = clocks_.follows(self, execution);
      if (!in_pool) clocks_.note(self, execution);
      return known;
    });
    return kept_;
  }

 private:
  // Candidates: of an in-order lane the last conflict implies the others.
  void last_of_lanes(const std::vector<Execution>& conflicts) {
    std::fill(last_.begin(), last_.end(), -1);
    candidates_.clear();
    for (const Execution execution : conflicts) {
      if (clocks_.in_pool(execution)) {
        candidates_.push_back(execution);
        continue;
      }
      Execution& last = last_[clocks_.lane(execution)];
      if (last < 0 || clocks_.place(last) < clocks_.place(execution)) last = execution;
    }
    for (const Execution execution : last_) {
      if (execution >= 0) candidates_.push_back(execution);
    }
    std::sort(candidates_.begin(), candidates_.end());
  }

  // `before`: the execution before the task's on its lane, or -1.
  bool implied(Execution execution, Execution before) const {
    if (clocks_.in_pool(execution)) return false;
    if (before >= 0 && (execution == before || clocks_.happens_before(execution, before))) return true;
    return std::any_of(candidates_.begin(), candidates_.end(),
                       [&](Execution other) { return other != execution && clocks_.happens_before(execution, other); });
  }

  Clocks clocks_;
  std::vector<Execution> last_;  // by lane
  std::vector<Execution> candidates_, kept_;
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
  return kind == BufferKind::batch || kind == BufferKind::batch_host || kind == BufferKind::touched_rows ||
         kind == BufferKind::loss || kind == BufferKind::loss_host;
}

void derive_dependencies(StepGraph& graph) {
  const auto tasks = static_cast<Execution>(graph.tasks.size());
  graph.lanes.assign(static_cast<size_t>(graph.ranks()) * kDeviceLanes + 1, {});
  for (TaskId id = 0; id < tasks; ++id) {
    graph.lanes[static_cast<size_t>(graph.lane_index(graph.tasks[static_cast<size_t>(id)].lane))].push_back(id);
  }
  Pruner pruner(graph);
  Conflicts conflicts(2 * graph.tasks.size());
  std::vector<BufferHistory> histories = empty_histories(graph);
  for (Execution step = 0; step < 2; ++step) {
    if (step == 1) {
      for (size_t buffer = 0; buffer < graph.buffers.size(); ++buffer) {
        if (alternates(graph.buffers[buffer].kind)) histories[buffer].forget();
      }
    }
    for (TaskId id = 0; id < tasks; ++id) {
      Task& task = graph.tasks[static_cast<size_t>(id)];
      const Execution self = step * tasks + id;
      const Accessor accessor{self, step, pruner.lane(self)};
      conflicts.start(self);
      for (const Access& access : task.accesses) {
        histories[static_cast<size_t>(access.buffer)].touch(accessor, access, conflicts);
      }
      for (const Execution execution : pruner.prune(conflicts.found(), self)) {
        if (step == 1) (execution >= tasks ? task.deps : task.previous_deps).push_back(execution % tasks);
      }
    }
  }
}

}  // namespace slidedp
