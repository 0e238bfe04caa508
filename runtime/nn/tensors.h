// The few ATen calls that layers and head share. Every tensor is fp32 on the CPU.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace slidedp::nn {

// Throws std::logic_error unless BLAS calls of this process reach libtorch's MKL: another library's would be slower and
// would have other bits.
void check_blas();

// Borrowed memory as a matrix; `stride` elements between rows (0: dense).
at::Tensor view(float* data, int64_t rows, int64_t columns, int64_t stride = 0);
at::Tensor view(const float* data, int64_t rows, int64_t columns);  // callers only read it
// A temporary, uninitialised.
at::Tensor matrix(int64_t rows, int64_t columns);
// The borrowed memory, or a temporary if it is null.
at::Tensor saved_or_temporary(float* saved, int64_t rows, int64_t columns);
// A bf16 matrix as an fp32 temporary.
at::Tensor weights_as_fp32(const uint16_t* data, int64_t rows, int64_t columns);
// out = a * b, or out += a * b. Same bits for any number of threads. out has dense rows.
void multiply(at::Tensor& out, const at::Tensor& a, const at::Tensor& b, bool add);

}  // namespace slidedp::nn
