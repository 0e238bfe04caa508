// What runs left in their logs (run.db of slidedp-run), as far as a correction of the profile needs it.
#pragma once

#include <array>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "model/graph/step_graph.h"
#include "model/spec/model_spec.h"
#include "model/spec/plan.h"
#include "model/timeline/timeline.h"

namespace slidedp {

// Tasks whose time rests on the same rates of the profile.
enum class RateGroup : uint8_t {
  h2d,  // with act_h2d
  d2h,  // with act_d2h
  all_gather,
  reduce_scatter,
  broadcast,
  layer_forward,  // with recompute
  layer_backward,
  head,
  embedding,
  cast,
  host_accumulate,
  norm,
  update
};
inline constexpr int kRateGroups = 13;
std::string_view name(RateGroup);
RateGroup group_of(TaskKind kind, UnitKind unit);

// Seconds that all tasks of each group together took in one step, over all ranks; 0 for a group without tasks.
using BusySeconds = std::array<double, kRateGroups>;
BusySeconds busy_seconds(const StepGraph& graph, const Timeline& timeline);

struct LoggedStep {
  int64_t step = 0;
  double step_s = 0;
  BusySeconds busy_s{};
};

struct LoggedRun {
  std::string name;        // for messages: "run.db, run 1"
  std::string started_at;  // UTC
  std::string program_version, processor;
  ModelSpec model;
  PlanFile plan;                          // with the hardware profile that it was planned for
  std::optional<double> cpu_steal_share;  // of the CPU time that the run wanted
  std::vector<LoggedStep> steps;          // with logged tasks, from the third on (the first two warm up)
};

// All finished runs of a log. `model` is for logs that do not have their model's config. Throws Error that names the
// file for a log without runs, and for a run whose model is not known.
std::vector<LoggedRun> load_runs(const std::filesystem::path& file, const std::optional<ModelSpec>& model);

}  // namespace slidedp
