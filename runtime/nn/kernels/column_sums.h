// Sums over rows: bias gradients, and the last step of a norm's weight gradient.
#pragma once

#include "runtime/nn/kernels/launch.h"

namespace slidedp::nn {

// Rows of `width` floats that column_partials() writes for so many rows.
int64_t column_partial_rows(int64_t rows);
// partials[b][j] = sum over the b-th part of the rows of values[row][j]. values: bf16, dense rows of `width`.
void column_partials(const uint16_t* values, int64_t rows, int64_t width, float* partials, cudaStream_t stream);
// range[j] = or += sum over rows of partials[row * stride + j], in the order of rows, in fp64, rounded once.
void store_column_sums(const float* partials, int64_t rows, int64_t width, int64_t stride, GradientRange range,
                       cudaStream_t stream);

}  // namespace slidedp::nn
