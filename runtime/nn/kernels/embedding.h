// Token lookup and its gradient. Rows are `hidden` elements of bf16.
#pragma once

#include "runtime/nn/kernels/launch.h"

namespace slidedp::nn {

// out[t] = table[ids[t]]; an id outside [0, rows) gives NaN.
void embedding_gather(const uint16_t* table, const int32_t* ids, int64_t tokens, int64_t hidden, int64_t rows,
                      uint16_t* out, cudaStream_t stream);

// Device memory that embedding_scatter needs for so many tokens, in bytes.
int64_t embedding_scratch_bytes(int64_t tokens, int64_t hidden);
// Adds the gradient of every token to its row of the matrix [rows, hidden] at range.data; when range.first, rows of no
// token become zero. Tokens are sorted by id (stable) and each row is summed in fp32: pieces of 64 tokens in token
// order, then the pieces in order. Ids outside [0, rows) are left out.
void embedding_scatter(const int32_t* ids, int64_t tokens, int64_t hidden, const uint16_t* gradient, int64_t rows,
                       GradientRange range, void* scratch, cudaStream_t stream);

}  // namespace slidedp::nn
