#include "runtime/nn/cuda/gemm_choice.h"

#include <cublasLt.h>

#include <algorithm>
#include <iterator>

namespace slidedp::nn {
namespace {

// Of these two blocks fit on a multiprocessor of Hopper, so that one writes its results while the other multiplies.
// With larger tiles nothing multiplies meanwhile, which costs a product with a short inner dimension 3 to 7 % (H200 at
// its power limit, tests/bench/gemm_algorithms.cpp). The library ranks them behind the larger ones, which move less.
constexpr cublasLtMatmulTile_t kPairedTiles[] = {CUBLASLT_MATMUL_TILE_176x128, CUBLASLT_MATMUL_TILE_168x128,
                                                 CUBLASLT_MATMUL_TILE_128x160};
constexpr int64_t kShortInner = 3072;
// With fewer waves it matters how full the last one is, which the library takes into account.
constexpr float kManyWaves = 16;

}  // namespace

size_t choose_algorithm(std::span<const ProposedAlgorithm> proposed, int64_t inner, bool hopper) {
  if (!hopper || inner > kShortInner) return 0;
  const auto paired = std::ranges::find_if(proposed, [](const ProposedAlgorithm& each) {
    return each.waves >= kManyWaves && std::ranges::find(kPairedTiles, each.tile) != std::end(kPairedTiles);
  });
  return paired == proposed.end() ? 0 : static_cast<size_t>(paired - proposed.begin());
}

}  // namespace slidedp::nn
