#include "runtime/run/run_session.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <memory>
#include <regex>
#include <sstream>
#include <stdexcept>
#include <utility>
#include <vector>

#include "model/base/format.h"
#include "runtime/data/packed_dataset.h"
#include "runtime/io/checkpoint_hf.h"
#include "runtime/run/plan_run.h"

namespace slidedp {
namespace {

namespace fs = std::filesystem;

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

// Logs and reports of an earlier run, of however many plans.
void remove_old_results(const fs::path& folder) {
  static const std::regex results(R"(run(-\d+)?\.db(-wal|-shm)?|report(-\d+)?\.md)");
  std::vector<fs::path> old;
  std::error_code problem;
  for (const auto& entry : fs::directory_iterator(folder, problem)) {
    if (std::regex_match(entry.path().filename().string(), results)) old.push_back(entry.path());
  }
  for (const fs::path& path : old) fs::remove(path, problem);
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
    remove_old_results(options.out);
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

int64_t checked_steps(int64_t steps) {
  if (steps < 1) failf("--steps {}: must be at least 1", steps);
  return steps;
}

// A run has one training spec; plans only say how long it is followed.
void check_same_training(const fs::path& plan, const TrainSpec& train, const fs::path& first_plan, TrainSpec first) {
  first.steps = train.steps;
  first.touched_vocabulary_share = train.touched_vocabulary_share;  // informs the simulator, changes no result
  if (train == first) return;
  std::istringstream lines(to_yaml(train)), first_lines(to_yaml(first));
  std::string line, first_line;
  while (std::getline(lines, line) && std::getline(first_lines, first_line) && line == first_line) continue;
  const auto trimmed = [](const std::string& text) {
    return text.substr(std::min(text.find_first_not_of(' '), text.size()));
  };
  failf(
      "{}: its training spec has `{}`, but that of {} has `{}`; plans of one run share the training spec, all but "
      "`steps`. Plan again with the same --train",
      plan.string(), trimmed(line), first_plan.string(), trimmed(first_line));
}

std::vector<PlanFile> read_plans(const RunOptions& options) {
  check_out(options);
  if (options.plans.empty()) throw std::logic_error("a run needs a plan");
  std::vector<PlanFile> files;
  for (const fs::path& plan : options.plans) {
    if (plan.empty()) fail("--plans has an empty name; separate the plan files by single commas");
    files.push_back(load_plan(plan));
    check_same_training(plan, files.back().train, options.plans.front(), files.front().train);
  }
  return files;
}

ModelSpec read_model(const RunOptions& options, const std::vector<PlanFile>& files) {
  ModelSpec model = load_model_spec(options.model);
  for (size_t i = 0; i < files.size(); ++i) {
    try {
      validate_plan(files[i].plan, model, files[i].train);
    } catch (const Error& error) {
      if (files.size() == 1) throw;
      failf("{}: {}", options.plans[i].string(), error.what());
    }
  }
  return model;
}

// Everything that a run reads, checked before anything is allocated or written.
struct RunInputs {
  explicit RunInputs(const RunOptions& options)
      : files(read_plans(options)), model(read_model(options, files)), data(options.data, model, train().seq) {
    for (const PlanFile& file : files) {
      steps.push_back({run_steps(), checked_steps(options.steps.value_or(file.train.steps))});
    }
    data.require_rows(train().batch_rows);
    check_targets(data, train(), run_steps());
  }
  const TrainSpec& train() const { return files.front().train; }
  int64_t run_steps() const { return steps.empty() ? 0 : steps.back().end(); }
  std::vector<PlanFile> files;
  ModelSpec model;
  std::vector<StepRange> steps;  // by plan
  PackedDataset data;
};

class Session {
 public:
  Session(const RunOptions& options, RunEnvironment& environment)
      : options_(options),
        environment_(environment),
        inputs_(options),
        export_files_(read_export_files(options.model)) {
    for (size_t i = 0; i < inputs_.files.size(); ++i) {
      parts_.push_back(
          std::make_unique<PlanRun>(inputs_.files[i], inputs_.model, inputs_.steps[i], options_, environment_));
    }
  }

  ExitCode run() {
    for (const auto& part : parts_) part->check_machine();
    check_disk(options_, parts_.front()->layout());
    load();
    parts_.front()->allocate(*state_);
    environment_.writing_starts();
    const RunDirectory directory(options_);
    for (size_t part = 0;; ++part) {
      if (const auto code = run_part(part)) return *code;
    }
  }

 private:
  // RUN_DIR/run.db; of several plans RUN_DIR/run-1.db and so on.
  fs::path result(const char* stem, size_t part, const char* extension) const {
    const std::string number = parts_.size() == 1 ? "" : fmt::format("-{}", part + 1);
    return options_.out / fmt::format("{}{}{}", stem, number, extension);
  }

  // Follows one plan. Returns the exit code if the run ends with it: it is the last, a signal came, or something is
  // wrong; then the model is exported.
  std::optional<ExitCode> run_part(size_t index) {
    PlanRun& part = *parts_[index];
    try {
      if (index > 0) part.allocate(*state_);
      part.open_log(result("run", index, ".db"),
                    {SLIDEDP_VERSION, options_.command_line, inputs_.model.fingerprint(), part.file().train.seed});
      return train(part, index);
    } catch (const Error& error) {
      part.end_log(error.code() == ExitCode::interrupted ? RunStatus::interrupted : RunStatus::failed, error.what());
      throw;
    } catch (const std::exception& error) {
      part.end_log(RunStatus::failed, error.what());
      throw;
    }
  }

  std::optional<ExitCode> train(PlanRun& part, size_t index) {
    if (parts_.size() > 1) {
      environment_.print(fmt::format("plan {} of {}: {}, steps {} to {}", index + 1, parts_.size(),
                                     options_.plans[index].string(), part.steps().first + 1, part.steps().end()));
    }
    const int64_t finished = part.train(inputs_.data, inputs_.run_steps());
    finished_ += finished;
    const bool interrupted = environment_.stop() != StopRequest::none;
    const bool last = interrupted || !part.trouble().empty() || index + 1 == parts_.size();
    if (last && finished_ > 0) export_model();
    if (!part.trouble().empty()) fail(part.trouble());
    if (finished > 0) part.write_report(result("report", index, ".md"));
    part.finish_log(interrupted ? RunStatus::interrupted : RunStatus::ok);
    part.release();
    if (!last) return std::nullopt;
    return interrupted ? ExitCode::interrupted : ExitCode::ok;
  }

  void export_model() {
    export_hf_checkpoint(environment_.files, export_files_, *state_, options_.out / "hf");
    environment_.print(
        fmt::format("exported the model after step {} to {}", finished_, (options_.out / "hf").string()));
  }

  void note(const std::string& text) const {
    if (!text.empty()) environment_.print("note: " + text);
  }

  void load() {
    const auto start = std::chrono::steady_clock::now();
    state_.emplace(parts_.front()->layout());
    if (parts_.front()->file().plan.backend != "cpu") note(locked_memory_note(state_->bytes()));
    note(huge_page_note());
    state_->touch(usable_cores(), [this, said = start](int64_t done, int64_t total) mutable {
      const auto now = std::chrono::steady_clock::now();
      if (now - said < std::chrono::seconds(5)) return;
      said = now;
      environment_.print(fmt::format("allocated {} of {} of host state", format_bytes(done), format_bytes(total)));
    });
    for (const std::string& text : load_hf_checkpoint(options_.model, *state_, usable_cores())) note(text);
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
    environment_.print(fmt::format("loaded {} parameters into {} of host state in {}", inputs_.model.parameters(),
                                   format_bytes(state_->bytes()), format_seconds(took.count())));
  }

  const RunOptions& options_;
  RunEnvironment& environment_;
  const RunInputs inputs_;
  const ExportFiles export_files_;
  std::optional<HostState> state_;  // before the parts go, which use it
  std::vector<std::unique_ptr<PlanRun>> parts_;
  int64_t finished_ = 0;  // steps
};

}  // namespace

ExitCode run_session(const RunOptions& options, RunEnvironment& environment) {
  return Session(options, environment).run();
}

}  // namespace slidedp
