// The engine on random graphs: its rules as invariants, and against a plain simulation in small time steps.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <set>

#include "model/sim/engine.h"
#include "model/sim/simulator.h"
#include "model/sim/task_cost.h"
#include "tests/model/sim/graphs.h"

namespace slidedp {
namespace {

using testing::random_graph;
using testing::random_machine;

std::vector<TaskCost> costs_of(const StepGraph& graph, const CostModel& model) {
  std::vector<TaskCost> costs;
  for (const Task& task : graph.tasks) costs.push_back(model.cost(task));
  return costs;
}

bool in_phase(const Task& task, size_t step) {
  return (task.phases & phase_bit(step == 0 ? Phase::first : Phase::steady)) != 0;
}

constexpr double kRounding = 1e-9;

// ---- invariants ----

void check_dependencies(const StepGraph& graph, const std::vector<SimulatedStep>& steps) {
  for (size_t s = 0; s < steps.size(); ++s) {
    for (size_t i = 0; i < graph.tasks.size(); ++i) {
      const double start = steps[s].records[i].start_s;
      for (TaskId dep : graph.tasks[i].deps) {
        EXPECT_LE(steps[s].records[static_cast<size_t>(dep)].end_s, start + kRounding);
      }
      if (s == 0) continue;
      for (TaskId dep : graph.tasks[i].previous_deps) {
        EXPECT_LE(steps[s - 1].records[static_cast<size_t>(dep)].end_s, start + kRounding);
      }
      if (s > 1) {
        EXPECT_LE(steps[s - 2].end_s, start + kRounding);
      }
    }
  }
}

void check_durations(const StepGraph& graph, std::span<const TaskCost> costs, const std::vector<SimulatedStep>& steps) {
  for (size_t s = 0; s < steps.size(); ++s) {
    for (size_t i = 0; i < graph.tasks.size(); ++i) {
      const TaskRecord& record = steps[s].records[i];
      if (in_phase(graph.tasks[i], s)) {
        EXPECT_GE(record.end_s - record.start_s, costs[i].alone_s() * (1 - kRounding));
      } else {
        EXPECT_EQ(record.end_s, record.start_s);
      }
    }
  }
}

void check_lanes(const StepGraph& graph, const std::vector<SimulatedStep>& steps) {
  for (size_t lane = 0; lane + 1 < graph.lanes.size(); ++lane) {
    double free_from = 0;
    for (const SimulatedStep& step : steps) {
      for (TaskId task : graph.lanes[lane]) {
        const TaskRecord& record = step.records[static_cast<size_t>(task)];
        EXPECT_GE(record.start_s, free_from - kRounding);
        free_from = record.end_s;
      }
    }
  }
}

void check_pool(const StepGraph& graph, const std::vector<SimulatedStep>& steps) {
  std::vector<std::pair<double, int>> changes;  // of the number of busy workers
  for (const SimulatedStep& step : steps) {
    for (TaskId task : graph.lanes.back()) {
      const TaskRecord& record = step.records[static_cast<size_t>(task)];
      if (record.end_s == record.start_s) continue;
      changes.emplace_back(record.start_s + kRounding, +1);
      changes.emplace_back(record.end_s - kRounding, -1);
    }
  }
  std::sort(changes.begin(), changes.end());
  int busy = 0;
  for (const auto& [time, change] : changes) {
    busy += change;
    EXPECT_LE(busy, graph.plan.threads.update);
  }
}

void check_groups(const StepGraph& graph, const std::vector<SimulatedStep>& steps) {
  for (const SimulatedStep& step : steps) {
    std::map<int32_t, std::set<double>> starts;
    for (size_t i = 0; i < graph.tasks.size(); ++i) {
      if (graph.tasks[i].group >= 0) starts[graph.tasks[i].group].insert(step.records[i].start_s);
    }
    for (const auto& [group, times] : starts) EXPECT_EQ(times.size(), 1u) << "group " << group;
  }
}

TEST(RandomGraphs, KeepTheRules) {
  std::mt19937 random(1);
  for (int round = 0; round < 300; ++round) {
    SCOPED_TRACE(round);
    const StepGraph graph = random_graph(random);
    const CostModel model(graph, random_machine(random));
    const std::vector<TaskCost> costs = costs_of(graph, model);
    StepEngine engine(graph, costs, model.resources());
    std::vector<SimulatedStep> steps;
    for (int s = 0; s < 4; ++s) steps.push_back(engine.next_step());
    check_dependencies(graph, steps);
    check_durations(graph, costs, steps);
    check_lanes(graph, steps);
    check_pool(graph, steps);
    check_groups(graph, steps);
    if (HasFailure()) return;
  }
}

// A settled step time is taken from a step that repeats the one before within 1e-3 in length and in every task's place,
// so the work between one step's end and the next may be short of a full step's by as much. (Random graphs have few
// edges between steps, which makes some of them alternate for ever; simulate reports no less than the bound for those.)
TEST(RandomGraphs, BoundIsBelowSimulation) {
  std::mt19937 random(2);
  int settled = 0, tight = 0;
  constexpr int kRounds = 1000;
  for (int round = 0; round < kRounds; ++round) {
    SCOPED_TRACE(round);
    const StepGraph graph = random_graph(random);
    const HardwareSpec machine = random_machine(random);
    const Simulation simulation = simulate(graph, machine);
    const double least = bound(graph, machine).step.seconds;
    EXPECT_LE(least, simulation.step.seconds * (simulation.settled ? 1 + 1e-3 : 1));
    if (simulation.settled) ++settled;
    if (simulation.settled && least > 0.99 * simulation.step.seconds) ++tight;
    if (HasFailure()) return;
  }
  EXPECT_GE(settled, kRounds / 2);
  EXPECT_GE(tight, kRounds / 10);  // the bound is worth something
}

// Where an early and a late step alternate, the step time is what a long run shows.
TEST(RandomGraphs, AlternatingStepsGiveTheirMean) {
  std::mt19937 random(6);
  int alternating = 0;
  for (int round = 0; round < 2000; ++round) {
    const StepGraph graph = random_graph(random);
    const HardwareSpec machine = random_machine(random);
    const Simulation simulation = simulate(graph, machine);
    if (simulation.settled) continue;
    const CostModel model(graph, machine);
    const std::vector<TaskCost> costs = costs_of(graph, model);
    StepEngine engine(graph, costs, model.resources());
    std::vector<double> ends;
    for (int s = 0; s < 24; ++s) ends.push_back(engine.next_step().end_s);
    bool period_two = true;
    for (size_t s = 6; s < ends.size(); ++s) {
      const double two = ends[s] - ends[s - 2], two_before = ends[s - 1] - ends[s - 3];
      period_two = period_two && std::abs(two - two_before) < 1e-6 * two;
    }
    const double mean = (ends[23] - ends[13]) / 10;
    // Below the bound, 24 steps are no long run: a lane that began ahead is still losing its lead.
    if (!period_two || mean < bound(graph, machine).step.seconds) continue;
    ++alternating;
    EXPECT_NEAR(simulation.step.seconds, mean, 1e-3 * mean) << "round " << round;
  }
  EXPECT_GT(alternating, 10);
}

// ---- against small time steps ----

// Executes the same rules in ticks: at each tick every task that may start does, every running task advances by speed
// times tick. Pool workers never run out here (RandomGraphOptions::enough_workers), so the pool needs no order.
class TickSimulator {
 public:
  TickSimulator(const StepGraph& graph, std::span<const TaskCost> costs, std::span<const Resource> resources,
                size_t steps)
      : graph_(&graph), costs_(costs), sharing_(resources) {
    for (size_t s = 0; s < steps; ++s) {
      for (size_t i = 0; i < graph.tasks.size(); ++i) {
        const bool runs = in_phase(graph.tasks[i], s);
        jobs_.push_back({s, i, runs ? costs[i].latency_s : 0, runs ? costs[i].solo_s : 0});
      }
    }
    for (const TaskCost& cost : costs) {
      loads_.emplace_back();
      for (const Demand& demand : cost.demands) {
        loads_.back().push_back({demand.resource, demand.amount / cost.solo_s});
      }
    }
  }

  // End of every (step, task), in that order.
  std::vector<double> run(double tick) {
    for (; std::any_of(jobs_.begin(), jobs_.end(), [](const Job& job) { return job.end_s < 0; }); now_ += tick) {
      while (start_and_finish()) {
      }
      advance(tick);
    }
    std::vector<double> ends;
    for (const Job& job : jobs_) ends.push_back(job.end_s);
    return ends;
  }

 private:
  struct Job {
    size_t step, task;
    double latency_s, work_s;  // left
    bool started = false;
    double end_s = -1;
  };
  const Job& job(size_t step, size_t task) const { return jobs_[step * graph_->tasks.size() + task]; }
  bool done(size_t step, size_t task) const { return job(step, task).end_s >= 0; }

  bool may_start_alone(const Job& candidate) const {
    const Task& task = graph_->tasks[candidate.task];
    for (TaskId dep : task.deps) {
      if (!done(candidate.step, static_cast<size_t>(dep))) return false;
    }
    for (size_t s = 0; s < candidate.step; ++s) {
      for (TaskId dep : task.previous_deps) {
        if (s + 1 == candidate.step && !done(s, static_cast<size_t>(dep))) return false;
      }
      for (size_t i = 0; s + 2 <= candidate.step && i < graph_->tasks.size(); ++i) {
        if (!done(s, i)) return false;
      }
    }
    if (task.lane.kind == LaneKind::update) return true;
    for (const Job& other : jobs_) {
      const bool before = std::pair(other.step, other.task) < std::pair(candidate.step, candidate.task);
      if (before && graph_->tasks[other.task].lane == task.lane && other.end_s < 0) return false;
    }
    return true;
  }

  bool may_start(const Job& candidate) const {
    const int32_t group = graph_->tasks[candidate.task].group;
    if (group < 0) return may_start_alone(candidate);
    return std::all_of(jobs_.begin(), jobs_.end(), [&](const Job& other) {
      return other.step != candidate.step || graph_->tasks[other.task].group != group || other.started ||
             may_start_alone(other);
    });
  }

  bool start_and_finish() {
    bool changed = false;
    for (Job& job : jobs_) {
      if (!job.started && may_start(job)) job.started = changed = true;
      if (job.started && job.end_s < 0 && job.latency_s <= 0 && job.work_s <= 0) {
        job.end_s = now_;
        changed = true;
      }
    }
    return changed;
  }

  void advance(double tick) {
    std::vector<Job*> working;
    std::vector<std::span<const Load>> loads;
    for (Job& job : jobs_) {
      if (!job.started || job.end_s >= 0) continue;
      if (job.latency_s > 0) {
        job.latency_s -= tick;
      } else {
        working.push_back(&job);
        loads.emplace_back(loads_[job.task]);
      }
    }
    std::vector<double> speeds(working.size());
    sharing_.share(loads, speeds);
    for (size_t i = 0; i < working.size(); ++i) working[i]->work_s -= tick * speeds[i];
  }

  const StepGraph* graph_;
  std::span<const TaskCost> costs_;
  FairShare sharing_;
  std::vector<Job> jobs_;
  std::vector<std::vector<Load>> loads_;
  double now_ = 0;
};

TEST(RandomGraphs, AgreeWithSmallTimeSteps) {
  std::mt19937 random(3);
  constexpr double kTick = 1e-3;  // tasks take 0.05 to 1 s and more
  constexpr size_t kSteps = 3;
  for (int round = 0; round < 25; ++round) {
    SCOPED_TRACE(round);
    const StepGraph graph = random_graph(random, {.max_tasks = 14, .enough_workers = true});
    const CostModel model(graph, random_machine(random));
    const std::vector<TaskCost> costs = costs_of(graph, model);
    StepEngine engine(graph, costs, model.resources());
    // One step more than compared: it runs beside the last of them.
    const std::vector<double> ends = TickSimulator(graph, costs, model.resources(), kSteps + 1).run(kTick);
    // Latency and work are each rounded up to ticks, for each task of the longest possible chain of tasks; a task that
    // is late by that much slows its neighbours for no longer than that.
    const double tolerance = 2 * kTick * static_cast<double>(graph.tasks.size() * kSteps);
    for (size_t s = 0; s < kSteps; ++s) {
      const SimulatedStep step = engine.next_step();
      for (size_t i = 0; i < graph.tasks.size(); ++i) {
        EXPECT_NEAR(step.records[i].end_s, ends[s * graph.tasks.size() + i], tolerance)
            << "step " << s << " task " << i;
      }
    }
    if (HasFailure()) return;
  }
}

}  // namespace
}  // namespace slidedp
