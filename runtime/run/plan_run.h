// The part of a run that follows one plan: its checks before anything is allocated, its steps on the run's training
// state, its log and its report.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>

#include "model/graph/memory.h"
#include "model/sim/simulator.h"
#include "runtime/exec/trainer.h"
#include "runtime/host/machine_facts.h"
#include "runtime/log/run_log.h"
#include "runtime/run/run_report.h"
#include "runtime/run/run_session.h"

namespace slidedp {

// Steps of the whole run, counted from 0.
struct StepRange {
  int64_t first = 0, count = 0;
  int64_t end() const { return first + count; }
};

class PlanRun {
 public:
  // The plan must have passed validate_plan. Model, options and environment must outlive this.
  PlanRun(PlanFile file, const ModelSpec& model, StepRange steps, const RunOptions& options,
          RunEnvironment& environment);

  const PlanFile& file() const { return file_; }
  const ModelLayout& layout() const { return graph_.layout; }
  StepRange steps() const { return steps_; }
  // Throws Error if this machine cannot run the plan.
  void check_machine() const;
  // Makes devices and buffers. State must outlive release().
  void allocate(HostState& state);
  // Gives devices and buffers back.
  void release();

  void open_log(const std::filesystem::path& log, const RunInfo& info);
  // Runs the steps and the flush, and logs; returns how many steps are finished. `run_steps`: of the whole run.
  int64_t train(const PackedDataset& data, int64_t run_steps);
  // What ended the run after the steps under way; empty if nothing did.
  const std::string& trouble() const { return trouble_; }
  void write_report(const std::filesystem::path& report);
  void finish_log(RunStatus status) { log_->finish(status); }
  // After a failure, whose error this must not hide: does not throw.
  void end_log(RunStatus status, const std::string& error);

 private:
  const Plan& plan() const { return file_.plan; }
  int64_t device_budget() const;
  BackendOptions backend_options() const;
  void finish_step(const StepOutcome& outcome, int64_t run_steps);
  void log_step(const StepOutcome& outcome);
  void print_step(const StepOutcome& outcome, int64_t run_steps) const;
  MemoryPeaks memory_peaks() const;
  double log_peaks(const MemoryPeaks& peaks);

  const PlanFile file_;
  const RunOptions& options_;
  const ModelSpec& model_;
  const StepRange steps_;
  RunEnvironment& environment_;
  const StepGraph graph_;
  const MemoryTable memory_;
  const Simulation predicted_;
  Backend backend_;
  std::optional<Executor> executor_;  // before what it uses goes
  std::unique_ptr<RunLog> log_;
  MeasuredSteps measured_;
  std::string trouble_;
  int64_t skipped_in_a_row_ = 0;
  CpuTime cpu_time_at_start_;
};

}  // namespace slidedp
