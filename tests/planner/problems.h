// Small models and machines for the planner's tests.
#pragma once

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <random>
#include <string>
#include <vector>

#include "model/spec/hardware_spec.h"
#include "model/spec/model_spec.h"
#include "model/spec/train_spec.h"
#include "planner/search.h"

namespace slidedp::test {

inline std::filesystem::path config(const std::string& name) {
  return std::filesystem::path(SLIDEDP_SOURCE_DIR) / "configs" / name;
}

template <typename T>
const T& pick(std::mt19937& random, const std::vector<T>& values) {
  return values[random() % values.size()];
}

// Log-uniform.
inline double between(std::mt19937& random, double low, double high) {
  return low * std::pow(high / low, std::uniform_real_distribution<>(0, 1)(random));
}

inline ModelSpec random_model(std::mt19937& random) {
  ModelSpec model;
  model.name = "random";
  model.family = ModelFamily::llama;
  model.head_dim = 16;
  model.heads = pick<int64_t>(random, {4, 8});
  model.kv_heads = pick<int64_t>(random, {2, 4});
  model.hidden = model.heads * model.head_dim;
  model.intermediate = 64 * pick<int64_t>(random, {2, 3, 5});
  model.layers = pick<int64_t>(random, {1, 2, 3, 4});
  model.vocabulary = pick<int64_t>(random, {300, 1000});
  model.max_position = 4096;
  model.tied = random() % 2 == 0;
  model.qk_norm = random() % 2 == 0;
  return model;
}

inline TrainSpec random_train(std::mt19937& random) {
  TrainSpec train;
  train.seq = pick<int64_t>(random, {64, 512});
  train.batch_rows = pick<int64_t>(random, {1, 2, 4, 6, 8, 8});
  train.steps = 10;
  train.max_grad_norm = random() % 3 == 0 ? 1.0 : 0.0;
  return train;
}

// Rates around those at which the tiny models' lanes are comparably busy, so that any of them can be the bottleneck.
inline HardwareSpec random_hardware(std::mt19937& random) {
  HardwareSpec hardware;
  hardware.name = "random";
  hardware.gpus = pick(random, std::vector<int>{1, 2, 3, 4, 8, 8});
  hardware.device = {"random", random() % 2 == 0 ? "cpu" : "cuda", int64_t{1} << 40, 0};
  const auto link = [&](double low, double high) {
    return LinkRate{between(random, 1e-6, 2e-5), between(random, low, high)};
  };
  hardware.pcie.h2d = link(1, 30);
  hardware.pcie.d2h = link(1, 30);
  hardware.pcie.duplex_gbps = std::max(hardware.pcie.h2d.gbps, hardware.pcie.d2h.gbps) * between(random, 1, 2);
  hardware.pcie.root_h2d_gbps = hardware.pcie.h2d.gbps * between(random, 1, hardware.gpus + 1e-9);
  hardware.pcie.root_d2h_gbps = hardware.pcie.d2h.gbps * between(random, 1, hardware.gpus + 1e-9);
  hardware.collectives = {link(1, 50), link(1, 50), link(1, 50)};
  const auto kernel = [&] { return KernelRate{between(random, 30, 3000), between(random, 1e-4, 1e-2)}; };
  hardware.kernels = {kernel(), kernel(), kernel(), {between(random, 1, 100), 0}, between(random, 5, 500), 5e-6};
  hardware.host.cores = pick(random, std::vector<int>{2, 4, 8});
  hardware.host.memory_bytes = int64_t{1} << 40;
  hardware.host.dram_gbps = between(random, 10, 100);
  hardware.host.cpu_stream_gbps = hardware.host.dram_gbps * between(random, 0.5, 1);
  hardware.host.adam_elements_per_s = between(random, 3e7, 1e9);
  hardware.host.norm_elements_per_s = between(random, 3e8, 5e9);
  hardware.host.source_gbps = between(random, 2, 20);
  return hardware;
}

// A few random pins that do not exclude each other. They also keep the space small.
inline Pins random_pins(std::mt19937& random, const HardwareSpec& hardware, const TrainSpec& train) {
  Pins pins;
  const auto sometimes = [&](unsigned of) { return random() % of == 0; };
  if (sometimes(2)) pins["layer_slots"] = pick<std::string>(random, {"1", "2", "3"});
  if (sometimes(3)) pins["threads.update"] = "2";
  if (sometimes(4)) pins["wire"] = pick<std::string>(random, {"bf16", "fp32"});
  if (sometimes(4)) pins["chunk"] = pick<std::string>(random, {"4KiB", "16KiB", "1MiB"});
  if (sometimes(5)) pins["accumulator"] = "fp32";
  if (sometimes(4)) {
    pins["update"] = train.max_grad_norm == 0 ? pick<std::string>(random, {"eager", "deferred", "split"})
                                              : pick<std::string>(random, {"deferred", "split"});
  }
  if (sometimes(6)) pins["activation"] = pick<std::string>(random, {"keep", "selective", "recompute", "offload"});
  if (hardware.gpus >= 8 && train.batch_rows % 8 == 0) {
    pins["ranks"] = "8";  // else too rare
  } else if (sometimes(4) && hardware.gpus >= 2 && train.batch_rows % 2 == 0) {
    pins["ranks"] = "2";
  }
  return pins;
}

}  // namespace slidedp::test
