#include "runtime/run/plan_run.h"

#include <algorithm>
#include <fstream>
#include <iterator>
#include <span>
#include <utility>

#include "model/base/format.h"

namespace slidedp {
namespace {

// Task records of every step would outgrow the model in a long run. `step`: of this plan.
bool logs_tasks(int64_t step) { return step < 20 || step % 100 == 0; }

// So many skipped steps one after another are no accident.
constexpr int64_t kMostSkippedSteps = 10;

void check_host_memory(const MemoryTable& memory, const Plan& plan) {
  const bool on_host = plan.backend == "cpu";  // its "device memory" is host memory too
  const int64_t wanted = memory.host_bytes() + (on_host ? plan.ranks * memory.device_bytes() : 0);
  const HostMemoryLimit limit = available_host_memory();
  if (wanted > limit.bytes) {
    failf(
        "the plan needs {} of host memory, but this process can have {} (limit: {}); free memory, or plan again with "
        "--host-memory {}",
        format_bytes(wanted), format_bytes(limit.bytes), limit.source, format_bytes(limit.bytes));
  }
}

void check_threads(const ThreadSplit& threads) {
  const int cores = usable_cores();
  if (threads.update <= cores && threads.compute_per_rank <= cores) return;
  failf("the plan wants {} update threads and {} compute threads a rank, but this machine has {} cores; plan again",
        threads.update, threads.compute_per_rank, cores);
}

// With it the log says all that a simulation of the plan needs.
std::string config_text(const std::filesystem::path& dir_or_file) {
  std::ifstream stream(std::filesystem::is_directory(dir_or_file) ? dir_or_file / "config.json" : dir_or_file);
  return {std::istreambuf_iterator<char>(stream), {}};
}

}  // namespace

PlanRun::PlanRun(PlanFile file, const ModelSpec& model, StepRange steps, const RunOptions& options,
                 RunEnvironment& environment)
    : file_(std::move(file)),
      options_(options),
      model_(model),
      steps_(steps),
      environment_(environment),
      graph_(build_step_graph(model, file_.train, plan())),
      memory_(memory_table(graph_, model, file_.hardware)),
      predicted_(simulate(graph_, file_.hardware)) {}

void PlanRun::check_machine() const {
  check_host_memory(memory_, plan());
  check_threads(plan().threads);
  if (memory_.device_buffer_bytes > device_budget()) {
    failf("the plan needs {} of device memory a rank, but its budget (hardware.device.memory_bytes) is {}; plan again",
          format_bytes(memory_.device_bytes()), format_bytes(file_.hardware.device.memory_bytes));
  }
  check_backend(plan().backend, plan().ranks, backend_options());
}

BackendOptions PlanRun::backend_options() const {
  return {device_budget(), memory_.device_buffer_bytes + memory_.temporary_bytes, options_.share_gpu,
          options_.deterministic};
}

// What is left for buffers, in bytes.
int64_t PlanRun::device_budget() const {
  const DeviceSpec& device = file_.hardware.device;
  return device.memory_bytes - device.context_bytes - memory_.temporary_bytes;
}

void PlanRun::allocate(HostState& state) {
  backend_ = make_backend(model_, graph_.layout, plan(), backend_options());
  for (const BackendFact& fact : backend_.facts) environment_.print(fmt::format("{}: {}", fact.key, fact.value));
  executor_.emplace(graph_, backend_, state, ExecutorOptions{.update_order = options_.update_order});
  for (const std::string& note : executor_->notes()) environment_.print("note: " + note);
}

void PlanRun::release() {
  executor_.reset();
  backend_ = {};
}

void PlanRun::open_log(const std::filesystem::path& log, const RunInfo& info) {
  log_ = std::make_unique<RunLog>(log, info);
  log_->write_plan(to_yaml(file_));
  log_->write_machine(machine_facts());
  log_->write_machine({{"model_config", config_text(options_.model)}});
  for (const BackendFact& fact : backend_.facts) log_->write_machine({{fact.key, fact.value}});
  log_->write_tasks(graph_, predicted_.timeline);
}

int64_t PlanRun::train(const PackedDataset& data, int64_t run_steps) {
  cpu_time_at_start_ = cpu_time();
  reset_temporary_peak(plan().backend);
  TrainingHooks hooks;
  hooks.stop = [this] {
    const StopRequest request = environment_.stop();
    return request == StopRequest::none && !trouble_.empty() ? StopRequest::finish_step : request;
  };
  hooks.on_step = [this, run_steps](const StepOutcome& outcome) { finish_step(outcome, run_steps); };
  return run_training(*executor_, graph_, data, file_.train, steps_.first, steps_.count, hooks);
}

// What goes wrong beside the training itself ends the run, but only after the export of what was trained.
void PlanRun::finish_step(const StepOutcome& outcome, int64_t run_steps) {
  print_step(outcome, run_steps);
  measured_.add(outcome.timeline);
  skipped_in_a_row_ = outcome.skipped ? skipped_in_a_row_ + 1 : 0;
  if (skipped_in_a_row_ == kMostSkippedSteps && trouble_.empty()) {
    trouble_ = fmt::format(
        "the gradients of the last {} steps were not finite, so these steps were skipped; lower the learning rate or "
        "look at the data. The model was exported as step {} left it",
        kMostSkippedSteps, outcome.input.step + 1 - kMostSkippedSteps);
  }
  try {
    log_step(outcome);
  } catch (const Error& error) {
    if (trouble_.empty()) trouble_ = fmt::format("{} The run was ended and the model exported", error.what());
  }
}

void PlanRun::log_step(const StepOutcome& outcome) {
  const double step_s = outcome.timeline.step_s;
  StepRow row;
  row.step = outcome.input.step;
  row.loss = outcome.loss;
  row.gradient_norm = outcome.gradient_norm;
  row.tokens = file_.train.tokens_per_step();
  row.target_tokens = outcome.input.target_tokens;
  row.step_s = step_s;
  row.tokens_per_s = static_cast<double>(row.tokens) / step_s;
  row.learning_rate = outcome.input.adam.learning_rate;
  row.clip_factor = outcome.clip_factor;
  row.skipped = outcome.skipped;
  row.predicted_step_s = predicted_.step.seconds;
  log_->write_step(row);
  if (logs_tasks(row.step - steps_.first)) log_->write_tasks(graph_, outcome.timeline);
}

void PlanRun::print_step(const StepOutcome& outcome, int64_t run_steps) const {
  const double step_s = outcome.timeline.step_s;
  const int64_t step = outcome.input.step + 1;
  environment_.print(fmt::format("step {}/{}  loss {:.4f}  grad norm {:.4g}  {:.0f} tokens/s  {}/step  ETA {:.0f} s{}",
                                 step, run_steps, outcome.loss, outcome.gradient_norm,
                                 static_cast<double>(file_.train.tokens_per_step()) / step_s, format_seconds(step_s),
                                 static_cast<double>(run_steps - step) * step_s,
                                 outcome.skipped ? "  SKIPPED: gradients are not finite" : ""));
}

// Returns the share of the CPU time that other guests of the host got.
double PlanRun::log_peaks(const MemoryPeaks& peaks) {
  log_->write_machine({{"device_buffer_peak_bytes", std::to_string(peaks.device_buffers)},
                       {"device_buffer_planned_bytes", std::to_string(memory_.device_buffer_bytes)},
                       {"temporary_peak_bytes", std::to_string(peaks.temporaries)},
                       {"temporary_planned_bytes", std::to_string(memory_.temporary_bytes * graph_.ranks())}});
  if (peaks.device_used > 0) {
    log_->write_machine({{"device_used_bytes", std::to_string(peaks.device_used)},
                         {"device_planned_bytes", std::to_string(peaks.device_planned)},
                         {"device_context_planned_bytes", std::to_string(file_.hardware.device.context_bytes)}});
  }
  const CpuTime now = cpu_time();
  const double steal_s = now.steal_s - cpu_time_at_start_.steal_s;
  const double wanted_s = now.busy_s - cpu_time_at_start_.busy_s + steal_s;
  const double steal_share = wanted_s > 0 ? steal_s / wanted_s : 0;
  log_->write_machine({{"cpu_steal_share", fmt::format("{:.4f}", steal_share)}});
  return steal_share;
}

MemoryPeaks PlanRun::memory_peaks() const {
  MemoryPeaks peaks;
  for (const auto& device : backend_.devices) {
    peaks.device_buffers = std::max(peaks.device_buffers, device->memory().peak);
    peaks.device_used = std::max(peaks.device_used, device->used_by_all());
  }
  peaks.temporaries = temporary_memory(plan().backend).peak;
  const int64_t ranks = options_.share_gpu ? graph_.ranks() : 1;
  const int64_t context = file_.hardware.device.context_bytes;
  peaks.device_planned = ranks * (memory_.device_bytes() - context) + context;
  return peaks;
}

void PlanRun::write_report(const std::filesystem::path& report) {
  const MemoryPeaks peaks = memory_peaks();
  const std::string text = run_report(graph_, predicted_, measured_, memory_, peaks, log_peaks(peaks));
  environment_.print(text);
  std::filesystem::path partial = report;
  partial += ".partial";
  try {
    auto file = environment_.files.create(partial);
    file->write(std::as_bytes(std::span(text)));
    file->close();
    environment_.files.rename(partial, report);
  } catch (...) {
    environment_.files.remove_all(partial);
    throw;
  }
}

void PlanRun::end_log(RunStatus status, const std::string& error) {
  if (log_ == nullptr) return;
  try {
    log_->finish(status, error);
  } catch (const std::exception& second) {
    environment_.print(std::string("note: the log could not be closed: ") + second.what());
  }
}

}  // namespace slidedp
