// Predicted step time: an event simulation of the step graph and a closed-form bound below it.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "model/graph/step_graph.h"
#include "model/spec/hardware_spec.h"
#include "model/timeline/timeline.h"

namespace slidedp {

struct ResourceUse {
  std::string name;
  double share = 0;  // of capacity over the step; 1 = saturated
};

struct Simulation {
  PredictedSeconds step;
  PredictedSeconds exposed;  // compute lane idle per step, mean over ranks
  std::string bottleneck;    // the most used lane or resource
  // Lanes and resources, most used first. A lane's use is what its tasks would take alone: the slow-down by sharing
  // counts for the resource that causes it.
  std::vector<ResourceUse> uses;
  bool settled = false;  // the last two steps agreed; else `step` is their mean, at least the bound
  Timeline timeline;     // the reported step; its origin is the step's first start
};

// Runs the first step and steady steps until two in a row agree within 1e-3 of the step time, in duration
// (from the end of the step's last task to the same of the next step) and in every task's place relative to the step's
// end, or six steps have run; reports the last. Steps overlap as the executor's do (engine.h). In-order lanes run tasks
// in graph order; pool workers take the ready task of the earliest step with the smallest `need`. A task costs latency
// + work; running tasks share resources max-min fairly (fair_share.h). Deterministic, thread-safe (no shared state).
// Throws std::logic_error that names a blocked task if the graph cannot run, Error if the profile lacks a rate that the
// plan needs.
Simulation simulate(const StepGraph& graph, const HardwareSpec& hardware);

struct Bound {
  PredictedSeconds step;  // max over lanes, the pool and resources of the steady step's work / rate
  std::string bottleneck;
};
// bound(g, h).step <= simulate(g, h).step, within the tolerance of simulate's stopping rule: the work of one step on a
// lane or resource is done between two places that are a step apart, and those are a step time apart within 1e-3.
Bound bound(const StepGraph& graph, const HardwareSpec& hardware);

struct Price {
  Bound bound;
  std::optional<Simulation> simulation;
};
// Both; no simulation where the bound already says enough.
Price price_graph(const StepGraph& graph, const HardwareSpec& hardware,
                  const std::function<bool(const Bound&)>& enough);

}  // namespace slidedp
