#include "model/calibration/run_log_reader.h"

#include <SQLiteCpp/SQLiteCpp.h>

#include <algorithm>
#include <map>

#include "model/base/format.h"

namespace slidedp {
namespace {

constexpr int kWarmUpSteps = 2;

std::optional<TaskKind> task_kind(std::string_view text) {
  for (int i = 0; i < kTaskKinds; ++i) {
    if (name(static_cast<TaskKind>(i)) == text) return static_cast<TaskKind>(i);
  }
  return std::nullopt;
}

// Of tasks without a unit (the batch, the loss) only the kind counts.
UnitKind unit_kind(const ModelLayout& layout, int unit) {
  return unit < 0 ? UnitKind::layer : layout.units.at(static_cast<size_t>(unit)).kind;
}

std::string text_or_empty(SQLite::Database& database, const std::string& query, int64_t run,
                          const std::string& key = "") {
  SQLite::Statement select(database, query);
  select.bind(1, run);
  if (!key.empty()) select.bind(2, key);
  return select.executeStep() ? select.getColumn(0).getString() : "";
}

std::string fact(SQLite::Database& database, int64_t run, const std::string& key) {
  return text_or_empty(database, "SELECT value FROM machine WHERE run_id = ? AND key = ?", run, key);
}

PlanFile plan_of(SQLite::Database& database, int64_t id, const std::string& name) {
  const std::string yaml = text_or_empty(database, "SELECT yaml FROM plan WHERE run_id = ?", id);
  if (yaml.empty()) failf("{}: the log does not hold its plan.", name);
  try {
    return parse_plan(yaml, "the plan");
  } catch (const Error& error) {
    failf("{}: this program cannot read its plan, which another version wrote ({}).", name, error.what());
  }
}

ModelSpec model_of(SQLite::Database& database, int64_t id, const LoggedRun& run,
                   const std::optional<ModelSpec>& given) {
  const std::string config = fact(database, id, "model_config");
  if (!given && config.empty()) {
    failf("{}: the log does not hold its model's config (it was written by an older program); name it with --model.",
          run.name);
  }
  const ModelSpec model = given ? *given : parse_model_spec(config, run.name);
  if (model.fingerprint() != run.plan.plan.model) {
    failf("{}: its plan is for the model {}, not for {} ({}); name the right one with --model.", run.name,
          run.plan.plan.model, model.fingerprint(), model.name);
  }
  return model;
}

std::vector<LoggedStep> steps_of(SQLite::Database& database, int64_t id, const ModelSpec& model) {
  SQLite::Statement select(database, "SELECT step, step_s FROM steps WHERE run_id = ? AND skipped = 0 ORDER BY step");
  select.bind(1, id);
  std::map<int64_t, LoggedStep> steps;
  for (int seen = 0; select.executeStep(); ++seen) {
    const int64_t step = select.getColumn(0).getInt64();
    if (seen >= kWarmUpSteps) steps[step] = {step, select.getColumn(1).getDouble(), {}};
  }
  const ModelLayout layout = make_layout(model);
  SQLite::Statement tasks(database,
                          "SELECT step, kind, unit, sum(end_s - start_s) FROM tasks WHERE run_id = ? AND source = "
                          "'measured' GROUP BY step, kind, unit");
  tasks.bind(1, id);
  while (tasks.executeStep()) {
    const auto step = steps.find(tasks.getColumn(0).getInt64());
    const auto kind = task_kind(tasks.getColumn(1).getString());
    if (step == steps.end() || !kind) continue;
    const int unit = tasks.getColumn(2).isNull() ? -1 : tasks.getColumn(2).getInt();
    const RateGroup group = group_of(*kind, unit_kind(layout, unit));
    step->second.busy_s[static_cast<size_t>(group)] += tasks.getColumn(3).getDouble();
  }
  std::vector<LoggedStep> logged;
  for (const auto& [number, step] : steps) {
    if (std::any_of(step.busy_s.begin(), step.busy_s.end(), [](double seconds) { return seconds > 0; })) {
      logged.push_back(step);
    }
  }
  return logged;
}

LoggedRun read_run(SQLite::Database& database, int64_t id, const std::string& file,
                   const std::optional<ModelSpec>& model) {
  LoggedRun run;
  run.name = fmt::format("{}, run {}", file, id);
  run.started_at = text_or_empty(database, "SELECT started_at FROM runs WHERE id = ?", id);
  run.program_version = text_or_empty(database, "SELECT program_version FROM runs WHERE id = ?", id);
  run.processor = fact(database, id, "cpu");
  run.plan = plan_of(database, id, run.name);
  run.model = model_of(database, id, run, model);
  if (const std::string steal = fact(database, id, "cpu_steal_share"); !steal.empty()) {
    run.cpu_steal_share = std::stod(steal);
  }
  run.steps = steps_of(database, id, run.model);
  return run;
}

}  // namespace

std::string_view name(RateGroup group) {
  constexpr std::array<std::string_view, kRateGroups> names{
      "h2d",  "d2h",       "all_gather", "reduce_scatter",  "broadcast", "layer_forward", "layer_backward",
      "head", "embedding", "cast",       "host_accumulate", "norm",      "update"};
  return names[static_cast<size_t>(group)];
}

RateGroup group_of(TaskKind kind, UnitKind unit) {
  switch (kind) {
    case TaskKind::h2d:
    case TaskKind::act_h2d:
      return RateGroup::h2d;
    case TaskKind::d2h:
    case TaskKind::act_d2h:
      return RateGroup::d2h;
    case TaskKind::all_gather:
      return RateGroup::all_gather;
    case TaskKind::reduce_scatter:
      return RateGroup::reduce_scatter;
    case TaskKind::broadcast:
      return RateGroup::broadcast;
    case TaskKind::fwd:
    case TaskKind::recompute:
      return unit == UnitKind::embedding ? RateGroup::embedding : RateGroup::layer_forward;
    case TaskKind::bwd:
      return unit == UnitKind::embedding ? RateGroup::embedding : RateGroup::layer_backward;
    case TaskKind::head:
      return RateGroup::head;
    case TaskKind::cast:
      return RateGroup::cast;
    case TaskKind::host_accumulate:
      return RateGroup::host_accumulate;
    case TaskKind::norm:
      return RateGroup::norm;
    case TaskKind::update:
      return RateGroup::update;
  }
  throw std::logic_error("unknown TaskKind");
}

BusySeconds busy_seconds(const StepGraph& graph, const Timeline& timeline) {
  BusySeconds busy{};
  for (const TaskRecord& record : timeline.records) {
    const Task& task = graph.tasks[static_cast<size_t>(record.task)];
    const RateGroup group = group_of(task.kind, unit_kind(graph.layout, task.unit));
    // A rank's task stands for those of all ranks that are alike.
    const int times = task.rank >= 0 ? graph.alike : 1;
    busy[static_cast<size_t>(group)] += times * (record.end_s - record.start_s);
  }
  return busy;
}

std::vector<LoggedRun> load_runs(const std::filesystem::path& file, const std::optional<ModelSpec>& model) {
  try {
    SQLite::Database database(file.string(), SQLite::OPEN_READONLY);
    std::vector<int64_t> ids;
    SQLite::Statement select(database, "SELECT id FROM runs WHERE status IN ('ok', 'interrupted') ORDER BY id");
    while (select.executeStep()) ids.push_back(select.getColumn(0).getInt64());
    if (ids.empty()) failf("{}: holds no finished run to learn from.", file.string());
    std::vector<LoggedRun> runs;
    for (int64_t id : ids) runs.push_back(read_run(database, id, file.string(), model));
    return runs;
  } catch (const SQLite::Exception& error) {
    failf("{}: the run log cannot be read: {}.", file.string(), error.what());
  }
}

}  // namespace slidedp
