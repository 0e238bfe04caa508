// Element-wise sums in a fixed order: the reference of every reduce-scatter.
#pragma once

#include <cstdint>
#include <span>

#include "model/base/types.h"

namespace slidedp {

// to[i] = sources[0][i] + sources[1][i] + ..., summed in fp32 in that order and rounded once (bf16: to nearest even).
// `sources` is not empty; `to` may be one of them.
void sum_in_order(std::span<const void* const> sources, void* to, int64_t elements, DType type);

}  // namespace slidedp
