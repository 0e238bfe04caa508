// The program itself, on a tiny model.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <thread>

#include "model/spec/hardware_spec.h"
#include "tests/support/programs.h"

namespace slidedp {
namespace {

namespace fs = std::filesystem;
using test::Finished;
using testing::HasSubstr;

constexpr const char* kTinyConfig = R"({"architectures": ["LlamaForCausalLM"], "model_type": "llama",
  "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
  "num_key_value_heads": 2, "vocab_size": 256, "max_position_embeddings": 128, "rms_norm_eps": 1e-5,
  "hidden_act": "silu", "tie_word_embeddings": true, "rope_theta": 10000.0})";

class ProfileCli : public testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = (fs::temp_directory_path() / "slidedp_profile_cli_XXXXXX").string();
    folder_ = mkdtemp(pattern.data());
    std::ofstream(folder_ / "config.json") << kTinyConfig;
  }
  void TearDown() override { fs::remove_all(folder_); }

  Finished run(const std::string& arguments) const { return run_program("slidedp-profile", arguments); }
  // Its output is stdout and stderr.
  Finished run_program(const std::string& name, const std::string& arguments) const {
    return test::run_command("cd " + folder_.string() + " && " + test::program(name) + " " + arguments + " 2>&1");
  }
  std::string text(const std::string& name) const {
    std::ostringstream all;
    all << std::ifstream(folder_ / name).rdbuf();
    return all.str();
  }

  fs::path folder_;
};

TEST_F(ProfileCli, MeasuresEveryFieldThenOneProbeAgain) {
  const Finished full = run("--out hw.yaml --db p.db --model config.json --quick --device-memory 64MiB");
  ASSERT_EQ(full.status, 0) << full.output;
  EXPECT_THAT(full.output, HasSubstr("s in all"));
  const HardwareSpec spec = load_hardware_spec(folder_ / "hw.yaml");
  EXPECT_TRUE(spec.measured);
  EXPECT_EQ(spec.gpus, 2);
  EXPECT_EQ(spec.device.backend, "cpu");
  EXPECT_EQ(spec.device.memory_bytes, int64_t{64} << 20);
  EXPECT_GE(spec.host.cores, 1);
  EXPECT_GE(spec.host.dram_gbps, spec.host.cpu_stream_gbps);
  // Only what no CPU since 2005 and none in sight can fail: a unit that is off by 1000 does.
  for (double gbps :
       {spec.pcie.h2d.gbps, spec.pcie.d2h.gbps, spec.pcie.duplex_gbps, spec.pcie.root_h2d_gbps, spec.pcie.root_d2h_gbps,
        spec.collectives.all_gather.gbps, spec.kernels.elementwise_gbps, spec.host.cpu_stream_gbps}) {
    EXPECT_GT(gbps, 0.02);
    EXPECT_LT(gbps, 5000);
  }
  EXPECT_GT(spec.host.adam_elements_per_s, 1e6);
  EXPECT_LT(spec.host.adam_elements_per_s, 1e11);
  EXPECT_LT(spec.kernels.launch_latency_s, 0.1);

  // The same profile from the samples alone, by a program that measures nothing.
  const Finished again_fitted = run_program("slidedp-plan", "--calibrate p.db --out fitted.yaml");
  ASSERT_EQ(again_fitted.status, 0) << again_fitted.output;
  EXPECT_EQ(text("fitted.yaml"), text("hw.yaml"));
  const Finished same = run("--diff hw.yaml fitted.yaml");
  EXPECT_EQ(same.status, 0) << same.output;
  EXPECT_THAT(same.output, HasSubstr("kernels.layer_fwd.peak_gflops"));
  HardwareSpec slower = spec;
  // One value alone may differ by chance, the more so as two rounds on a busy machine leave wide errors.
  for (double* rate : {&slower.host.norm_elements_per_s, &slower.host.adam_elements_per_s, &slower.pcie.h2d.gbps,
                       &slower.pcie.d2h.gbps, &slower.pcie.duplex_gbps, &slower.kernels.elementwise_gbps}) {
    *rate /= 100;
  }
  std::ofstream(folder_ / "slower.yaml") << to_yaml(slower);
  const Finished changed = run("--diff hw.yaml slower.yaml");
  EXPECT_EQ(changed.status, 4) << changed.output;
  slower.uncertainty = {};
  std::ofstream(folder_ / "bare.yaml") << to_yaml(slower);
  const Finished bare = run("--diff hw.yaml bare.yaml");
  EXPECT_EQ(bare.status, 1);
  EXPECT_THAT(bare.output, HasSubstr("bare.yaml: has no section \"uncertainty\""));

  EXPECT_EQ(run("--out hw.yaml --db p.db --model config.json --quick").status, 1);
  const Finished again = run("--out hw.yaml --db p.db --model config.json --quick --only launch.latency");
  ASSERT_EQ(again.status, 0) << again.output;
  HardwareSpec expected = spec;
  const HardwareSpec updated = load_hardware_spec(folder_ / "hw.yaml");
  expected.kernels.launch_latency_s = updated.kernels.launch_latency_s;
  EXPECT_NE(updated.uncertainty.error_of("kernels.launch_latency_s"), nullptr);
  EXPECT_EQ(*updated.uncertainty.error_of("pcie.h2d.gbps"), *spec.uncertainty.error_of("pcie.h2d.gbps"));
  expected.uncertainty = updated.uncertainty;
  EXPECT_EQ(updated, expected) << "what was not measured again stays";

  const Finished ranks = run("--out hw.yaml --db p.db --ranks 3 --only launch.latency");
  EXPECT_EQ(ranks.status, 1);
  EXPECT_THAT(ranks.output, HasSubstr("was measured for 2 ranks"));
}

TEST_F(ProfileCli, ListsProbesWithTheirMethods) {
  const Finished list = run("--list");
  EXPECT_EQ(list.status, 0);
  EXPECT_THAT(list.output, HasSubstr("copy.h2d\n    Device::copy_to_device"));
  EXPECT_THAT(list.output, HasSubstr("kernel.head\n"));
}

TEST_F(ProfileCli, BadInputIsNamed) {
  struct Case {
    const char* arguments;
    int status;
    const char* message;
  };
  std::ofstream(folder_ / "old.yaml") << "old";
  const Case cases[]{
      {"", 2, "--out and --db are required"},
      {"--nonsense", 2, "--nonsense"},
      {"--diff old.yaml", 2, "--diff"},
      {"--diff none.yaml old.yaml", 1, "none.yaml"},
      {"--out none/hw.yaml --db p.db", 1, "none does not exist"},
      {"--out hw.yaml --db none/p.db", 1, "none does not exist"},
      {"--out old.yaml --db p.db", 1, "exists already"},
      {"--out hw.yaml --db p.db --only no.probe", 1, "\"no.probe\""},
      {"--out hw.yaml --db p.db --only host.dram", 1, "run all probes first"},
      {"--out old.yaml --db p.db --only host.dram", 1, "old.yaml"},
      {"--out hw.yaml --db p.db --model nowhere", 1, "nowhere"},
      {"--out hw.yaml --db p.db --backend tpu", 1, "tpu"},
      {"--out hw.yaml --db p.db --device-memory lots", 1, "--device-memory"},
      {"--out hw.yaml --db p.db --device-memory 900TiB", 1, "--device-memory"},
      {"--out hw.yaml --db p.db --ranks 0", 2, "--ranks"},
      {"--out hw.yaml --db old.yaml", 1, "old.yaml"},
  };
  for (const Case& one : cases) {
    const Finished result = run(one.arguments);
    EXPECT_EQ(result.status, one.status) << one.arguments << "\n" << result.output;
    EXPECT_THAT(result.output, HasSubstr(one.message)) << one.arguments;
  }
  EXPECT_FALSE(fs::exists(folder_ / "hw.yaml"));
  EXPECT_FALSE(fs::exists(folder_ / "p.db"));
  EXPECT_EQ(text("old.yaml"), "old");
}

TEST_F(ProfileCli, InterruptLeavesNothing) {
  const std::string log = (folder_ / "log").string();
  const pid_t child = fork();
  if (child == 0) {
    if (chdir(folder_.c_str()) != 0 || freopen(log.c_str(), "w", stdout) == nullptr ||
        dup2(fileno(stdout), fileno(stderr)) < 0) {
      _exit(99);
    }
    execl(test::program("slidedp-profile").c_str(), "slidedp-profile", "--out", "hw.yaml", "--db", "p.db", "--model",
          "config.json", nullptr);
    _exit(98);
  }
  // Once the first measured probe has begun, the handler is there and a full run has minutes to go.
  for (int i = 0; i < 600 && text("log").find("host.dram") == std::string::npos; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  }
  ASSERT_EQ(kill(child, SIGINT), 0);
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFEXITED(status)) << text("log");
  EXPECT_EQ(WEXITSTATUS(status), 130) << text("log");
  EXPECT_THAT(text("log"), HasSubstr("Interrupted"));
  for (const auto& entry : fs::directory_iterator(folder_)) {
    EXPECT_THAT((std::vector<std::string>{"log", "config.json"}), testing::Contains(entry.path().filename().string()));
  }
}

}  // namespace
}  // namespace slidedp
