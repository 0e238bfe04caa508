// Copies rows by index from host memory to a GPU, by a kernel that reads the host over the link itself.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace slidedp {

// Row i of `device` = row rows[i] of `host_base`; rows are `row_bytes` long on both sides. `host_base` and `rows` are
// addresses under which the GPU sees host memory. Returns the launch's status.
cudaError_t gather_rows(void* device, const void* host_base, const int32_t* rows, int64_t count, int64_t row_bytes,
                        cudaStream_t stream);

}  // namespace slidedp
