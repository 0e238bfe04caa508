#include "tests/model/graph/graph_check.h"

#include <algorithm>
#include <map>
#include <set>
#include <string>
#include <tuple>

#include "model/base/format.h"
#include "model/graph/dependencies.h"

namespace slidedp::testing {
namespace {

constexpr int kSteps = 2;

// ancestors[e]: bit set of the executions that happen before e. Executions are numbered step * tasks + task.
class HappensBefore {
 public:
  explicit HappensBefore(const StepGraph& graph) : tasks_(graph.tasks.size()), words_((kSteps * tasks_ + 63) / 64) {
    std::vector<std::vector<size_t>> predecessors(kSteps * tasks_);
    for (size_t step = 0; step < kSteps; ++step) {
      for (size_t lane = 0; lane + 1 < graph.lanes.size(); ++lane) {
        size_t before = kSteps * tasks_;
        if (step > 0 && !graph.lanes[lane].empty()) {
          before = (step - 1) * tasks_ + static_cast<size_t>(graph.lanes[lane].back());
        }
        for (const TaskId id : graph.lanes[lane]) {
          const size_t self = step * tasks_ + static_cast<size_t>(id);
          if (before < kSteps * tasks_) predecessors[self].push_back(before);
          before = self;
        }
      }
      for (size_t id = 0; id < tasks_; ++id) {
        const size_t self = step * tasks_ + id;
        for (const TaskId dep : graph.tasks[id].deps) {
          predecessors[self].push_back(step * tasks_ + static_cast<size_t>(dep));
        }
        for (const TaskId dep : graph.tasks[id].previous_deps) {
          if (step > 0) predecessors[self].push_back((step - 1) * tasks_ + static_cast<size_t>(dep));
        }
      }
    }
    // Kahn's order: independent of the claim that program order is a topological order.
    std::vector<std::vector<size_t>> successors(kSteps * tasks_);
    std::vector<size_t> missing(kSteps * tasks_);
    for (size_t e = 0; e < predecessors.size(); ++e) {
      missing[e] = predecessors[e].size();
      for (const size_t p : predecessors[e]) successors[p].push_back(e);
    }
    std::vector<size_t> ready;
    for (size_t e = 0; e < missing.size(); ++e) {
      if (missing[e] == 0) ready.push_back(e);
    }
    ancestors_.assign(kSteps * tasks_, std::vector<uint64_t>(words_));
    while (!ready.empty()) {
      const size_t e = ready.back();
      ready.pop_back();
      ++ordered_;
      for (const size_t s : successors[e]) {
        for (size_t w = 0; w < words_; ++w) ancestors_[s][w] |= ancestors_[e][w];
        ancestors_[s][e / 64] |= uint64_t{1} << (e % 64);
        if (--missing[s] == 0) ready.push_back(s);
      }
    }
  }
  bool acyclic() const { return ordered_ == kSteps * tasks_; }
  bool before(size_t a, size_t b) const { return (ancestors_[b][a / 64] >> (a % 64) & 1) != 0; }

 private:
  size_t tasks_, words_, ordered_ = 0;
  std::vector<std::vector<uint64_t>> ancestors_;
};

struct Touch {
  size_t execution;
  const Access* access;
};

}  // namespace

std::optional<Conflict> find_unordered_conflict(const StepGraph& graph) {
  const HappensBefore order(graph);
  if (!order.acyclic()) return Conflict{0, 0, -1, -1, "the graph has a cycle"};
  const size_t tasks = graph.tasks.size();
  std::vector<std::vector<Touch>> by_buffer(graph.buffers.size());
  for (size_t step = 0; step < kSteps; ++step) {
    for (size_t id = 0; id < tasks; ++id) {
      for (const Access& access : graph.tasks[id].accesses) {
        by_buffer[static_cast<size_t>(access.buffer)].push_back({step * tasks + id, &access});
      }
    }
  }
  for (size_t buffer = 0; buffer < by_buffer.size(); ++buffer) {
    const auto& touches = by_buffer[buffer];
    for (size_t i = 0; i < touches.size(); ++i) {
      for (size_t j = i + 1; j < touches.size(); ++j) {
        const Touch &a = touches[i], &b = touches[j];
        if (a.execution == b.execution) continue;
        if (!writes(a.access->mode) && !writes(b.access->mode)) continue;
        if (a.access->end <= b.access->begin || b.access->end <= a.access->begin) continue;
        const bool across = a.execution / tasks != b.execution / tasks;
        if (across && alternates(graph.buffers[buffer].kind)) continue;
        // Their rows differ: the same list divides them.
        const bool disjoint = a.access->partition >= 0 && a.access->partition == b.access->partition;
        if (disjoint && !across && writes(a.access->mode) && writes(b.access->mode)) continue;
        if (order.before(a.execution, b.execution) || order.before(b.execution, a.execution)) continue;
        const auto task_a = static_cast<TaskId>(a.execution % tasks), task_b = static_cast<TaskId>(b.execution % tasks);
        return Conflict{static_cast<int>(a.execution / tasks), static_cast<int>(b.execution / tasks), task_a, task_b,
                        fmt::format("{} (step {}) and {} (step {}) on {}", graph.describe(task_a), a.execution / tasks,
                                    graph.describe(task_b), b.execution / tasks, graph.buffers[buffer].name)};
      }
    }
  }
  return std::nullopt;
}

namespace {

// What a slot holds: blocks of 64 elements of a unit (their offset in the slot is the same), or of the compact matrix
// of a wave's touched rows.
struct Content {
  int unit = -1, list = -1;  // list: the wave; -1: of the whole unit
  std::set<int64_t> valid;
  bool is(int other_unit, int other_list) const { return unit == other_unit && list == other_list; }
};

class Slots {
 public:
  explicit Slots(const StepGraph& graph) : graph_(graph) {}

  static int list(const Task& task) { return task.rows == Rows::touched ? task.wave : -1; }
  int64_t end(int unit, int list) const {
    if (list < 0) return graph_.layout.units[static_cast<size_t>(unit)].elements * 2;
    const Chunk& last = graph_.touched.chunks.back();
    return (last.begin + last.elements) * 2;
  }
  void fill(const Task& task, const Access& target) {
    Content& content = slots_[target.buffer];
    if (!content.is(task.unit, list(task))) content = {task.unit, list(task), {}};
    const int64_t last = std::min(target.end, end(task.unit, list(task))) / 128;
    for (int64_t b = target.begin / 128; b < last; ++b) content.valid.insert(b);
  }
  bool holds(const Task& task, const Access& range) { return holds(range, task.unit, list(task)); }
  bool holds(const Access& range, int unit, int list) {
    const Content& content = slots_[range.buffer];
    const int64_t last = std::min(range.end, end(unit, list)) / 128;
    for (int64_t b = range.begin / 128; b < last; ++b) {
      if (!content.is(unit, list) || content.valid.count(b) == 0) return false;
    }
    return true;
  }
  // What of the unit (or list) a compute task must read.
  ElementRange wanted(const Task& task, int unit, int list) const {
    if (list >= 0) return {0, end(unit, list)};
    const ElementRange range = graph_.layout.units[static_cast<size_t>(unit)].range(task.block);
    return {range.begin * 2, range.end * 2};
  }

 private:
  const StepGraph& graph_;
  std::map<BufferId, Content> slots_;
};

// Rows of a list go to their places in it.
bool keeps_place(const StepGraph& graph, const Task& task) {
  const Access &source = task.at(Role::source), &target = task.at(Role::target);
  if (task.rows != Rows::touched) return source.begin == target.begin && source.end == target.end;
  const Access& rows = task.at(Role::touched_rows);
  const int64_t row_bytes = graph.layout.embedding().tensors.front().shape.back() * 2;
  const int64_t first = task.wave * graph.touched.capacity;
  return (rows.begin / 4 - first) * row_bytes == target.begin && (rows.end / 4 - first) * row_bytes == target.end &&
         source.begin == 0 && source.end == graph.layout.embedding().elements * 2;
}

}  // namespace

std::string check_deliveries(const StepGraph& graph) {
  Slots slots(graph);
  for (const Task& task : graph.tasks) {
    if (task.kind == TaskKind::h2d && task.unit >= 0) {
      if (!keeps_place(graph, task)) return "a copy moves weights to another offset";
      slots.fill(task, task.at(Role::target));
    }
    if (task.kind == TaskKind::all_gather) {
      // Every member's shard must be in that member's slot; then the whole chunk is in this one.
      for (const Task& member : graph.tasks) {
        if (member.group != task.group) continue;
        if (!slots.holds(member, member.at(Role::source))) {
          return fmt::format("all-gather of unit {} without rank {}'s shard", task.unit, member.rank);
        }
      }
      slots.fill(task, task.at(Role::target));
    }
    if (task.kind == TaskKind::broadcast) {
      // The root's slot holds the chunk; the others get it.
      const Access& target = task.at(Role::target);
      if (task.rank == task.root && !slots.holds(task, target)) {
        return fmt::format("broadcast of unit {} whose root {} does not hold it", task.unit, task.root);
      }
      slots.fill(task, target);
    }
    for (const Role role : {Role::weights, Role::vocabulary}) {
      const Access* weights = task.find(role);
      if (weights == nullptr) continue;
      const int unit = role == Role::vocabulary ? 0 : task.unit;
      const bool lookup = role == Role::weights && unit == 0 && graph.touched.capacity > 0;
      const int list = lookup ? task.wave : -1;
      const ElementRange wanted = slots.wanted(task, unit, list);
      if (weights->begin != wanted.begin || weights->end != wanted.end) {
        return fmt::format("{} of unit {} reads other weights than its own", name(task.kind), unit);
      }
      if (!slots.holds(*weights, unit, list)) {
        return fmt::format("{} of unit {} reads a slot that does not hold all of it", name(task.kind), unit);
      }
    }
  }
  return "";
}

namespace {

// A chunk of a unit, or of the touched rows, or a chunk's untouched rows.
using Part = std::tuple<int, int, Rows>;

struct Counts {
  std::map<int, int64_t> landed;  // by rank, elements. With gpu reduction a rank lands its own shard only
  int updates = 0, moments = 0, accumulations = 0, norms = 0;
};

struct Expected {
  int64_t gradients = 1;  // that land a wave
  int updates = 1, moments = 0, accumulations = 0, norms = 0;
};

std::string check_part(const StepGraph& graph, const std::string& what, const Chunk& chunk, const Counts& counts,
                       const Expected& expected) {
  for (int rank = 0; rank < graph.ranks(); ++rank) {
    const bool gpu = graph.plan.reduction == Reduction::gpu;
    const int64_t once = gpu ? chunk.shard_valid(rank, graph.ranks()) : chunk.elements;
    const int64_t wanted = expected.gradients * graph.plan.waves * once;
    const auto landed = counts.landed.find(rank);
    const int64_t found = landed == counts.landed.end() ? 0 : landed->second;
    if (found == wanted) continue;
    return fmt::format("{} rank {}: {} gradient elements land, {} wanted", what, rank, found, wanted);
  }
  if (counts.moments != expected.moments) return fmt::format("{} has {} second passes", what, counts.moments);
  if (counts.accumulations != expected.accumulations) {
    return fmt::format("{} is accumulated {} times", what, counts.accumulations);
  }
  if (counts.updates != expected.updates) return fmt::format("{} has {} updates", what, counts.updates);
  if (counts.norms != expected.norms) return fmt::format("{} has {} norms", what, counts.norms);
  return "";
}

// What happens to an embedding's chunks, to those of its touched rows and to the untouched rows of its chunks.
std::string check_touched(const StepGraph& graph, std::map<Part, Counts>& parts) {
  const Plan& plan = graph.plan;
  const bool tied = graph.layout.tied;
  const int several = plan.waves > 1, norms = plan.update != UpdatePolicy::eager;
  const Expected whole{tied, 0, plan.update == UpdatePolicy::split, several && tied ? plan.waves : 0, 0};
  const Expected untouched{0, 1, 0, several && !tied, norms}, touched{1, 1, 0, plan.waves - 1, norms};
  std::string wrong;
  for (size_t i = 0; i < graph.chunks.front().size() && wrong.empty(); ++i) {
    const Chunk& chunk = graph.chunks.front()[i];
    const auto number = static_cast<int>(i);
    wrong = check_part(graph, fmt::format("embedding chunk {}", i), chunk, parts[{0, number, Rows::all}], whole);
    if (!wrong.empty()) return wrong;
    wrong = check_part(graph, fmt::format("untouched rows of chunk {}", i), chunk, parts[{0, number, Rows::untouched}],
                       untouched);
  }
  int64_t covered = 0;
  for (size_t i = 0; i < graph.touched.chunks.size() && wrong.empty(); ++i) {
    const Chunk& chunk = graph.touched.chunks[i];
    wrong = check_part(graph, fmt::format("touched rows chunk {}", i), chunk,
                       parts[{0, static_cast<int>(i), Rows::touched}], touched);
    if (chunk.begin != covered) return "chunks of touched rows do not adjoin";
    covered += chunk.elements;
  }
  const int64_t hidden = graph.layout.embedding().tensors.front().shape.back();
  if (covered != graph.touched.capacity * hidden) return "chunks do not cover the touched rows";
  return wrong;
}

}  // namespace

std::string check_gradients(const StepGraph& graph) {
  const int64_t wire = size_of(graph.plan.wire);
  std::map<Part, Counts> parts;
  std::map<int32_t, std::set<int>> groups;
  for (const Task& task : graph.tasks) {
    if (task.group >= 0) groups[task.group].insert(task.rank);
    if (task.chunk < 0) continue;
    Counts& counts = parts[{task.unit, task.chunk, task.rows}];
    if (task.kind == TaskKind::update) ++(task.part == UpdatePart::moments ? counts.moments : counts.updates);
    if (task.kind == TaskKind::host_accumulate) ++counts.accumulations;
    if (task.kind == TaskKind::norm) ++counts.norms;
    if (task.kind == TaskKind::d2h) {
      counts.landed[task.rank] += (task.at(Role::target).end - task.at(Role::target).begin) / wire;
    }
  }
  for (const auto& [group, ranks] : groups) {
    if (static_cast<int>(ranks.size()) != graph.ranks()) return fmt::format("group {} lacks ranks", group);
  }
  for (const UnitLayout& unit : graph.layout.units) {
    const auto& chunks = graph.chunks[static_cast<size_t>(unit.unit)];
    int64_t covered = 0;
    for (const Chunk& chunk : chunks) {
      if (chunk.begin != covered) return unit.name + ": chunks do not adjoin";
      covered += chunk.elements;
    }
    if (covered != unit.elements) return unit.name + ": chunks do not cover the unit";
    if (unit.unit == 0 && graph.touched.capacity > 0) continue;
    const int gradients = graph.layout.tied && unit.unit == 0 ? 2 : 1;
    const Expected expected{gradients, 1, graph.plan.update == UpdatePolicy::split,
                            graph.plan.waves == 1 ? 0 : gradients * graph.plan.waves - 1,
                            graph.plan.update != UpdatePolicy::eager};
    for (size_t i = 0; i < chunks.size(); ++i) {
      const Counts& counts = parts[{unit.unit, static_cast<int>(i), Rows::all}];
      const std::string wrong =
          check_part(graph, fmt::format("{} chunk {}", unit.name, i), chunks[i], counts, expected);
      if (!wrong.empty()) return wrong;
    }
  }
  return graph.touched.capacity > 0 ? check_touched(graph, parts) : "";
}

}  // namespace slidedp::testing
