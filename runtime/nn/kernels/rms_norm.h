// RMSNorm over rows of bf16, statistics in fp32. Memory-bound: forward moves 2 * rows * width * 2 bytes, backward 4
// times rows * width * 2 with the residual's gradient added, 3 times without.
#pragma once

#include "runtime/nn/kernels/launch.h"

namespace slidedp::nn {

// Rows wider than this are not supported.
inline constexpr int64_t kMaxNormWidth = 16384;

// out = x * rstd * weight with rstd = 1 / sqrt(mean(x^2) + eps), rounded once. `rstd` ([rows], may be null) receives
// 1/rms.
void rms_norm(const uint16_t* x, const uint16_t* weight, float eps, int64_t rows, int64_t width, float* rstd,
              uint16_t* out, cudaStream_t stream);

// Partial sums of a norm's weight gradient: one row of `width` floats a block.
int64_t rms_norm_partial_rows(int64_t rows, int64_t width);

// gradient: of the norm's output. dx = (add: +=) gradient of x; dx may be `gradient` or `x`. partials
// [rms_norm_partial_rows(rows, width), width]: sums over rows of gradient * x * rstd, overwritten, or added to if
// `continued`.
void rms_norm_backward(const uint16_t* x, const uint16_t* weight, const float* rstd, const uint16_t* gradient,
                       int64_t rows, int64_t width, uint16_t* dx, bool add, float* partials, bool continued,
                       cudaStream_t stream);

}  // namespace slidedp::nn
