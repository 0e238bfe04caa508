// A tiny model with seeded random weights and data, trained in this process: the same start for every plan.
#pragma once

#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "model/spec/model_spec.h"
#include "model/spec/plan.h"
#include "model/spec/train_spec.h"
#include "runtime/device/backends.h"
#include "runtime/device/cpu/cpu_device.h"
#include "runtime/exec/executor.h"
#include "runtime/exec/step_io.h"
#include "runtime/exec/trainer.h"
#include "runtime/host/host_state.h"

namespace slidedp::testing {

// The whole training state, element by element.
struct StateCopy {
  std::vector<uint16_t> hi, lo;
  std::vector<float> m, v;
  bool operator==(const StateCopy&) const = default;
};

struct RunResult {
  std::vector<double> losses, gradient_norms;
  std::vector<bool> skipped;
  // By tensor, in layout order: m after one step divided by 1 - beta1, which is the first step's gradient (mean over
  // target tokens). Filled if the run was asked for it.
  std::vector<std::vector<float>> first_gradients;
  StateCopy state;
  int64_t device_peak = 0, temporary_peak = 0;  // bytes; largest rank, all ranks
  CopiedBytes copied;                           // of all ranks and steps; left out where a test wraps the device
  std::vector<Timeline> timelines;
  std::vector<std::string> notes;  // the executor's
};

// |a - b| / |b| in the 2-norm; |a| if b is zero.
double relative_difference(const std::vector<float>& a, const std::vector<float>& b);

// Where a training runs.
struct TinyBackend {
  std::function<Backend(const ModelSpec&, const ModelLayout&, const Plan&)> make;
  std::function<void()> reset_temporary_peak = [] {};
  std::function<int64_t()> temporary_peak = [] { return int64_t{0}; };
};

class TinyTraining {
 public:
  TinyTraining(ModelSpec model, TinyBackend backend);
  // On the CPU backend with ATen (library slidedp_tiny_aten). 4 layers, grouped KV heads, dims that are no multiples of
  // 64; tied or not.
  explicit TinyTraining(bool tied);
  // With another hidden size: vocabulary_rows = touched needs a multiple of 64.
  TinyTraining(bool tied, int64_t hidden);
  ~TinyTraining();
  TinyTraining(const TinyTraining&) = delete;
  TinyTraining& operator=(const TinyTraining&) = delete;

  const ModelSpec& model() const { return model_; }
  TrainSpec train() const;  // 8 rows of 16 tokens, lr 1e-4
  // A legal plan: one rank, everything in one micro-batch, all layers keep, eager, fp32 wire.
  Plan plan() const;
  // A plan for `ranks` ranks with `micro_batches` micro-batches a wave each.
  Plan plan(int ranks, int micro_batches, int waves = 1) const;
  std::filesystem::path data() const { return folder_ / "packed.safetensors"; }
  std::filesystem::path folder() const { return folder_; }  // removed at the end
  // The start of every run as a Hugging Face checkpoint, and a plan file for it; both in folder().
  std::filesystem::path write_checkpoint() const;
  std::filesystem::path write_plan(const Plan& plan, const TrainSpec& train,
                                   const std::string& name = "plan.yaml") const;

  // Changes the backend before the run, e.g. to inject faults.
  using Prepare = std::function<void(Backend&)>;
  RunResult run(
      const Plan& plan, const TrainSpec& train, int64_t steps, const Prepare& prepare = {},
      const PoolHook& before_pool_task = {},
      const std::function<StopRequest()>& stop = [] { return StopRequest::none; }) const;
  // run() for one step, with first_gradients filled.
  RunResult first_step(const Plan& plan, const TrainSpec& train) const;

 private:
  void initialise(HostState& state) const;
  ModelSpec model_;
  ModelLayout layout_;
  TinyBackend backend_;
  std::filesystem::path folder_;
};

}  // namespace slidedp::testing
