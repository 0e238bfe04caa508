#include "runtime/exec/run_session.h"

#include <chrono>
#include <cmath>
#include <thread>
#include <utility>
#include <vector>

#include "model/base/format.h"
#include "model/graph/memory.h"
#include "model/sim/simulator.h"
#include "runtime/data/packed_dataset.h"
#include "runtime/exec/run_report.h"
#include "runtime/io/checkpoint_hf.h"
#include "runtime/log/run_log.h"

namespace slidedp {
namespace {

// Task records of every step would outgrow the model in a long run.
bool logs_tasks(int64_t step) { return step < 20 || step % 100 == 0; }

void check_out(const RunOptions& options) {
  if (!options.overwrite && std::filesystem::exists(options.out)) {
    failf("{} exists; choose another --out, or say --overwrite to replace the results in it", options.out.string());
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
        predicted_(simulate(graph_, inputs_.file.hardware)) {}

  ExitCode run() {
    check_host_memory(memory_, plan());
    const HardwareSpec& hardware = inputs_.file.hardware;
    const int64_t budget = hardware.device.memory_bytes - hardware.device.context_bytes - memory_.temporary_bytes;
    backend_ = make_backend(inputs_.model, graph_.layout, plan(), budget);
    load();
    Executor executor(graph_, backend_, *state_);
    environment_.writing_starts();
    open_log();
    try {
      return train(executor);
    } catch (const Error& error) {
      log_->finish(error.code() == ExitCode::interrupted ? RunStatus::interrupted : RunStatus::failed, error.what());
      throw;
    } catch (const std::exception& error) {
      log_->finish(RunStatus::failed, error.what());
      throw;
    }
  }

 private:
  const Plan& plan() const { return inputs_.file.plan; }

  void load() {
    const auto start = std::chrono::steady_clock::now();
    state_.emplace(graph_.layout);
    const int threads = static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
    for (const std::string& note : load_hf_checkpoint(options_.model, *state_, threads)) {
      environment_.print("note: " + note);
    }
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
    environment_.print(fmt::format("loaded {} parameters into {} of host state in {}", inputs_.model.parameters(),
                                   format_bytes(state_->bytes()), format_seconds(took.count())));
  }

  void open_log() {
    std::filesystem::create_directories(options_.out);
    if (options_.overwrite) {
      for (const char* old : {"run.db", "run.db-wal", "run.db-shm", "report.md"}) {
        std::filesystem::remove(options_.out / old);
      }
    }
    log_ = std::make_unique<RunLog>(
        options_.out / "run.db",
        RunInfo{SLIDEDP_VERSION, options_.command_line, inputs_.model.fingerprint(), inputs_.file.train.seed});
    log_->write_plan(to_yaml(inputs_.file));
    log_->write_machine(machine_facts());
    log_->write_tasks(graph_, predicted_.timeline);
  }

  ExitCode train(Executor& executor) {
    reset_temporary_peak(plan().backend);
    TrainingHooks hooks;
    hooks.stop = environment_.stop;
    hooks.on_step = [this](const StepOutcome& outcome) { record(outcome); };
    const int64_t finished = run_training(executor, graph_, inputs_.data, inputs_.file.train, inputs_.steps, hooks);
    const bool interrupted = finished < inputs_.steps;
    if (finished > 0) {
      write_report();
      export_hf_checkpoint(environment_.files, options_.model, *state_, options_.out / "hf");
      environment_.print(
          fmt::format("exported the model after step {} to {}", finished, (options_.out / "hf").string()));
    }
    log_->finish(interrupted ? RunStatus::interrupted : RunStatus::ok);
    return interrupted ? ExitCode::interrupted : ExitCode::ok;
  }

  void record(const StepOutcome& outcome) {
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
    measured_.add(outcome.timeline);
    const double left = static_cast<double>(inputs_.steps - row.step - 1) * step_s;
    environment_.print(
        fmt::format("step {}/{}  loss {:.4f}  grad norm {:.4g}  {:.0f} tokens/s  {}/step  ETA {:.0f} s{}", row.step + 1,
                    inputs_.steps, row.loss, outcome.gradient_norm, row.tokens_per_s, format_seconds(step_s), left,
                    row.skipped ? "  SKIPPED: gradients are not finite" : ""));
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
    const std::string report = run_report(graph_, predicted_, measured_, memory_, peaks);
    auto file = environment_.files.create(options_.out / "report.md");
    file->write(std::as_bytes(std::span(report)));
    file->close();
    environment_.print(report);
  }

  const RunOptions& options_;
  RunEnvironment& environment_;
  RunInputs inputs_;
  StepGraph graph_;
  MemoryTable memory_;
  Simulation predicted_;
  Backend backend_;
  std::optional<HostState> state_;
  std::unique_ptr<RunLog> log_;
  MeasuredSteps measured_;
};

}  // namespace

ExitCode run_session(const RunOptions& options, RunEnvironment& environment) {
  return Session(options, environment).run();
}

}  // namespace slidedp
