// Which of the algorithms that cuBLASLt proposes for a matrix product is taken. A rule, not a measurement, so that the
// same shapes give the same bits in every process.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace slidedp::nn {

// What the library says of an algorithm.
struct ProposedAlgorithm {
  uint32_t tile = 0;  // cublasLtMatmulTile_t: the part of the result that a block computes
  float waves = 0;    // how often all blocks that run at once follow one another
};

// Index of the one to take; `proposed`, not empty, in the library's order. `hopper`: compute capability 9.0.
size_t choose_algorithm(std::span<const ProposedAlgorithm> proposed, int64_t inner, bool hopper);

}  // namespace slidedp::nn
