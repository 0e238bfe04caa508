// One run of slidedp-run: from plans, a checkpoint and a data set to a run directory.
//
//   RUN_DIR/run.db     SQLite log (runtime/log/run_log.h)
//   RUN_DIR/report.md  predicted and measured time by task kind, memory
//   RUN_DIR/hf         the trained model as a Hugging Face checkpoint
//
// Several plans are followed one after another on one training state: each takes over weights, moments, step count and
// data position where the one before left them, after its flush. Each has its own log and report: run-1.db, report-1.md
// and so on. They share the training spec, all but its steps.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "model/base/error.h"
#include "runtime/exec/trainer.h"
#include "runtime/host/update_pool.h"
#include "runtime/io/file_system.h"

namespace slidedp {

struct RunOptions {
  std::vector<std::filesystem::path> plans;  // at least one
  std::filesystem::path model, data, out;
  std::optional<int64_t> steps;  // of each plan, instead of its training spec's
  bool overwrite = false;        // replace the results in an existing RUN_DIR
  UpdateOrder update_order = UpdateOrder::need;
  bool share_gpu = false, deterministic = false;  // BackendOptions
  std::string command_line;
};

// What the session tells and asks the program around it.
struct RunEnvironment {
  FileSystem& files;                              // for the export
  std::function<void(const std::string&)> print;  // one line of progress
  std::function<StopRequest()> stop;
  // Called once before anything is written: from here on a signal must go through `stop`.
  std::function<void()> writing_starts = [] {};
};

// Passes everything on to `files`, but once `stop` says so nothing more is created or written: an Error with
// ExitCode::interrupted instead. Renaming and removing, which put things in order, go on.
class InterruptibleFileSystem final : public FileSystem {
 public:
  InterruptibleFileSystem(FileSystem& files, std::function<bool()> stop) : files_(files), stop_(std::move(stop)) {}
  std::unique_ptr<FileWriter> create(const std::filesystem::path&) override;
  void create_directory(const std::filesystem::path&) override;
  void rename(const std::filesystem::path& from, const std::filesystem::path& to) override { files_.rename(from, to); }
  void remove_all(const std::filesystem::path& path) noexcept override { files_.remove_all(path); }

 private:
  FileSystem& files_;
  std::function<bool()> stop_;
};

// Returns ok, or interrupted if `stop` asked to end the run, after the last finished step was exported. Throws Error;
// the log then says "failed" or "interrupted", and no export is half-written.
ExitCode run_session(const RunOptions& options, RunEnvironment& environment);

}  // namespace slidedp
