// Which algorithm a product takes, and that large products with a short inner dimension are right.
#include "runtime/nn/cuda/gemm.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <vector>

#include "model/cost/activations.h"
#include "runtime/nn/cuda/context.h"
#include "runtime/nn/cuda/gemm_choice.h"
#include "tests/runtime/nn/cuda/gpu_test.h"

namespace slidedp::test {
namespace {

using nn::choose_algorithm;
using nn::ProposedAlgorithm;

// What cuBLASLt 13.1 proposes for Qwen3-4B's q/k/v on an H200.
std::vector<ProposedAlgorithm> qkv_proposals() {
  return {{CUBLASLT_MATMUL_TILE_192x192, 41.5f}, {CUBLASLT_MATMUL_TILE_256x128, 46.5f},
          {CUBLASLT_MATMUL_TILE_128x256, 46.5f}, {CUBLASLT_MATMUL_TILE_320x128, 38.8f},
          {CUBLASLT_MATMUL_TILE_192x128, 62.1f}, {CUBLASLT_MATMUL_TILE_176x128, 67.9f},
          {CUBLASLT_MATMUL_TILE_128x192, 62.2f}, {CUBLASLT_MATMUL_TILE_128x160, 74.5f}};
}

TEST(GemmChoice, ShortInnerTakesTheFirstTileOfWhichTwoFit) {
  EXPECT_EQ(choose_algorithm(qkv_proposals(), 2560, /*hopper=*/true), 5u);
  std::vector<ProposedAlgorithm> without = qkv_proposals();
  without.erase(without.begin() + 5);
  EXPECT_EQ(choose_algorithm(without, 2560, true), 6u);
  without.pop_back();
  EXPECT_EQ(choose_algorithm(without, 2560, true), 0u);
}

TEST(GemmChoice, OtherwiseTheLibrarysFirst) {
  EXPECT_EQ(choose_algorithm(qkv_proposals(), 32768, true), 0u);
  EXPECT_EQ(choose_algorithm(qkv_proposals(), 2560, /*hopper=*/false), 0u);
  std::vector<ProposedAlgorithm> few_waves = qkv_proposals();
  for (ProposedAlgorithm& each : few_waves) each.waves /= 8;
  EXPECT_EQ(choose_algorithm(few_waves, 2560, true), 0u);
}

struct ProductCase {
  bool b_transposed, add;
};
void PrintTo(const ProductCase& c, std::ostream* out) {
  *out << (c.b_transposed ? "b_transposed" : "b") << (c.add ? "_add" : "");
}

class LargeProduct : public NeedsGpu<testing::TestWithParam<ProductCase>> {};

// Enough waves for the tiles that a small test never sees. The bound is the most that rounding to bf16 does; sums in
// fp32 are a thousand times closer.
TEST_P(LargeProduct, IsRoundedOnce) {
  const int64_t rows = 8192, columns = 6144, inner = 512, strip = 1024;
  const auto [b_transposed, add] = GetParam();
  const at::Tensor a = to_gpu(random_bf16({rows, inner}, 1)), b = to_gpu(random_bf16({inner, columns}, 2, 0.02));
  const at::Tensor stored_b = b_transposed ? b.t().contiguous() : b;
  const at::Tensor added = to_gpu(random_bf16({rows, 1}, 3)).expand({rows, columns}).contiguous();
  const at::Tensor out = unwritten({rows, columns}, at::kBFloat16);
  const at::Tensor workspace = nn::device_bytes(kCudaProductWorkspaceBytes, 0);
  nn::Gemm gemm(workspace.data_ptr(), kCudaProductWorkspaceBytes);
  gemm.run({.rows = rows,
            .columns = columns,
            .inner = inner,
            .a = {.data = a.data_ptr(), .stride = inner},
            .b = {.data = stored_b.data_ptr(), .stride = b_transposed ? inner : columns, .transposed = b_transposed},
            .out = out.data_ptr(),
            .out_stride = columns,
            .add = add ? added.data_ptr() : nullptr},
           nullptr);
  for (int64_t row = 0; row < rows; row += strip) {
    at::Tensor expected = at::matmul(a.narrow(0, row, strip).to(at::kDouble), b.to(at::kDouble));
    if (add) expected += added.narrow(0, row, strip).to(at::kDouble);
    const at::Tensor error = (out.narrow(0, row, strip).to(at::kDouble) - expected).norm() / expected.norm();
    EXPECT_LT(error.item<double>(), 1.0 / 512) << "rows from " << row;
  }
}

INSTANTIATE_TEST_SUITE_P(Cases, LargeProduct,
                         testing::Values(ProductCase{true, false}, ProductCase{true, true}, ProductCase{false, false}));

}  // namespace
}  // namespace slidedp::test
