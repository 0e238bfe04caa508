// The kernel of the local reduce-scatter on a GPU.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace slidedp {

inline constexpr int kMostSources = 8;

// As sum_in_order, on device memory: to[i] = sources[0][i] + sources[1][i] + ..., in fp32 in that order, rounded once.
// bf16 or fp32. Returns the launch's status; cudaErrorInvalidValue for more than kMostSources.
cudaError_t sum_in_order_on_gpu(const void* const* sources, int count, void* to, int64_t elements, bool bf16,
                                cudaStream_t stream);

}  // namespace slidedp
