// What the launchers of all CUDA kernels share. Kernels take raw pointers (bf16 as uint16_t), sizes and a stream;
// pointers to bf16 rows are aligned to 16 bytes and row widths are multiples of kVectorElements. Every kernel sums in
// an order that the shapes alone decide, so it gives the same bits twice, on any GPU and at any address.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace slidedp::nn {

inline constexpr int64_t kVectorElements = 8;  // bf16 elements in 16 bytes

// Where a kernel stores a gradient: a range of a gradient slot, fp32 or bf16.
struct GradientRange {
  void* data = nullptr;
  bool fp32 = true;
  bool first = true;  // overwrite; else add
};

// Throws std::runtime_error that names the kernel if its launch, or an earlier one, failed.
void check_launch(const char* kernel);
void check_cuda(cudaError_t status, const char* call);

}  // namespace slidedp::nn
