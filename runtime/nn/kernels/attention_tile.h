// The softmax steps of attention by plain matrix products: one tile of query rows against all keys up to its end.
// Scores of one tile: fp32 [batch][rows][keys], keys a multiple of 8 apart; row r is query first_query + r, which sees
// the keys up to itself.
#pragma once

#include "runtime/nn/kernels/launch.h"

namespace slidedp::nn {

struct ScoreTile {
  int64_t batch = 0;
  int64_t rows = 0, keys = 0, stride = 0;  // elements between rows
  int64_t first_query = 0;
  float scale = 0;
  // log_sum_exp and dot of row r of batch b: element b * row_stats_stride + r.
  int64_t row_stats_stride = 0;
};

// probabilities (bf16, laid out as the scores) = softmax(scale * scores), masked; log_sum_exp in natural units.
void softmax_rows(const ScoreTile& tile, const float* scores, uint16_t* probabilities, float* log_sum_exp,
                  cudaStream_t stream);
// probabilities = exp(scale * scores - log_sum_exp); score_gradients = scale * probabilities * (gradients - dot), where
// `gradients` (fp32, laid out as the scores) are those of the probabilities.
void softmax_rows_backward(const ScoreTile& tile, const float* scores, const float* gradients, const float* log_sum_exp,
                           const float* dot, uint16_t* probabilities, uint16_t* score_gradients, cudaStream_t stream);
// dot[head * tokens + t] = sum over a head's elements of out * out_gradient; both [tokens, heads * head_dim].
void output_dots(const uint16_t* out, const uint16_t* out_gradient, int64_t tokens, int64_t heads, int64_t head_dim,
                 float* dot, cudaStream_t stream);

}  // namespace slidedp::nn
