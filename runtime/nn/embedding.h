// Token lookup and its gradient.
#pragma once

#include <cstdint>

#include "runtime/nn/gradient_slot.h"

namespace slidedp::nn {

// out[t] = table[ids[t]]; table is bf16 [rows, hidden].
void embedding_lookup(const uint16_t* table, const int32_t* ids, int64_t tokens, int64_t hidden, float* out);
// Adds the gradient of every token to its row, in token order; rows of no token become zero when slot.first().
void embedding_scatter(const int32_t* ids, int64_t tokens, int64_t hidden, const float* gradient,
                       const GradientSlot& slot, int64_t offset, int64_t rows);

}  // namespace slidedp::nn
