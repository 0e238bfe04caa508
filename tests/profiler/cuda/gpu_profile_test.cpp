// slidedp-profile on a GPU, with a tiny model.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <string>

#include "model/calibration/contention_fit.h"
#include "model/spec/hardware_spec.h"
#include "profiler/kernel_bench.h"
#include "profiler/profile.h"
#include "tests/support/gpu.h"
#include "tests/support/programs.h"

namespace slidedp {
namespace {

namespace fs = std::filesystem;

constexpr const char* kTinyConfig = R"({"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3",
  "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4,
  "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 1024, "max_position_embeddings": 512, "rms_norm_eps": 1e-6,
  "hidden_act": "silu", "tie_word_embeddings": true, "rope_theta": 1000000.0})";

class GpuProfile : public test::NeedsGpu<> {
 protected:
  GpuProfile() {
    std::string pattern = (fs::temp_directory_path() / "slidedp_gpu_profile_XXXXXX").string();
    folder_ = mkdtemp(pattern.data());
    std::ofstream(folder_ / "config.json") << kTinyConfig;
  }
  ~GpuProfile() override { fs::remove_all(folder_); }

  fs::path folder_;
};

TEST_F(GpuProfile, MeasuresEveryFieldOfOneGpu) {
  const test::Finished profile =
      test::run_command("cd " + folder_.string() + " && " + test::program("slidedp-profile") +
                        " --backend cuda --ranks 1 --model config.json --out hw.yaml --db p.db --quick 2>&1");
  ASSERT_EQ(profile.status, 0) << profile.output;
  const HardwareSpec spec = load_hardware_spec(folder_ / "hw.yaml");
  EXPECT_EQ(spec.device.backend, "cuda");
  EXPECT_EQ(spec.gpus, 1);
  EXPECT_EQ(spec.device.name, device_facts("cuda").name);
  EXPECT_EQ(spec.device.memory_bytes, device_facts("cuda").total_bytes);
  // No driver's context is smaller than this.
  EXPECT_GT(spec.device.context_bytes, int64_t{100} << 20);
  // Only what no GPU that the backend takes can fail: a unit that is off by 1000 does.
  for (const double gbps : {spec.pcie.h2d.gbps, spec.pcie.d2h.gbps, spec.pcie.duplex_gbps, spec.pcie.root_h2d_gbps}) {
    EXPECT_GT(gbps, 0.5);
    EXPECT_LT(gbps, 2000);
  }
  EXPECT_GT(spec.kernels.elementwise_gbps, 50);
  EXPECT_LT(spec.kernels.elementwise_gbps, 50000);
  EXPECT_GT(spec.kernels.launch_latency_s, 1e-7);
  EXPECT_LT(spec.kernels.launch_latency_s, 1e-3);
  EXPECT_GT(spec.kernels.layer_fwd.peak_gflops, 100);
  EXPECT_GT(spec.host.split_weights_elements_per_s, 1e6);
  // Copies and Adam together are slower than either alone.
  const int threads = std::max(1, spec.host.cores - 2);
  EXPECT_LT(
      predict_together(spec, {true, true, threads}).sum(),
      0.98 * (predict_together(spec, {true, true, 0}).sum() + predict_together(spec, {false, false, threads}).sum()));
  EXPECT_EQ(spec.collectives.all_gather.gbps, 0) << "waived";
}

TEST_F(GpuProfile, KernelsRunAtSeveralShapesAndGiveTheirMemoryBack) {
  ProbeContext context = make_context(identify_machine(), load_model_spec(folder_ / "config.json"), true);
  context.backend = "cuda";
  const int64_t free = device_facts("cuda").free_bytes;
  context.device_available_bytes = free / 2;
  const ModelSpec measured = measured_model(context);
  for (const KernelShape& shape : kernel_shapes(context, measured)) {
    KernelBench bench(context, measured, shape);
    EXPECT_THAT(bench.layer(), testing::ElementsAre(testing::Gt(0), testing::Gt(0))) << shape.tokens();
    EXPECT_GT(bench.head(), 0) << shape.tokens();
    EXPECT_GT(bench.embedding_forward(), 0) << shape.tokens();
    EXPECT_GT(bench.embedding_backward(true), 0) << shape.tokens();
  }
  // What stays are kernels and libraries that the driver has loaded.
  EXPECT_GT(device_facts("cuda").free_bytes, free - (int64_t{2} << 30));
}

}  // namespace
}  // namespace slidedp
