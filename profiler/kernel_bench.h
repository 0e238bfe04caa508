// One layer, one embedding and one head of the model on one rank, with made-up weights and tokens.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "profiler/device_lane.h"
#include "profiler/probe.h"
#include "runtime/device/backends.h"

namespace slidedp {

// The model as the kernel probes measure it: one layer, and on the CPU backend a vocabulary cut to what makes a matrix
// of at most kMostMatrixElements (the head's time is proportional to it, and the flops are counted for the cut one).
inline constexpr int64_t kMostMatrixElements = int64_t{64} << 20;
ModelSpec measured_model(const ProbeContext& context);

// The type that the backend computes in.
DType compute_type(const ProbeContext& context);

// One micro-batch: `rows` rows of one document each, or of several that are equally long.
struct KernelShape {
  int64_t rows = 1, seq = 0;
  int64_t documents = 1;  // in a row; divides seq
  int64_t tokens() const { return rows * seq; }
};

// Tokens of a row as training has them.
int64_t whole_row(const ModelSpec& model);

// Shapes to measure at, by tokens: on the CPU backend one row, doubling from a small one; on a device up to several
// whole rows, as far as its memory goes.
std::vector<KernelShape> kernel_shapes(const ProbeContext& context, const ModelSpec& measured);

// What a layer is measured at: the model at those shapes and, unless quick, more shapes and narrower and wider models
// of its family, so that its law (LayerRate) can tell products, attention and other kernels apart and holds for models
// that were not measured.
struct LayerDesign {
  ModelSpec model;
  KernelShape shape;
  bool own = true;  // the model whose shapes are asked for
};
std::vector<LayerDesign> layer_designs(const ProbeContext& context);

// Bytes of the rank's device that a bench needs, upper bound.
int64_t bench_bytes(const ProbeContext& context, const ModelSpec& measured, const KernelShape& shape);

// One rank with its compute object for micro-batches of this shape, one intra-op thread.
Backend kernel_backend(const ProbeContext& context, const ModelSpec& measured, const KernelShape& shape);

// Values of the size that real ones have: no denormals, no infinities, and never all alike (a GPU takes less power, and
// is faster, on zeros). The same ones every kFillElements.
inline constexpr int64_t kFillElements = int64_t{1} << 20;
void fill_random(Device& device, Stream& stream, const DeviceMemory& memory, DType type);

// Device memory and the compute object for one micro-batch.
class KernelBench {
 public:
  KernelBench(const ProbeContext& context, const ModelSpec& measured, const KernelShape& shape);

  // Seconds of one call, in stream order on the device; the mean of several in a row where the device runs ahead of the
  // thread that launches.
  double embedding_forward();
  double embedding_backward(bool first);
  // Forward, then backward of what it saved: {forward, backward}.
  std::vector<double> layer();
  double head();

 private:
  struct LayerEvents {
    std::unique_ptr<Event> begin, middle, end;
  };
  // Allocates and fills it with random numbers, unless that was done.
  void fill_once(DeviceMemory& memory, int64_t elements, DType type);
  MicroBatch make_batch();
  void fill_batch();
  double time(const std::function<void()>& work);

  ModelSpec model_;
  ModelLayout layout_;
  KernelShape shape_;
  DType hidden_type_;
  int calls_;  // in a row
  Backend backend_;
  Device* device_ = nullptr;
  std::unique_ptr<DeviceLane> lane_;
  std::vector<int32_t> document_starts_;
  std::vector<LayerEvents> layer_events_;
  DeviceMemory batch_, hidden_in_, hidden_out_, hidden_gradient_, fresh_gradient_, loss_;
  // Allocated by the first call that needs them.
  DeviceMemory embedding_weights_, embedding_gradients_, layer_weights_, layer_gradients_, saved_, head_weights_,
      head_gradients_;
};

}  // namespace slidedp
