// The CUDA backend's compute: decoder math in bf16 with fp32 accumulation, matrix products by cuBLASLt, attention by
// cuDNN or flash (chosen by measurement), the rest by fused kernels (../kernels). Plain header: no torch, no CUDA
// types.
//
// Token ids, targets and positions lie on the device and are not looked at on the host: one that is out of range gives
// NaN (hidden state, loss, rotation), and a run with a non-finite loss or gradient norm stops or skips the update.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "model/spec/layout.h"
#include "model/spec/model_spec.h"
#include "model/spec/plan.h"
#include "runtime/nn/compute.h"

namespace slidedp {

struct CudaComputeOptions {
  // Attention by plain tiled matrix products: every result has the same bits twice. Slow, for tests and audits.
  bool deterministic = false;
  // The cudaStream_t that work goes to now, asked at every call (a device that runs several lanes from one thread knows
  // which one it is launching on; cast() may come on another than the rest). Empty: always `cuda_stream`.
  std::function<void*()> current_stream;
};

class CudaCompute : public Compute {
 public:
  // One line for the log: the attention backends in use and what was measured.
  virtual const std::string& attention_report() const = 0;
};

// One object a rank, on the GPU of that ordinal; `cuda_stream` is a cudaStream_t (null: the default stream).
// plan.compute must be bf16. Measures the attention backends once a process, GPU and shape. The first call on a stream
// takes the large ones of temporary_bytes() from the device as one block, which stays with ATen's caching allocator
// while the object lives; later calls ask the device for pieces of small tensors at most. Throws Error for a model or a
// plan that the kernels do not take, or if that memory is not there.
std::unique_ptr<CudaCompute> make_cuda_compute(const ModelSpec& model, const ModelLayout& layout, const Plan& plan,
                                               int device_ordinal, void* cuda_stream,
                                               CudaComputeOptions options = CudaComputeOptions());

// What ATen's caching allocator has handed out, over all GPUs that have a compute object: what the compute objects keep
// and their temporaries. `reserved`: what it holds of the device's memory, handed out or not.
struct CudaTemporaries {
  int64_t in_use = 0;    // bytes
  int64_t peak = 0;      // bytes, since the last reset
  int64_t reserved = 0;  // bytes
};
CudaTemporaries cuda_temporaries();
void reset_cuda_temporaries_peak();

}  // namespace slidedp
