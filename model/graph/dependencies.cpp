#include "model/graph/dependencies.h"

#include <algorithm>
#include <limits>
#include <map>
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
  }
  void add(const std::vector<Execution>& executions) {
    for (const Execution execution : executions) {
      if (execution == self_ || of_[static_cast<size_t>(execution)] == self_) continue;
      of_[static_cast<size_t>(execution)] = self_;
      found_.push_back(execution);
    }
  }
  std::vector<Execution> take() {
    std::sort(found_.begin(), found_.end());
    return found_;
  }

 private:
  Execution self_ = -1;
  std::vector<Execution> of_;  // by execution: for whom it was found last
  std::vector<Execution> found_;
};

// An execution with its in-order lane; -1 for the pool.
struct Accessor {
  Execution execution, step;
  int lane;
};

struct Segment {
  int64_t end = 0;
  std::vector<Execution> writers;  // the last one, or all of one partition and step
  std::vector<Execution> readers;  // since the last write; of each in-order lane the last one
  std::vector<int> reader_lanes;
  std::pair<Execution, int32_t> partition{-1, -1};  // of the writers: step and number; -1 if none
  std::vector<Execution> before;                    // what the writers of a partition wait for
};

// Who last touched which bytes of one buffer: disjoint segments by their begin.
class BufferHistory {
 public:
  // Adds what an access at this point must wait for, and notes the access.
  void touch(const Accessor& accessor, const Access& access, Conflicts& conflicts) {
    if (access.begin >= access.end) return;
    cut(access.begin);
    cut(access.end);
    fill_gaps(access.begin, access.end);
    for (auto it = segments_.find(access.begin); it != segments_.end() && it->first < access.end; ++it) {
      Segment& segment = it->second;
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
    const auto same = std::find(segment.reader_lanes.begin(), segment.reader_lanes.end(), accessor.lane);
    if (accessor.lane >= 0 && same != segment.reader_lanes.end()) {
      segment.readers[static_cast<size_t>(same - segment.reader_lanes.begin())] = accessor.execution;
      return;
    }
    segment.readers.push_back(accessor.execution);
    segment.reader_lanes.push_back(accessor.lane);
  }

  // A write of the partition that wrote last joins it, unless somebody has read since. Readers wait for the writers, so
  // who waits for them need not.
  static void write(Execution execution, std::pair<Execution, int32_t> partition, Segment& segment,
                    Conflicts& conflicts) {
    if (partition.second >= 0 && partition == segment.partition && segment.readers.empty()) {
      conflicts.add(segment.before);
      segment.writers.push_back(execution);
      return;
    }
    segment.before.swap(segment.readers.empty() ? segment.writers : segment.readers);
    conflicts.add(segment.before);
    segment.partition = partition;
    segment.writers.assign(1, execution);
    segment.readers.clear();
    segment.reader_lanes.clear();
  }

  // Makes `at` a segment boundary if it lies inside a segment.
  void cut(int64_t at) {
    auto it = segments_.upper_bound(at);
    if (it == segments_.begin()) return;
    --it;
    if (it->first == at || it->second.end <= at) return;
    Segment right = it->second;
    it->second.end = at;
    segments_.emplace(at, std::move(right));
  }

  void fill_gaps(int64_t begin, int64_t end) {
    int64_t at = begin;
    auto it = segments_.lower_bound(begin);
    while (at < end) {
      if (it != segments_.end() && it->first == at) {
        at = it->second.end;
        ++it;
        continue;
      }
      const int64_t stop = it == segments_.end() ? end : std::min(end, it->first);
      segments_.emplace_hint(it, at, Segment{stop, {}, {}, {}, {-1, -1}, {}});
      at = stop;
    }
  }

  std::map<int64_t, Segment> segments_;
};

// Knows, for every execution, how far each in-order lane has come at least when it starts: the lane's executions up to
// that place happen before it. (A vector clock.) Pool executions have no order of their own; of those it knows from
// which place of each lane on they have happened before.
class Clocks {
 public:
  explicit Clocks(const StepGraph& graph) : graph_(graph), tasks_(static_cast<Execution>(graph.tasks.size())) {
    position_.resize(graph.tasks.size(), -1);
    for (const auto& lane : graph.lanes) {
      for (size_t i = 0; i < lane.size(); ++i) position_[static_cast<size_t>(lane[i])] = static_cast<int32_t>(i);
    }
    for (size_t lane = 0; lane + 1 < graph.lanes.size(); ++lane) {
      column_.push_back(lanes_);
      if (!graph.lanes[lane].empty()) ++lanes_;
    }
    clocks_.assign(2 * graph.tasks.size() * lanes_, -1);
    known_.assign(2 * graph.lanes.back().size() * lanes_, std::numeric_limits<int32_t>::max());
  }

  bool in_pool(Execution execution) const { return lane(execution) == column_.size(); }
  size_t lane(Execution execution) const {
    return static_cast<size_t>(graph_.lane_index(graph_.tasks[static_cast<size_t>(execution % tasks_)].lane));
  }
  // Place on its lane, counted over both steps.
  int32_t place(Execution execution) const {
    const auto length = static_cast<int32_t>(graph_.lanes[lane(execution)].size());
    return execution / tasks_ * length + position_[static_cast<size_t>(execution % tasks_)];
  }
  // The execution before it on its in-order lane, or -1.
  Execution lane_predecessor(Execution execution) const {
    const auto& tasks = graph_.lanes[lane(execution)];
    const Execution step = execution / tasks_;
    const auto index = static_cast<size_t>(position_[static_cast<size_t>(execution % tasks_)]);
    if (index > 0) return step * tasks_ + tasks[index - 1];
    return step > 0 ? (step - 1) * tasks_ + tasks.back() : -1;
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
  int32_t* known(Execution of_pool) { return known_.data() + static_cast<size_t>(place(of_pool)) * lanes_; }
  int32_t* clock(Execution execution) { return clocks_.data() + static_cast<size_t>(execution) * lanes_; }
  const int32_t* clock(Execution execution) const { return clocks_.data() + static_cast<size_t>(execution) * lanes_; }

  const StepGraph& graph_;
  const Execution tasks_;
  size_t lanes_ = 0;            // in-order ones with tasks
  std::vector<size_t> column_;  // of a clock, by in-order lane
  std::vector<int32_t> position_, clocks_, known_;
};

// Leaves out what the task's own lane or another conflict implies, and notes what happens before the task.
std::vector<Execution> prune(Clocks& clocks, const std::vector<Execution>& conflicts, Execution self) {
  const bool in_pool = clocks.in_pool(self);
  const Execution before = in_pool ? -1 : clocks.lane_predecessor(self);
  std::vector<Execution> kept;
  for (const Execution execution : conflicts) {
    const bool implied = !clocks.in_pool(execution) &&
                         ((before >= 0 && (execution == before || clocks.happens_before(execution, before))) ||
                          std::any_of(conflicts.begin(), conflicts.end(), [&](Execution other) {
                            return other != execution && clocks.happens_before(execution, other);
                          }));
    if (!implied) kept.push_back(execution);
  }
  if (before >= 0) clocks.add(self, before);
  for (const Execution execution : kept) clocks.add(self, execution);
  std::erase_if(kept, [&](Execution execution) {
    if (!clocks.in_pool(execution)) return false;
    const bool implied = clocks.follows(self, execution);
    if (!in_pool) clocks.note(self, execution);
    return implied;
  });
  return kept;
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
  Clocks clocks(graph);
  Conflicts conflicts(2 * graph.tasks.size());
  std::vector<BufferHistory> histories(graph.buffers.size());
  for (Execution step = 0; step < 2; ++step) {
    if (step == 1) {
      for (size_t buffer = 0; buffer < graph.buffers.size(); ++buffer) {
        if (alternates(graph.buffers[buffer].kind)) histories[buffer] = BufferHistory{};
      }
    }
    for (TaskId id = 0; id < tasks; ++id) {
      Task& task = graph.tasks[static_cast<size_t>(id)];
      const Execution self = step * tasks + id;
      const Accessor accessor{self, step, clocks.in_pool(self) ? -1 : static_cast<int>(clocks.lane(self))};
      conflicts.start(self);
      for (const Access& access : task.accesses) {
        histories[static_cast<size_t>(access.buffer)].touch(accessor, access, conflicts);
      }
      for (const Execution execution : prune(clocks, conflicts.take(), self)) {
        if (step == 1) (execution >= tasks ? task.deps : task.previous_deps).push_back(execution % tasks);
      }
    }
  }
}

}  // namespace slidedp
