// Kernels of the CUDA tests.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace slidedp::test {

// data[i] = data[i] * factor + term.
void scale(int32_t* data, int64_t count, int32_t factor, int32_t term, cudaStream_t stream);
// Keeps the stream busy until the host sets *flag, which is pinned memory.
void spin_until_set(const int32_t* flag, cudaStream_t stream);
// Writes where no memory is: the context fails.
void write_nowhere(cudaStream_t stream);
// More threads in a block than there can be: the launch itself fails.
void launch_badly(cudaStream_t stream);

}  // namespace slidedp::test
