// slidedp-plan as a user runs it, on the configurations of this repository.
#include <SQLiteCpp/SQLiteCpp.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>

#include "model/calibration/profile_store.h"
#include "model/spec/catalogue.h"
#include "model/spec/plan.h"
#include "tests/planner/problems.h"
#include "tests/support/programs.h"
#include "tests/support/synthetic_profile.h"

namespace slidedp {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::IsEmpty;
namespace fs = std::filesystem;

std::string read(const fs::path& file) {
  std::ifstream stream(file, std::ios::binary);
  std::ostringstream text;
  text << stream.rdbuf();
  return text.str();
}

class PlanProgram : public testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = (fs::temp_directory_path() / "slidedp-plan-test-XXXXXX").string();
    ASSERT_NE(mkdtemp(pattern.data()), nullptr);
    folder_ = pattern;
    out_ = folder_ / "out";
    fs::create_directory(out_);
  }
  void TearDown() override { fs::remove_all(folder_); }

  // Runs the program on the demo's configuration and returns its exit code.
  int plan(const std::string& more) {
    return run(" --model '" + test::config("model/SmolLM2-135M.json").string() + "' --hardware '" +
               test::config("hardware/cpu-2rank.yaml").string() + "' --train '" +
               test::config("train/demo.yaml").string() + "' --out '" + plan_file().string() + "' " + more);
  }
  int run(const std::string& arguments) {
    return test::run_command(test::program("slidedp-plan") + " " + arguments + " >'" + (folder_ / "stdout").string() +
                             "' 2>'" + (folder_ / "stderr").string() + "'")
        .status;
  }
  fs::path plan_file() const { return out_ / "plan.yaml"; }
  std::string output() const { return read(folder_ / "stdout"); }
  std::string errors() const { return read(folder_ / "stderr"); }
  // What an error must not leave behind.
  std::vector<fs::path> left() const { return {fs::directory_iterator(out_), fs::directory_iterator()}; }

  fs::path folder_, out_;
};

TEST_F(PlanProgram, WritesAPlanAndSaysWhy) {
  ASSERT_EQ(plan("--trace '" + (out_ / "trace.json").string() + "' --top 3"), 0) << errors();
  const PlanFile file = load_plan(plan_file());
  EXPECT_EQ(file.plan.ranks, 2);
  EXPECT_EQ(file.train, load_train_spec(test::config("train/demo.yaml")));
  EXPECT_EQ(file.hardware, load_hardware_spec(test::config("hardware/cpu-2rank.yaml")));
  EXPECT_NO_THROW(validate_plan(file.plan, load_model_spec(test::config("model/SmolLM2-135M.json")), file.train));
  EXPECT_GT(file.forecast.step.seconds, 0);
  EXPECT_NEAR(file.forecast.tokens_per_second * file.forecast.step.seconds, 512, 1e-6);
  EXPECT_LE(file.forecast.device_bytes, file.hardware.device.memory_bytes);
  EXPECT_FALSE(file.forecast.why.empty());
  for (const std::string& why : file.forecast.why) EXPECT_THAT(output(), HasSubstr(why));
  EXPECT_THAT(output(), AllOf(HasSubstr("tokens/s"), HasSubstr("estimate"), HasSubstr("state_hi"), HasSubstr("\n3  "),
                              Not(HasSubstr("\n4  "))));
  const nlohmann::json trace = nlohmann::json::parse(read(out_ / "trace.json"));
  EXPECT_GT(trace.at("traceEvents").size(), 100u);
  EXPECT_EQ(left().size(), 2u);
}

TEST_F(PlanProgram, PrintsJson) {
  ASSERT_EQ(plan("--json --pin delivery=sharded --pin activation=recompute:10,keep:20"), 0) << errors();
  const nlohmann::json json = nlohmann::json::parse(output());
  EXPECT_TRUE(json.at("estimate").get<bool>());
  EXPECT_EQ(json.at("best").at(0).at("plan").at("delivery"), "sharded");
  EXPECT_EQ(json.at("best").at(0).at("plan").at("activation"), "recompute:10,keep:20");
  const PlanFile file = load_plan(plan_file());
  EXPECT_EQ(json.at("best").at(0).at("step_seconds"), file.forecast.step.seconds);
  int64_t device = 0;
  for (const auto& row : json.at("memory").at("device")) device += row.at("bytes").get<int64_t>();
  EXPECT_EQ(device, file.forecast.device_bytes);
  EXPECT_EQ(json.at("why").get<std::vector<std::string>>(), file.forecast.why);
}

TEST_F(PlanProgram, SetsChangeTheSpecsAndThePlanCarriesThem) {
  ASSERT_EQ(plan("--set train.batch_rows=4 --set gpus=1 --gpu-memory 2GiB --host-memory 16GiB"), 0) << errors();
  const PlanFile file = load_plan(plan_file());
  EXPECT_EQ(file.plan.ranks, 1);
  EXPECT_EQ(file.train.batch_rows, 4);
  EXPECT_EQ(file.plan.batch_rows(), 4);
  EXPECT_EQ(file.hardware.gpus, 1);
  EXPECT_EQ(file.hardware.device.memory_bytes, int64_t{2} << 30);
  EXPECT_EQ(file.hardware.host.memory_bytes, int64_t{16} << 30);
}

TEST_F(PlanProgram, AMachineIsPutTogetherFromTheCatalogue) {
  const auto part = [](const std::string& name) { return "'" + test::config("hardware/" + name).string() + "'"; };
  const std::string rest = " --model '" + test::config("model/SmolLM2-135M.json").string() + "' --train '" +
                           test::config("train/demo.yaml").string() + "' --out '" + plan_file().string() + "'";
  const std::string gpu = " --hardware " + part("gpu/rtx-4090.yaml"), host = " --host " + part("host/epyc-genoa.yaml");
  ASSERT_EQ(run(rest + gpu + host + " --gpus 2 --set host.cores=32 --pin waves=1"), 0) << errors();
  HardwareSpec expected = compose_hardware(load_catalogue_gpu(test::config("hardware/gpu/rtx-4090.yaml")),
                                           load_catalogue_host(test::config("hardware/host/epyc-genoa.yaml")), 2);
  expected.host.cores = 32;
  EXPECT_EQ(load_plan(plan_file()).hardware, expected);
  EXPECT_THAT(output(), HasSubstr("estimate"));
  ASSERT_EQ(run(rest + gpu + host + " --pin waves=1"), 0) << errors();
  EXPECT_EQ(load_plan(plan_file()).hardware.gpus, 1);

  fs::remove(plan_file());
  EXPECT_EQ(run(rest + gpu), 1);
  EXPECT_THAT(errors(), AllOf(HasSubstr("rtx-4090.yaml"), HasSubstr("a GPU only"), HasSubstr("--host")));
  EXPECT_EQ(run(rest + gpu + " --gpus 2"), 2);
  EXPECT_THAT(errors(), HasSubstr("--host"));
  EXPECT_EQ(run(rest + gpu + host + " --gpus 0"), 2);
  EXPECT_EQ(plan(host), 1);
  EXPECT_THAT(errors(), AllOf(HasSubstr("cpu-2rank.yaml"), HasSubstr("whole machine")));
  EXPECT_THAT(left(), IsEmpty());
}

TEST_F(PlanProgram, NothingFitsHasItsOwnExitCode) {
  EXPECT_EQ(plan("--gpu-memory 100MiB"), 3);
  EXPECT_THAT(errors(), AllOf(HasSubstr("slidedp-plan: error: No plan fits"), HasSubstr("--gpu-memory ")));
  EXPECT_THAT(left(), IsEmpty());
  EXPECT_THAT(output(), IsEmpty());
}

TEST_F(PlanProgram, BadInputLeavesNothingBehind) {
  const auto refused = [&](const std::string& arguments, const std::string& named) {
    EXPECT_EQ(plan(arguments), 1) << arguments;
    EXPECT_THAT(errors(), AllOf(HasSubstr("slidedp-plan: error: "), HasSubstr(named))) << arguments;
    EXPECT_THAT(left(), IsEmpty()) << arguments;
  };
  refused("--pin devilery=sharded", "devilery");
  refused("--pin delivery=pigeon", "pigeon");
  refused("--pin delivery", "field=value");
  refused("--set nothing_like_this=1", "nothing_like_this");
  refused("--gpu-memory lots", "--gpu-memory");
  refused("--set train.seq=1000000", "max_position");
  refused("--trace /nowhere/trace.json", "/nowhere/trace.json");
}

TEST_F(PlanProgram, AnUnwritablePlanIsNamed) {
  fs::create_directory(plan_file());
  EXPECT_EQ(plan(""), 1);
  EXPECT_THAT(errors(), HasSubstr(plan_file().string()));
  EXPECT_EQ(left().size(), 1u);
}

TEST_F(PlanProgram, AFailedCallKeepsTheOldPlan) {
  ASSERT_EQ(plan(""), 0) << errors();
  const std::string before = read(plan_file());
  EXPECT_EQ(plan("--gpu-memory 100MiB"), 3);
  EXPECT_EQ(read(plan_file()), before);
  EXPECT_EQ(left().size(), 1u);
}

TEST_F(PlanProgram, UsageErrors) {
  EXPECT_EQ(run("--model x"), 2);
  EXPECT_THAT(errors(), HasSubstr("--hardware"));
  EXPECT_EQ(plan("--no-such-flag"), 2);
  EXPECT_EQ(plan("--top 0"), 2);
  EXPECT_THAT(left(), IsEmpty());
  EXPECT_EQ(run("--help"), 0);
  EXPECT_THAT(output(), HasSubstr("--gpu-memory"));
}

TEST_F(PlanProgram, CalibratesFromAProfileDatabase) {
  ProfileRun measured = test::SyntheticProfile(test::true_machine(), {0.01, 0.01, 0, 0.02}, 5).run();
  HardwareSpec start = empty_profile(measured.machine, measured.backend, measured.ranks);
  fit_profile(measured, start);
  const fs::path database = folder_ / "profile.db", original = folder_ / "hw.yaml", again = out_ / "again.yaml";
  write_profile(measured, original);
  save_profile(measured, database);
  ASSERT_EQ(run("--calibrate '" + database.string() + "' --out '" + again.string() + "'"), 0) << errors();
  EXPECT_EQ(read(again), read(original)) << "exactly the profile of that run";
  EXPECT_THAT(output(), HasSubstr("Profile 1 of"));

  // A run of one probe only: what it did not measure comes from elsewhere.
  std::erase_if(measured.outcomes, [](const ProbeOutcome& outcome) { return outcome.key != "copy.h2d"; });
  save_profile(measured, database);
  const std::string one = "--calibrate '" + database.string() + "' --out '" + (out_ / "one.yaml").string() + "' ";
  EXPECT_EQ(run(one), 1);
  EXPECT_THAT(errors(), HasSubstr("not complete"));
  EXPECT_EQ(run(one + "--hardware '" + original.string() + "'"), 0) << errors();
  EXPECT_EQ(run(one + "--profile 1"), 0) << errors();
  EXPECT_EQ(read(out_ / "one.yaml"), read(original));
  EXPECT_EQ(run(one + "--profile 7"), 1);
  EXPECT_THAT(errors(), HasSubstr("there are 1, 2"));
}

TEST_F(PlanProgram, CalibrateNamesWhatItCannotUse) {
  const auto refused = [&](const std::string& arguments, int status, const std::string& named) {
    EXPECT_EQ(run(arguments + " --out '" + plan_file().string() + "'"), status) << arguments;
    EXPECT_THAT(errors(), HasSubstr(named)) << arguments;
    EXPECT_THAT(left(), IsEmpty()) << arguments;
  };
  const std::string text = (folder_ / "text.db").string(), other = (folder_ / "other.db").string();
  std::ofstream(text) << "this is no database, however long the text may be, and it is quite long";
  {
    SQLite::Database database(other, SQLite::OPEN_READWRITE | SQLite::OPEN_CREATE);
    database.exec("CREATE TABLE mine (x)");
  }
  refused("--calibrate '" + (folder_ / "none.db").string() + "'", 1, "none.db: there is no such file");
  refused("--calibrate '" + text + "'", 1, "text.db: cannot be read as a database");
  refused("--calibrate '" + other + "'", 1, "neither a profile database");
  refused("--calibrate '" + other + "' --pin delivery=sharded", 2, "--pin");
  refused("--profile 1", 2, "--calibrate");
}

}  // namespace
}  // namespace slidedp
