// A run from files to files: what it writes, what it refuses, and that nothing is left half-written.
#include "runtime/run/run_session.h"

#include <SQLiteCpp/SQLiteCpp.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <fstream>

#include "model/base/error.h"
#include "model/calibration/recalibrate.h"
#include "model/sim/simulator.h"
#include "runtime/io/checkpoint_hf.h"
#include "runtime/io/safetensors.h"
#include "tests/support/tiny_run.h"

namespace slidedp::testing {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;

// A file system whose disk is full after a number of bytes.
class SmallDisk final : public FileSystem {
 public:
  explicit SmallDisk(int64_t bytes) : left_(bytes) {}
  std::unique_ptr<FileWriter> create(const fs::path& path) override {
    return std::make_unique<Writer>(*this, path, posix_file_system().create(path));
  }
  void create_directory(const fs::path& path) override { posix_file_system().create_directory(path); }
  void rename(const fs::path& from, const fs::path& to) override { posix_file_system().rename(from, to); }
  void remove_all(const fs::path& path) noexcept override { posix_file_system().remove_all(path); }

 private:
  class Writer final : public FileWriter {
   public:
    Writer(SmallDisk& disk, fs::path path, std::unique_ptr<FileWriter> real)
        : disk_(disk), path_(std::move(path)), real_(std::move(real)) {}
    void write(std::span<const std::byte> data) override {
      disk_.left_ -= static_cast<int64_t>(data.size());
      if (disk_.left_ < 0) fail(path_.string() + ": No space left on device");
      real_->write(data);
    }
    void close() override { real_->close(); }

   private:
    SmallDisk& disk_;
    fs::path path_;
    std::unique_ptr<FileWriter> real_;
  };
  int64_t left_;
};

class RunSession : public ::testing::Test {
 protected:
  RunSession() {
    options_.model = training_.write_checkpoint();
    options_.plans = {training_.write_plan(training_.plan(2, 1), training_.train())};
    options_.data = training_.data();
    options_.out = training_.folder() / "run";
  }

  ExitCode run() { return run(posix_file_system()); }
  ExitCode run(FileSystem& files) {
    RunEnvironment environment{files, [this](const std::string& line) { lines_ += line + "\n"; },
                               [this] { return stop_ ? stop_() : StopRequest::none; }};
    return run_session(options_, environment);
  }
  std::string error() {
    try {
      run();
    } catch (const Error& error) {
      return error.what();
    }
    return "no error";
  }
  bool nothing_half_written() const {
    return !fs::exists(partial_directory(options_.out / "hf")) &&
           !fs::exists(replaced_directory(options_.out / "hf")) && !fs::exists(options_.out / "report.md.partial");
  }
  std::string status(const char* file = "run.db") const {
    SQLite::Database log((options_.out / file).string());
    return log.execAndGet("SELECT status FROM runs").getString();
  }
  void load_again() const {
    HostState state(make_layout(training_.model()));
    load_hf_checkpoint(options_.out / "hf", state, 1);
  }
  // Weights in layout order, as bf16 bits, without the gaps between tensors.
  std::vector<uint16_t> exported() const {
    const SafetensorsFile file(options_.out / "hf" / "model.safetensors");
    std::vector<uint16_t> weights;
    for (const UnitLayout& unit : make_layout(training_.model()).units) {
      for (const TensorLayout& tensor : unit.tensors) {
        const auto data = file.find(tensor.name)->data;
        weights.resize(weights.size() + data.size() / 2);
        std::memcpy(weights.data() + weights.size() - data.size() / 2, data.data(), data.size());
      }
    }
    return weights;
  }
  // What one eager plan on two ranks trains.
  std::vector<uint16_t> weights_after(int64_t steps, Reduction reduction) const {
    Plan plan = training_.plan(2, 1);
    plan.reduction = reduction;
    const RunResult direct = training_.run(plan, training_.train(), steps);
    std::vector<uint16_t> weights;
    int64_t begin = 0;
    for (const UnitLayout& unit : make_layout(training_.model()).units) {
      for (const TensorLayout& tensor : unit.tensors) {
        const auto first = direct.state.hi.begin() + begin + tensor.offset;
        weights.insert(weights.end(), first, first + tensor.elements);
      }
      begin += unit.elements;
    }
    return weights;
  }
  int steps_printed() const {
    int count = 0;
    for (size_t at = lines_.find("step "); at != std::string::npos; at = lines_.find("\nstep ", at + 1)) ++count;
    return count;
  }

  TinyTraining training_{true};
  RunOptions options_;
  std::string lines_;
  std::function<StopRequest()> stop_;
};

TEST_F(RunSession, ExportsExactlyTheWeightsThatTrainingLeft) {
  ASSERT_EQ(run(), ExitCode::ok);
  const RunResult direct = training_.run(training_.plan(2, 1), training_.train(), training_.train().steps);
  const ModelLayout layout = make_layout(training_.model());
  const SafetensorsFile file(options_.out / "hf" / "model.safetensors");
  int64_t begin = 0;
  size_t tensors = 0;
  for (const UnitLayout& unit : layout.units) {
    for (const TensorLayout& tensor : unit.tensors) {
      const StoredTensor* stored = file.find(tensor.name);
      ASSERT_NE(stored, nullptr) << tensor.name;
      const auto* hi = direct.state.hi.data() + begin + tensor.offset;
      EXPECT_EQ(std::memcmp(stored->data.data(), hi, stored->data.size()), 0) << tensor.name;
      ++tensors;
    }
    begin += unit.elements;
  }
  EXPECT_EQ(file.tensors().size(), tensors);
  EXPECT_TRUE(fs::exists(options_.out / "run.db"));
  EXPECT_TRUE(fs::exists(options_.out / "report.md"));
  EXPECT_THAT(lines_, HasSubstr("step 5/5"));
  EXPECT_TRUE(nothing_half_written());
}

TEST_F(RunSession, DeferredExportsTheFlushedWeights) {
  Plan plan = training_.plan(2, 1);
  options_.out = training_.folder() / "eager";
  ASSERT_EQ(run(), ExitCode::ok);
  plan.update = UpdatePolicy::deferred;
  options_.plans = {training_.write_plan(plan, training_.train())};
  options_.out = training_.folder() / "deferred";
  ASSERT_EQ(run(), ExitCode::ok);
  const auto bytes = [&](const char* run) {
    std::ifstream in(training_.folder() / run / "hf" / "model.safetensors", std::ios::binary);
    return std::string(std::istreambuf_iterator<char>(in), {});
  };
  EXPECT_EQ(bytes("eager"), bytes("deferred"));
}

// Everything in which exact plans may differ, changed in the middle of a training: same bits as one plan all the way.
TEST_F(RunSession, PlansOneAfterAnotherTrainAsOnePlanDoes) {
  TrainSpec train = training_.train();
  train.steps = 2;
  Plan plan = training_.plan(2, 1);
  plan.reduction = Reduction::gpu;
  options_.plans = {training_.write_plan(plan, train, "1.yaml")};
  plan.delivery = Delivery::sharded;
  plan.update = UpdatePolicy::split;
  plan.chunk_elements = 1000;
  plan.activation.assign(plan.activation.size(), ActivationPolicy::recompute);
  options_.plans.push_back(training_.write_plan(plan, train, "2.yaml"));
  train.steps = 3;
  plan.delivery = Delivery::broadcast;
  plan.update = UpdatePolicy::deferred;
  plan.threads.update = 2;
  options_.plans.push_back(training_.write_plan(plan, train, "3.yaml"));
  ASSERT_EQ(run(), ExitCode::ok);
  EXPECT_THAT(lines_, HasSubstr("plan 2 of 3: " + options_.plans[1].string() + ", steps 3 to 4"));
  EXPECT_THAT(lines_, HasSubstr("exported the model after step 7"));
  const std::vector<std::string> steps{"0,1", "2,3", "4,5,6"};
  for (size_t i = 0; i < 3; ++i) {
    const std::string number = std::to_string(i + 1);
    const SQLite::Database log((options_.out / ("run-" + number + ".db")).string());
    SQLite::Statement row(log, "SELECT status, group_concat(step), (SELECT yaml FROM plan) FROM runs, steps");
    ASSERT_TRUE(row.executeStep());
    EXPECT_EQ(row.getColumn(0).getString(), "ok");
    EXPECT_EQ(row.getColumn(1).getString(), steps[i]);
    EXPECT_THAT(row.getColumn(2).getString(), HasSubstr(i == 1 ? "update: split" : i == 0 ? "eager" : "deferred"));
    EXPECT_TRUE(fs::exists(options_.out / ("report-" + number + ".md")));
  }
  EXPECT_FALSE(fs::exists(options_.out / "run.db"));
  EXPECT_EQ(exported(), weights_after(7, Reduction::gpu));
  // Results of three plans leave nothing behind when one plan replaces them.
  options_.plans.resize(1);
  options_.overwrite = true;
  ASSERT_EQ(run(), ExitCode::ok);
  EXPECT_EQ(exported(), weights_after(2, Reduction::gpu));
  EXPECT_FALSE(fs::exists(options_.out / "run-1.db"));
  EXPECT_FALSE(fs::exists(options_.out / "report-3.md"));
}

// What slidedp-plan --calibrate reads: the log says all that it takes to simulate the plan again.
TEST_F(RunSession, LogHoldsWhatACalibrationNeeds) {
  options_.steps = 4;
  ASSERT_EQ(run(), ExitCode::ok);
  const std::vector<LoggedRun> runs = load_runs(options_.out / "run.db", std::nullopt);
  ASSERT_EQ(runs.size(), 1u);
  EXPECT_EQ(runs[0].model.fingerprint(), training_.model().fingerprint());
  EXPECT_EQ(runs[0].plan.plan.ranks, 2);
  EXPECT_TRUE(runs[0].cpu_steal_share);
  ASSERT_EQ(runs[0].steps.size(), 2u) << "of four steps two warm up";
  EXPECT_EQ(runs[0].steps[0].step, 2);
  const StepGraph graph = build_step_graph(training_.model(), runs[0].plan.train, runs[0].plan.plan);
  const BusySeconds predicted = busy_seconds(graph, simulate(graph, runs[0].plan.hardware).timeline);
  for (const LoggedStep& step : runs[0].steps) {
    EXPECT_GT(step.step_s, 0);
    for (size_t group = 0; group < kRateGroups; ++group) {
      EXPECT_EQ(step.busy_s[group] > 0, predicted[group] > 0) << name(static_cast<RateGroup>(group));
    }
  }
  EXPECT_THAT(disturbance(runs[0]), HasSubstr("2 steps"));
}

TEST_F(RunSession, StepsAreThoseOfEachPlan) {
  options_.plans.push_back(options_.plans.front());
  options_.steps = 3;
  ASSERT_EQ(run(), ExitCode::ok);
  EXPECT_EQ(exported(), weights_after(6, Reduction::cpu));
}

TEST_F(RunSession, AnInterruptInAnEarlierPlanStartsNoLaterOne) {
  options_.plans.push_back(options_.plans.front());
  options_.steps = 1000;
  stop_ = [this] { return lines_.find("step 1/") != std::string::npos ? StopRequest::finish_step : StopRequest::none; };
  EXPECT_EQ(run(), ExitCode::interrupted);
  EXPECT_EQ(status("run-1.db"), "interrupted");
  EXPECT_FALSE(fs::exists(options_.out / "run-2.db"));
  EXPECT_TRUE(fs::exists(options_.out / "hf" / "model.safetensors"));
}

// Before anything is loaded or written.
TEST_F(RunSession, RefusesPlansThatDoNotBelongTogether) {
  TrainSpec train = training_.train();
  train.adam.learning_rate = 2e-4;
  options_.plans.push_back(training_.write_plan(training_.plan(2, 1), train, "other.yaml"));
  EXPECT_THAT(error(), ::testing::AllOf(HasSubstr("other.yaml"), HasSubstr("plan.yaml"),
                                        HasSubstr("learning_rate: 0.0002"), HasSubstr("learning_rate: 0.0001")));
  const TinyTraining untied(false);
  options_.plans.back() = untied.write_plan(untied.plan(2, 1), untied.train(), "untied.yaml");
  EXPECT_THAT(error(), ::testing::AllOf(HasSubstr("untied.yaml"), HasSubstr("was made for")));
  options_.plans.back().clear();
  EXPECT_THAT(error(), HasSubstr("--plans"));
  EXPECT_THAT(lines_, ::testing::Not(HasSubstr("loaded")));
  EXPECT_FALSE(fs::exists(options_.out));
}

TEST_F(RunSession, RefusesAnExistingRunDirectoryUnlessToldTo) {
  ASSERT_EQ(run(), ExitCode::ok);
  EXPECT_THAT(error(), HasSubstr("--overwrite"));
  options_.overwrite = true;
  EXPECT_EQ(run(), ExitCode::ok);
}

TEST_F(RunSession, RefusesToReplaceTheModelThatItTrains) {
  ASSERT_EQ(run(), ExitCode::ok);
  options_.model = options_.out / "hf";
  options_.overwrite = true;
  EXPECT_THAT(error(), HasSubstr("would replace"));
  options_.out = training_.folder() / "next";
  EXPECT_EQ(run(), ExitCode::ok);
}

// The model as the last finite step left it is exported, but the run does not end as if all were well.
TEST_F(RunSession, EndsWhenEveryStepIsSkipped) {
  TrainSpec train = training_.train();
  train.adam.learning_rate = 1e30;
  train.max_grad_norm = 1;
  Plan plan = training_.plan(2, 1);
  plan.update = UpdatePolicy::deferred;
  options_.plans = {training_.write_plan(plan, train)};
  options_.steps = 1000;
  EXPECT_THAT(error(), HasSubstr("not finite"));
  EXPECT_EQ(status(), "failed");
  EXPECT_TRUE(fs::exists(options_.out / "hf"));
  EXPECT_LT(steps_printed(), 20);
}

TEST_F(RunSession, DiskFullLeavesNoExportAndSaysSo) {
  for (const int64_t bytes : {2'000, 20'000}) {
    SmallDisk disk(bytes);
    options_.overwrite = true;
    try {
      run(disk);
      ADD_FAILURE() << "no error";
    } catch (const Error& error) {
      EXPECT_THAT(error.what(), HasSubstr("No space left"));
    }
    EXPECT_FALSE(fs::exists(options_.out / "hf"));
    EXPECT_TRUE(nothing_half_written());
  }
}

TEST_F(RunSession, AnInterruptFinishesTheStepAndExportsIt) {
  stop_ = [this] { return lines_.find("step 1/") != std::string::npos ? StopRequest::finish_step : StopRequest::none; };
  options_.steps = 1000;
  EXPECT_EQ(run(), ExitCode::interrupted);
  EXPECT_TRUE(fs::exists(options_.out / "hf" / "model.safetensors"));
  EXPECT_LE(steps_printed(), 3);
}

TEST_F(RunSession, ASecondInterruptStopsAtOnceAndExportsNothing) {
  stop_ = [this] { return lines_.find("step 2/") != std::string::npos ? StopRequest::now : StopRequest::none; };
  options_.steps = 1000;
  try {
    run();
    ADD_FAILURE() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ExitCode::interrupted);
  }
  EXPECT_FALSE(fs::exists(options_.out / "hf"));
  EXPECT_TRUE(nothing_half_written());
}

// A second signal at any moment while the results are being written: the export is whole or not there, the report too.
TEST_F(RunSession, AnInterruptWhileWritingLeavesNothingHalf) {
  options_.overwrite = true;
  int operations = 0;
  for (bool finished = false; !finished; ++operations) {
    ASSERT_LT(operations, 100);
    int left = operations;
    InterruptibleFileSystem files(posix_file_system(), [&] { return left-- <= 0; });
    fs::remove_all(options_.out);
    try {
      run(files);
      finished = true;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ExitCode::interrupted);
      EXPECT_EQ(status(), "interrupted");
    }
    if (fs::exists(options_.out / "hf")) load_again();
    EXPECT_EQ(fs::exists(options_.out / "report.md"), finished);
    EXPECT_TRUE(nothing_half_written());
  }
  EXPECT_GT(operations, 6);  // it stopped inside the weights and between the files
}

TEST_F(RunSession, AFailedRunSaysSoInItsLog) {
  SmallDisk disk(2'000);
  EXPECT_THROW(run(disk), Error);
  EXPECT_EQ(status(), "failed");
}

TEST_F(RunSession, TwoRunsDoNotShareADirectory) {
  options_.overwrite = true;
  std::string second;
  stop_ = [&] {
    if (second.empty()) {
      second = "pending";
      RunOptions options = options_;
      RunEnvironment environment{posix_file_system(), [](const std::string&) {}, [] { return StopRequest::none; }};
      try {
        run_session(options, environment);
      } catch (const Error& error) {
        second = error.what();
      }
    }
    return StopRequest::none;
  };
  EXPECT_EQ(run(), ExitCode::ok);
  EXPECT_THAT(second, HasSubstr("another slidedp-run"));
}

TEST_F(RunSession, RefusesAPlanThatDoesNotFitItsBudget) {
  std::string plan;
  {
    std::ifstream in(options_.plans.front());
    plan.assign(std::istreambuf_iterator<char>(in), {});
  }
  const size_t at = plan.find("memory_bytes:");
  plan.replace(at, plan.find('\n', at) - at, "memory_bytes: 65536");
  std::ofstream(options_.plans.front()) << plan;
  EXPECT_THAT(error(), HasSubstr("device memory"));
}

TEST_F(RunSession, RefusesAPlanForAnotherModelBeforeItWritesAnything) {
  const TinyTraining other(false);
  options_.model = other.write_checkpoint();
  EXPECT_THAT(error(), HasSubstr("was made for"));
  EXPECT_FALSE(fs::exists(options_.out));
}

TEST_F(RunSession, NamesMissingFiles) {
  const RunOptions good = options_;
  options_.plans = {training_.folder() / "no-plan.yaml"};
  EXPECT_THAT(error(), HasSubstr("no-plan.yaml"));
  options_ = good;
  options_.model = training_.folder() / "no-model";
  EXPECT_THAT(error(), HasSubstr("no-model"));
  options_ = good;
  options_.data = training_.folder() / "no-data.safetensors";
  EXPECT_THAT(error(), HasSubstr("no-data.safetensors"));
  EXPECT_FALSE(fs::exists(options_.out));
}

TEST_F(RunSession, NamesATruncatedCheckpoint) {
  const fs::path file = options_.model / "model.safetensors";
  fs::resize_file(file, fs::file_size(file) - 100);
  EXPECT_THAT(error(), HasSubstr("model.safetensors"));
  EXPECT_FALSE(fs::exists(options_.out));
}

TEST_F(RunSession, RefusesAStepWithoutTargets) {
  const SafetensorsFile data(training_.data());
  std::vector<TensorToStore> tensors;
  const std::vector<int32_t> none(8 * 16, -100);
  for (const StoredTensor& tensor : data.tensors()) {
    const bool labels = tensor.name == "labels";
    tensors.push_back({tensor.name, tensor.type, tensor.shape, labels ? std::as_bytes(std::span(none)) : tensor.data});
  }
  options_.data = training_.folder() / "no-targets.safetensors";
  write_safetensors(posix_file_system(), options_.data, tensors, data.metadata());
  EXPECT_THAT(error(), HasSubstr("step 1 has no target token"));
  EXPECT_FALSE(fs::exists(options_.out));
}

}  // namespace
}  // namespace slidedp::testing
