#include "runtime/exec/run_session.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <utility>
#include <vector>

#include "model/base/format.h"
#include "model/graph/memory.h"
#include "model/sim/simulator.h"
#include "runtime/data/packed_dataset.h"
#include "runtime/exec/run_report.h"
#include "runtime/host/machine_facts.h"
#include "runtime/io/checkpoint_hf.h"
#include "runtime/log/run_log.h"

namespace slidedp {
namespace {

namespace fs = std::filesystem;

// Task records of every step would outgrow the model in a long run.
bool logs_tasks(int64_t step) { return step < 20 || step % 100 == 0; }

// So many skipped steps one after another are no accident.
constexpr int64_t kMostSkippedSteps = 10;

void check_out(const RunOptions& options) {
  if (options.out.empty()) fail("--out is empty; name a run directory");
  std::error_code ignored;
  if (fs::equivalent(options.model, options.out / "hf", ignored)) {
    failf("--model {} is what this run would replace; choose another --out", options.model.string());
  }
  if (!fs::exists(options.out)) return;
  if (!fs::is_directory(options.out)) failf("--out {} is not a directory; choose another", options.out.string());
  if (!options.overwrite) {
    failf("{} exists; choose another --out, or say --overwrite to replace the results in it", options.out.string());
  }
}

// The run directory, held by this run alone until the object goes.
class RunDirectory {
 public:
  explicit RunDirectory(const RunOptions& options) {
    std::error_code problem;
    const bool made = fs::create_directories(options.out, problem);
    if (problem) failf("cannot create --out {}: {}", options.out.string(), problem.message());
    if (!made) check_out(options);  // another run may have made it meanwhile
    handle_ = open(options.out.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (handle_ < 0 || flock(handle_, LOCK_EX | LOCK_NB) != 0) {
      const bool busy = handle_ >= 0 && errno == EWOULDBLOCK;
      const std::string reason = busy ? "another slidedp-run is writing to it" : std::strerror(errno);
      if (handle_ >= 0) close(handle_);
      failf("cannot use --out {}: {}", options.out.string(), reason);
    }
    for (const char* old : {"run.db", "run.db-wal", "run.db-shm", "report.md"}) fs::remove(options.out / old, problem);
  }
  ~RunDirectory() { close(handle_); }
  RunDirectory(const RunDirectory&) = delete;
  RunDirectory& operator=(const RunDirectory&) = delete;

 private:
  int handle_ = -1;
};

// The export needs room at the end of the run: better to know now.
void check_disk(const RunOptions& options, const ModelLayout& layout) {
  fs::path folder = fs::absolute(options.out);
  while (!fs::exists(folder)) folder = folder.parent_path();
  if (!fs::is_directory(folder) || access(folder.c_str(), W_OK) != 0) {
    failf("cannot create --out {}: {} is no directory that may be written to", options.out.string(), folder.string());
  }
  std::error_code problem;
  const fs::space_info space = fs::space(folder, problem);
  constexpr int64_t log_and_tokenizer = int64_t{64} << 20;
  const int64_t wanted = layout.elements * 2 + log_and_tokenizer;
  if (!problem && static_cast<int64_t>(space.available) < wanted) {
    failf("{} has {} free, but the trained model and the log take about {}; free some space or choose another --out",
          folder.string(), format_bytes(static_cast<int64_t>(space.available)), format_bytes(wanted));
  }
}

PlanFile read_plan(const RunOptions& options) {
  check_out(options);
  return load_plan(options.plan);
}

ModelSpec read_model(const RunOptions& options, const PlanFile& file) {
  ModelSpec model = load_model_spec(options.model);
  validate_plan(file.plan, model, file.train);
  return model;
}

int64_t checked_steps(int64_t steps) {
  if (steps < 1) failf("--steps {}: must be at least 1", steps);
  return steps;
}

// Everything that a run reads, checked before anything is allocated or written.
struct RunInputs {
  explicit RunInputs(const RunOptions& options)
      : file(read_plan(options)),
        model(read_model(options, file)),
        steps(checked_steps(options.steps.value_or(file.train.steps))),
        data(options.data, model, file.plan.seq) {
    data.require_rows(file.train.batch_rows);
    check_targets(data, file.train, steps);
  }
  PlanFile file;
  ModelSpec model;
  int64_t steps;
  PackedDataset data;
};

void check_host_memory(const MemoryTable& memory, const Plan& plan) {
  const bool on_host = plan.backend == "cpu";  // its "device memory" is host memory too
  const int64_t wanted = memory.host_bytes() + (on_host ? plan.ranks * memory.device_bytes() : 0);
  const int64_t available = available_host_bytes();
  if (wanted > available) {
    failf(
        "the plan needs {} of host memory, but this process can have {}; free memory, or plan again with "
        "--host-memory {}",
        format_bytes(wanted), format_bytes(available), format_bytes(available));
  }
}

class Session {
 public:
  Session(const RunOptions& options, RunEnvironment& environment)
      : options_(options),
        environment_(environment),
        inputs_(options),
        graph_(build_step_graph(inputs_.model, inputs_.file.train, plan())),
        memory_(memory_table(graph_, inputs_.model, inputs_.file.hardware)),
        predicted_(simulate(graph_, inputs_.file.hardware)),
        export_files_(read_export_files(options.model)) {}

  ExitCode run() {
    check_host_memory(memory_, plan());
    check_disk(options_, graph_.layout);
    check_device_memory();
    check_threads();
    backend_ =
        make_backend(inputs_.model, graph_.layout, plan(),
                     {device_budget(), memory_.device_buffer_bytes + memory_.temporary_bytes, options_.share_gpu});
    load();
    Executor executor(graph_, backend_, *state_);
    environment_.writing_starts();
    const RunDirectory directory(options_);
    try {
      open_log();
      return train(executor);
    } catch (const Error& error) {
      end_log(error.code() == ExitCode::interrupted ? RunStatus::interrupted : RunStatus::failed, error.what());
      throw;
    } catch (const std::exception& error) {
      end_log(RunStatus::failed, error.what());
      throw;
    }
  }

 private:
  const Plan& plan() const { return inputs_.file.plan; }

  void check_threads() const {
    const int cores = usable_cores();
    const ThreadSplit& threads = plan().threads;
    if (threads.update <= cores && threads.compute_per_rank <= cores) return;
    failf("the plan wants {} update threads and {} compute threads a rank, but this machine has {} cores; plan again",
          threads.update, threads.compute_per_rank, cores);
  }

  // What is left for buffers, in bytes.
  int64_t device_budget() const {
    const DeviceSpec& device = inputs_.file.hardware.device;
    return device.memory_bytes - device.context_bytes - memory_.temporary_bytes;
  }

  void check_device_memory() const {
    if (memory_.device_buffer_bytes <= device_budget()) return;
    failf("the plan needs {} of device memory a rank, but its budget (hardware.device.memory_bytes) is {}; plan again",
          format_bytes(memory_.device_bytes()), format_bytes(inputs_.file.hardware.device.memory_bytes));
  }

  // After a failure: the log must not hide what happened before it.
  void end_log(RunStatus status, const std::string& error) {
    if (log_ == nullptr) return;
    try {
      log_->finish(status, error);
    } catch (const std::exception& second) {
      environment_.print(std::string("note: the log could not be closed: ") + second.what());
    }
  }

  void load() {
    const auto start = std::chrono::steady_clock::now();
    state_.emplace(graph_.layout);
    for (const std::string& note : load_hf_checkpoint(options_.model, *state_, usable_cores())) {
      environment_.print("note: " + note);
    }
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
    environment_.print(fmt::format("loaded {} parameters into {} of host state in {}", inputs_.model.parameters(),
                                   format_bytes(state_->bytes()), format_seconds(took.count())));
  }

  void open_log() {
    log_ = std::make_unique<RunLog>(
        options_.out / "run.db",
        RunInfo{SLIDEDP_VERSION, options_.command_line, inputs_.model.fingerprint(), inputs_.file.train.seed});
    log_->write_plan(to_yaml(inputs_.file));
    log_->write_machine(machine_facts());
    log_->write_tasks(graph_, predicted_.timeline);
  }

  ExitCode train(Executor& executor) {
    cpu_time_at_start_ = cpu_time();
    reset_temporary_peak(plan().backend);
    TrainingHooks hooks;
    hooks.stop = [this] {
      const StopRequest request = environment_.stop();
      return request == StopRequest::none && !trouble_.empty() ? StopRequest::finish_step : request;
    };
    hooks.on_step = [this](const StepOutcome& outcome) { finish_step(outcome); };
    const int64_t finished = run_training(executor, graph_, inputs_.data, inputs_.file.train, inputs_.steps, hooks);
    const bool interrupted = environment_.stop() != StopRequest::none;
    if (finished > 0) {
      export_hf_checkpoint(environment_.files, export_files_, *state_, options_.out / "hf");
      environment_.print(
          fmt::format("exported the model after step {} to {}", finished, (options_.out / "hf").string()));
    }
    if (!trouble_.empty()) fail(trouble_);
    if (finished > 0) write_report();
    log_->finish(interrupted ? RunStatus::interrupted : RunStatus::ok);
    return interrupted ? ExitCode::interrupted : ExitCode::ok;
  }

  // What goes wrong beside the training itself ends the run, but only after the export of what was trained.
  void finish_step(const StepOutcome& outcome) {
    print_step(outcome);
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

  void log_step(const StepOutcome& outcome) {
    const double step_s = outcome.timeline.step_s;
    const TrainSpec& train = inputs_.file.train;
    StepRow row;
    row.step = outcome.input.step;
    row.loss = outcome.loss;
    row.gradient_norm = outcome.gradient_norm;
    row.tokens = train.tokens_per_step();
    row.target_tokens = outcome.input.target_tokens;
    row.step_s = step_s;
    row.tokens_per_s = static_cast<double>(row.tokens) / step_s;
    row.learning_rate = outcome.input.adam.learning_rate;
    row.clip_factor = outcome.clip_factor;
    row.skipped = outcome.skipped;
    row.predicted_step_s = predicted_.step.seconds;
    log_->write_step(row);
    if (logs_tasks(row.step)) log_->write_tasks(graph_, outcome.timeline);
  }

  void print_step(const StepOutcome& outcome) {
    const double step_s = outcome.timeline.step_s;
    const int64_t step = outcome.input.step + 1;
    environment_.print(fmt::format(
        "step {}/{}  loss {:.4f}  grad norm {:.4g}  {:.0f} tokens/s  {}/step  ETA {:.0f} s{}", step, inputs_.steps,
        outcome.loss, outcome.gradient_norm, static_cast<double>(inputs_.file.train.tokens_per_step()) / step_s,
        format_seconds(step_s), static_cast<double>(inputs_.steps - step) * step_s,
        outcome.skipped ? "  SKIPPED: gradients are not finite" : ""));
  }

  void write_report() {
    MemoryPeaks peaks;
    for (const auto& device : backend_.devices)
      peaks.device_buffers = std::max(peaks.device_buffers, device->memory().peak);
    peaks.temporaries = temporary_memory(plan().backend).peak;
    log_->write_machine({{"device_buffer_peak_bytes", std::to_string(peaks.device_buffers)},
                         {"device_buffer_planned_bytes", std::to_string(memory_.device_buffer_bytes)},
                         {"temporary_peak_bytes", std::to_string(peaks.temporaries)},
                         {"temporary_planned_bytes", std::to_string(memory_.temporary_bytes * graph_.ranks())}});
    const CpuTime now = cpu_time();
    const double steal_s = now.steal_s - cpu_time_at_start_.steal_s;
    const double wanted_s = now.busy_s - cpu_time_at_start_.busy_s + steal_s;
    const double steal_share = wanted_s > 0 ? steal_s / wanted_s : 0;
    log_->write_machine({{"cpu_steal_share", fmt::format("{:.4f}", steal_share)}});
    const std::string report = run_report(graph_, predicted_, measured_, memory_, peaks, steal_share);
    environment_.print(report);
    const fs::path partial = options_.out / "report.md.partial";
    try {
      auto file = environment_.files.create(partial);
      file->write(std::as_bytes(std::span(report)));
      file->close();
      environment_.files.rename(partial, options_.out / "report.md");
    } catch (...) {
      environment_.files.remove_all(partial);
      throw;
    }
  }

  const RunOptions& options_;
  RunEnvironment& environment_;
  RunInputs inputs_;
  StepGraph graph_;
  MemoryTable memory_;
  Simulation predicted_;
  ExportFiles export_files_;
  Backend backend_;
  std::optional<HostState> state_;
  std::unique_ptr<RunLog> log_;
  MeasuredSteps measured_;
  std::string trouble_;  // what ends the run after the steps under way
  int64_t skipped_in_a_row_ = 0;
  CpuTime cpu_time_at_start_;
};

}  // namespace

ExitCode run_session(const RunOptions& options, RunEnvironment& environment) {
  return Session(options, environment).run();
}

}  // namespace slidedp
