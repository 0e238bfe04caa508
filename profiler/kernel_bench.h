// One layer, one embedding and one head of the model on one rank, with made-up weights and tokens.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "profiler/device_lane.h"
#include "profiler/probe.h"
#include "runtime/device/backends.h"

namespace slidedp {

// The model as the kernel probes measure it: one layer, and a vocabulary cut to what makes a matrix of at most
// kMostMatrixElements (the head's time is proportional to it, and the flops are counted for the cut one).
inline constexpr int64_t kMostMatrixElements = int64_t{64} << 20;
ModelSpec measured_model(const ModelSpec& model);

// Bytes that a bench for `tokens` tokens needs, upper bound.
int64_t bench_bytes(const ModelSpec& measured, int64_t tokens);

// Token counts to measure at: doubling from a small one; the caller stops when its time is spent.
int64_t first_token_count(const ModelSpec& measured);
int64_t last_token_count(const ModelSpec& measured, bool quick);

// Device memory and the compute object for one micro-batch of one row of `tokens` tokens. One intra-op thread.
class KernelBench {
 public:
  KernelBench(const ProbeContext& context, const ModelSpec& measured, int64_t tokens);

  // Seconds of one call, in stream order on the device.
  double embedding_forward();
  double embedding_backward(bool first);
  // Forward, then backward of what it saved: {forward, backward}.
  std::vector<double> layer();
  double head();

 private:
  DeviceMemory filled(int64_t elements, DType type);
  MicroBatch make_batch();
  double time(const std::function<void()>& work);

  ModelSpec model_;
  ModelLayout layout_;
  int64_t tokens_;
  Backend backend_;
  Device* device_ = nullptr;
  std::unique_ptr<DeviceLane> lane_;
  std::vector<uint16_t> pattern_bf16_;  // host copies that fill() takes its values from
  std::vector<float> pattern_fp32_;
  std::vector<int32_t> document_starts_{0};
  DeviceMemory batch_, hidden_in_, hidden_out_, hidden_gradient_, loss_;
  // Allocated by the first call that needs them.
  DeviceMemory embedding_weights_, embedding_gradients_, layer_weights_, layer_gradients_, saved_, head_weights_,
      head_gradients_;
};

}  // namespace slidedp
