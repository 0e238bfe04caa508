#include "tests/model/graph/graph_check.h"

#include <algorithm>
#include <map>
#include <set>

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

std::string check_deliveries(const StepGraph& graph) {
  // What a slot's bytes hold: begin -> (end, unit, offset in the unit is the same as in the slot).
  struct Content {
    int unit = -1;
    std::set<int64_t> valid;  // 64-element blocks whose weights are there
  };
  std::map<BufferId, Content> slots;
  for (const Task& task : graph.tasks) {
    if (task.kind == TaskKind::h2d && task.unit >= 0) {
      const Access& target = task.at(Role::target);
      Content& content = slots[target.buffer];
      if (content.unit != task.unit) content = {task.unit, {}};
      const Access& source = task.at(Role::source);
      if (source.begin != target.begin || source.end != target.end) return "a copy moves weights to another offset";
      for (int64_t b = target.begin / 128; b < target.end / 128; ++b) content.valid.insert(b);
    }
    if (task.kind == TaskKind::all_gather) {
      // Every member's shard must be in that member's slot; then the whole chunk is in this one.
      const int64_t unit_end = graph.layout.units[static_cast<size_t>(task.unit)].elements * 2;
      for (const Task& member : graph.tasks) {
        if (member.group != task.group) continue;
        const Access& shard = member.at(Role::source);
        const Content& content = slots[shard.buffer];
        for (int64_t b = shard.begin / 128; b < std::min(shard.end, unit_end) / 128; ++b) {
          if (content.unit != task.unit || content.valid.count(b) == 0) {
            return fmt::format("all-gather of unit {} without rank {}'s shard", task.unit, member.rank);
          }
        }
      }
      const Access& target = task.at(Role::target);
      Content& content = slots[target.buffer];
      if (content.unit != task.unit) content = {task.unit, {}};
      for (int64_t b = target.begin / 128; b < std::min(target.end, unit_end) / 128; ++b) content.valid.insert(b);
    }
    if (task.kind == TaskKind::broadcast) {
      // The root's slot holds the chunk; the others get it.
      const Access& target = task.at(Role::target);
      Content& content = slots[target.buffer];
      if (task.rank == task.root) {
        for (int64_t b = target.begin / 128; b < target.end / 128; ++b) {
          if (content.unit != task.unit || content.valid.count(b) == 0) {
            return fmt::format("broadcast of unit {} whose root {} does not hold it", task.unit, task.root);
          }
        }
      } else {
        if (content.unit != task.unit) content = {task.unit, {}};
        for (int64_t b = target.begin / 128; b < target.end / 128; ++b) content.valid.insert(b);
      }
    }
    for (const Role role : {Role::weights, Role::vocabulary}) {
      const Access* weights = task.find(role);
      if (weights == nullptr) continue;
      const int unit = role == Role::vocabulary ? 0 : task.unit;
      const Content& content = slots[weights->buffer];
      const int64_t blocks = graph.layout.units[static_cast<size_t>(unit)].elements / kBlockElements;
      if (content.unit != unit || static_cast<int64_t>(content.valid.size()) != blocks) {
        return fmt::format("{} of unit {} reads a slot that holds {} of {} blocks of unit {}", name(task.kind), unit,
                           content.valid.size(), blocks, content.unit);
      }
    }
  }
  return "";
}

std::string check_gradients(const StepGraph& graph) {
  const int64_t wire = size_of(graph.plan.wire);
  // What has landed: (unit, chunk) -> rank -> elements. With gpu reduction a rank lands its own shard only.
  std::map<std::pair<int, int>, std::map<int, int64_t>> landed;
  std::map<std::pair<int, int>, int> updates;
  std::map<std::pair<int, int>, int> moments, accumulations;
  std::map<int32_t, std::set<int>> groups;
  for (const Task& task : graph.tasks) {
    const std::pair<int, int> key{task.unit, task.chunk};
    if (task.kind == TaskKind::update && task.part == UpdatePart::moments) ++moments[key];
    if (task.kind == TaskKind::host_accumulate) ++accumulations[key];
    if (task.group >= 0) groups[task.group].insert(task.rank);
    if (task.kind == TaskKind::d2h && task.chunk >= 0) {
      landed[key][task.rank] += (task.at(Role::target).end - task.at(Role::target).begin) / wire;
    }
    if (task.kind == TaskKind::update && task.part != UpdatePart::moments) {
      if (++updates[key] > 1) return graph.describe(static_cast<TaskId>(&task - graph.tasks.data())) + " twice";
    }
  }
  for (const auto& [group, ranks] : groups) {
    if (static_cast<int>(ranks.size()) != graph.ranks()) return fmt::format("group {} lacks ranks", group);
  }
  for (const UnitLayout& unit : graph.layout.units) {
    const int64_t gradients = graph.layout.tied && unit.unit == 0 ? 2 : 1;
    const auto& chunks = graph.chunks[static_cast<size_t>(unit.unit)];
    int64_t covered = 0;
    for (size_t chunk = 0; chunk < chunks.size(); ++chunk) {
      const std::pair<int, int> key{unit.unit, static_cast<int>(chunk)};
      for (int rank = 0; rank < graph.ranks(); ++rank) {
        const bool gpu = graph.plan.reduction == Reduction::gpu;
        const int64_t once =
            graph.plan.waves * (gpu ? chunks[chunk].shard_valid(rank, graph.ranks()) : chunks[chunk].elements);
        if (landed[key][rank] != gradients * once) {
          return fmt::format("{} chunk {} rank {}: {} gradient elements land, {} wanted", unit.name, chunk, rank,
                             landed[key][rank], gradients * once);
        }
      }
      if (moments[key] != (graph.plan.update == UpdatePolicy::split ? 1 : 0)) {
        return fmt::format("{} chunk {} has {} second passes", unit.name, chunk, moments[key]);
      }
      const int accumulated = graph.plan.waves == 1 ? 0 : static_cast<int>(gradients) * graph.plan.waves - 1;
      if (accumulations[key] != accumulated) {
        return fmt::format("{} chunk {} is accumulated {} times", unit.name, chunk, accumulations[key]);
      }
      if (updates[key] != 1) return fmt::format("{} chunk {} has {} updates", unit.name, chunk, updates[key]);
      if (chunks[chunk].begin != covered) return unit.name + ": chunks do not adjoin";
      covered += chunks[chunk].elements;
    }
    if (covered != unit.elements) return unit.name + ": chunks do not cover the unit";
  }
  return "";
}

}  // namespace slidedp::testing
