// Conversions, accumulation and sums of squares of flat arrays, at any alignment (16-byte aligned ones go faster).
// Memory-bound: every element is read and written once.
#pragma once

#include "runtime/nn/kernels/launch.h"

namespace slidedp::nn {

// Round to nearest even; NaN stays NaN.
void narrow_to_bf16(const float* from, uint16_t* to, int64_t elements, cudaStream_t stream);
void widen_to_fp32(const uint16_t* from, float* to, int64_t elements, cudaStream_t stream);
// sum = or += values.
void accumulate_bf16(const uint16_t* values, float* sum, bool first, int64_t elements, cudaStream_t stream);

// sums[b] = sum of squares of the b-th block of 64 elements (the last may be shorter), in fp64: eight interleaved
// partial sums, folded in a fixed order, the one that the host uses.
void square_sums_fp32(const float* values, int64_t elements, double* sums, cudaStream_t stream);
void square_sums_bf16(const uint16_t* values, int64_t elements, double* sums, cudaStream_t stream);

}  // namespace slidedp::nn
