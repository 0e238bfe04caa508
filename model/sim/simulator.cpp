#include "model/sim/simulator.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "model/base/format.h"
#include "model/sim/engine.h"
#include "model/sim/task_cost.h"

namespace slidedp {
namespace {

constexpr double kSteady = 1e-3;  // of the step time
constexpr int kMaxSteps = 6;

struct LaneLoad {
  std::string name;
  double seconds = 0;  // of one steady step's work at full rate
};

std::vector<TaskCost> task_costs(const StepGraph& graph, const CostModel& model) {
  std::vector<TaskCost> costs;
  costs.reserve(graph.tasks.size());
  for (const Task& task : graph.tasks) costs.push_back(model.cost(task));
  return costs;
}

std::string lane_name(const StepGraph& graph, size_t lane) {
  if (lane + 1 == graph.lanes.size()) return "update workers";
  return fmt::format("rank {} {} lane", lane / kDeviceLanes, name(static_cast<LaneKind>(lane % kDeviceLanes)));
}

// What one steady step needs of every lane and resource, in seconds, greatest first.
std::vector<LaneLoad> steady_loads(const StepGraph& graph, const CostModel& model, std::span<const TaskCost> costs) {
  const auto steady = [&](TaskId task) {
    return (graph.tasks[static_cast<size_t>(task)].phases & phase_bit(Phase::steady)) != 0;
  };
  std::vector<LaneLoad> loads;
  for (size_t lane = 0; lane < graph.lanes.size(); ++lane) {
    double seconds = 0;
    for (TaskId task : graph.lanes[lane]) {
      if (steady(task)) seconds += costs[static_cast<size_t>(task)].alone_s();
    }
    const bool pool = lane + 1 == graph.lanes.size();
    loads.push_back({lane_name(graph, lane), pool ? seconds / std::max(1, graph.plan.threads.update) : seconds});
  }
  const std::vector<Resource>& resources = model.resources();
  std::vector<double> amounts(resources.size(), 0);
  for (size_t task = 0; task < graph.tasks.size(); ++task) {
    if (!steady(static_cast<TaskId>(task))) continue;
    for (const Demand& demand : costs[task].demands) amounts[static_cast<size_t>(demand.resource)] += demand.amount;
  }
  for (size_t r = 0; r < resources.size(); ++r) {
    if (amounts[r] > 0) loads.push_back({resources[r].name, amounts[r] / resources[r].capacity});
  }
  std::stable_sort(loads.begin(), loads.end(),
                   [](const LaneLoad& a, const LaneLoad& b) { return a.seconds > b.seconds; });
  return loads;
}

// Whether every task stands where it stood in the step before, seen from the step's end.
bool same_places(const SimulatedStep& a, const SimulatedStep& b, double tolerance_s) {
  for (size_t i = 0; i < a.records.size(); ++i) {
    const double start = (a.records[i].start_s - a.end_s) - (b.records[i].start_s - b.end_s);
    const double end = (a.records[i].end_s - a.end_s) - (b.records[i].end_s - b.end_s);
    if (std::abs(start) > tolerance_s || std::abs(end) > tolerance_s) return false;
  }
  return true;
}

struct SteadyStep {
  SimulatedStep step;
  double duration_s = 0;
  bool settled = false;
};

SteadyStep run_to_steady(StepEngine& engine) {
  SimulatedStep previous = engine.next_step();
  double previous_s = previous.end_s;
  for (int steps = 2;; ++steps) {
    SimulatedStep last = engine.next_step();
    const double last_s = last.end_s - previous.end_s;
    const double tolerance_s = kSteady * last_s;
    const bool settled = std::abs(last_s - previous_s) <= tolerance_s && same_places(last, previous, tolerance_s);
    if (settled || steps == kMaxSteps) {
      // Steps that do not settle alternate, as a rule (an early and a late one): the mean is what a run shows.
      return {std::move(last), settled ? last_s : 0.5 * (last_s + previous_s), settled};
    }
    previous = std::move(last);
    previous_s = last_s;
  }
}

double mean_exposed(const StepGraph& graph, const SteadyStep& steady) {
  double idle = 0;
  for (int rank = 0; rank < graph.ranks(); ++rank) {
    double busy = 0;
    for (TaskId task : graph.lanes[static_cast<size_t>(graph.lane_index({LaneKind::compute, rank}))]) {
      const TaskRecord& record = steady.step.records[static_cast<size_t>(task)];
      busy += record.end_s - record.start_s;
    }
    idle += std::max(0.0, steady.duration_s - busy);
  }
  return graph.ranks() > 0 ? idle / graph.ranks() : 0;
}

Timeline predicted_timeline(SteadyStep steady) {
  Timeline timeline;
  timeline.source = TimelineSource::predicted;
  timeline.step_s = steady.duration_s;
  double origin = std::numeric_limits<double>::infinity();
  for (const TaskRecord& record : steady.step.records) origin = std::min(origin, record.start_s);
  timeline.records = std::move(steady.step.records);
  for (TaskRecord& record : timeline.records) {
    record.start_s -= origin;
    record.end_s -= origin;
  }
  return timeline;
}

// A step graph with what its tasks cost on a machine.
class Pricing {
 public:
  Pricing(const StepGraph& graph, const HardwareSpec& hardware)
      : graph_(graph),
        model_(graph, hardware),
        costs_(task_costs(graph, model_)),
        loads_(steady_loads(graph, model_, costs_)) {}

  Bound bound() const {
    if (loads_.empty()) return {};
    return {{loads_.front().seconds}, loads_.front().name};
  }

  Simulation simulate() const {
    StepEngine engine(graph_, costs_, model_.resources());
    SteadyStep steady = run_to_steady(engine);
    if (!steady.settled && !loads_.empty()) {
      // In steps that do not settle work moves across the step's ends, so a few of them can be too short. No run is
      // shorter than the bound in the long term.
      steady.duration_s = std::max(steady.duration_s, loads_.front().seconds);
    }
    Simulation result;
    result.step = {steady.duration_s};
    result.exposed = {mean_exposed(graph_, steady)};
    result.settled = steady.settled;
    for (const LaneLoad& load : loads_) {
      result.uses.push_back({load.name, steady.duration_s > 0 ? load.seconds / steady.duration_s : 0});
    }
    if (!result.uses.empty()) result.bottleneck = result.uses.front().name;
    result.timeline = predicted_timeline(std::move(steady));
    return result;
  }

 private:
  const StepGraph& graph_;
  CostModel model_;
  std::vector<TaskCost> costs_;
  std::vector<LaneLoad> loads_;
};

}  // namespace

Simulation simulate(const StepGraph& graph, const HardwareSpec& hardware) {
  return Pricing(graph, hardware).simulate();
}

Bound bound(const StepGraph& graph, const HardwareSpec& hardware) { return Pricing(graph, hardware).bound(); }

Price price_graph(const StepGraph& graph, const HardwareSpec& hardware,
                  const std::function<bool(const Bound&)>& enough) {
  const Pricing pricing(graph, hardware);
  Price result{pricing.bound(), std::nullopt};
  if (!enough(result.bound)) result.simulation = pricing.simulate();
  return result;
}

}  // namespace slidedp
