// Every machine of the catalogue can be planned for.
#include "model/spec/catalogue.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <vector>

#include "model/cost/flops.h"
#include "tests/planner/problems.h"

namespace slidedp {
namespace {

std::vector<std::filesystem::path> files_in(const std::string& folder) {
  std::vector<std::filesystem::path> files;
  for (const auto& entry : std::filesystem::directory_iterator(test::config(folder))) files.push_back(entry.path());
  return files;
}

// One training step's flops without recomputation; a layer's backward is twice its forward.
double step_flops(const ModelSpec& model, const TrainSpec& train) {
  const double layers = static_cast<double>(model.layers);
  return layers * 3 * layer_forward_flops(model, train.batch_rows, train.seq) +
         head_flops(model, train.batch_rows * train.seq);
}

TEST(CataloguePlans, EveryPairPlansASmallModel) {
  const ModelSpec model = load_model_spec(test::config("model/SmolLM2-135M.json"));
  TrainSpec train = load_train_spec(test::config("train/demo.yaml"));
  train.batch_rows = 64;
  // One of few shapes, so that a search takes milliseconds.
  const Pins pins{{"waves", "1"},       {"micro_batches", "1"}, {"chunk", "16MiB"},         {"update", "eager"},
                  {"layer_slots", "2"}, {"activation", "keep"}, {"vocabulary_kept", "true"}};
  size_t planned = 0;
  for (const auto& gpu_file : files_in("hardware/gpu")) {
    const CatalogueGpu gpu = load_catalogue_gpu(gpu_file);
    for (const auto& host_file : files_in("hardware/host")) {
      const CatalogueHost host = load_catalogue_host(host_file);
      for (const int gpus : {1, 2}) {
        if (gpu.c2c_gbps > 0 && gpus > host.c2c_gpus) continue;
        const HardwareSpec hardware = compose_hardware(gpu, host, gpus);
        SCOPED_TRACE(hardware.name);
        const SearchResult result =
            search(model, train, hardware, {hardware.device.memory_bytes, hardware.host.memory_bytes}, pins, {});
        const Candidate& best = result.best.front();
        // No faster than the tensor cores' peak, and no slower than a hundredth of it.
        const double floor_s = step_flops(model, train) / (best.plan.ranks * gpu.bf16_tflops * 1e12);
        EXPECT_GT(best.step.seconds, floor_s);
        EXPECT_LT(best.step.seconds, 100 * floor_s);
        EXPECT_LE(best.bound, best.step);
        ++planned;
      }
    }
  }
  EXPECT_EQ(planned, 2u * 10 * 9 + 1) << "ten GPUs in every host, and the superchip in its own";
}

}  // namespace
}  // namespace slidedp
