// The record of runs: one SQLite file, which later programs (calibration, reports) read.
//
// Tables (schema version 1, in PRAGMA user_version):
//   runs     id, uuid, started_at, ended_at (UTC, ISO 8601; NULL while it runs), program_version, command_line,
//            model_fingerprint, seed, status ('running', 'ok', 'failed', 'interrupted'), error (NULL if none)
//   steps    run_id, step, loss, gradient_norm (NULL if not computed; NULL also for a loss or norm that is not a
//            number), tokens, target_tokens, step_s, tokens_per_s, learning_rate, clip_factor, skipped (0, 1),
//            predicted_step_s (NULL without a prediction)
//   tasks    model/timeline/task_table.h
//   plan     run_id, yaml
//   machine  run_id, key, value; beside facts of the machine model_config (the checkpoint's config.json) and
//            cpu_steal_share (of the CPU time that the run wanted, what other guests of the host got)
//
// The file is in WAL mode: it can be read while a run writes, and every row written before a crash is there after it.
// A run that dies leaves status 'running'.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "model/timeline/timeline.h"
#include "runtime/host/machine_facts.h"

namespace slidedp {

enum class RunStatus : uint8_t { running, ok, failed, interrupted };
std::string_view name(RunStatus);

struct RunInfo {
  std::string program_version{};
  std::string command_line{};
  std::string model_fingerprint{};
  uint64_t seed = 0;  // stored as SQLite's signed 64-bit integer of the same bits
};

struct StepRow {
  int64_t step = 0;
  double loss = 0;                                     // mean over target tokens
  std::optional<double> gradient_norm = std::nullopt;  // before clipping
  int64_t tokens = 0;
  int64_t target_tokens = 0;
  double step_s = 0;
  double tokens_per_s = 0;
  double learning_rate = 0;
  double clip_factor = 1;  // 1: not clipped
  bool skipped = false;    // the update was skipped: gradients were not finite
  std::optional<double> predicted_step_s = std::nullopt;
};

// The log of one run, from construction to finish(). Every method is thread-safe and throws Error that names the file
// if the database refuses (a full disk, a file of another kind).
class RunLog {
 public:
  // Opens or creates `file` and adds a run with status 'running'. Refuses a file of another schema version, and a
  // database that is not a run log.
  RunLog(const std::filesystem::path& file, const RunInfo& run);
  // Closes the file. A run that was not finished stays 'running', as if the program had died.
  ~RunLog();
  RunLog(const RunLog&) = delete;
  RunLog& operator=(const RunLog&) = delete;

  int64_t run_id() const;
  void write_step(const StepRow& row);
  void write_tasks(const StepGraph& graph, const Timeline& timeline);
  void write_plan(const std::string& yaml);
  // machine_facts() and what the caller knows (library versions). A key that is there is replaced.
  void write_machine(const std::vector<MachineFact>& facts);
  void finish(RunStatus status, const std::string& error = "");

 private:
  class Database;
  std::unique_ptr<Database> database_;
};

}  // namespace slidedp
