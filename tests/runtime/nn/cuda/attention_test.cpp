// Each attention backend against fp64 on the CPU, whatever the measurement would choose.
#include "runtime/nn/cuda/attention.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdio>

#include "model/cost/activations.h"
#include "tests/runtime/nn/cuda/gpu_test.h"

namespace slidedp::test {
namespace {

// Probabilities and their gradients are rounded to bf16 before they enter a product: 2^-9 / sqrt(3) = 0.1 % each in the
// mean square, and so are the results. Gradients of q and k are differences of such terms, a few times worse.
constexpr double kOutputBound = 0.006, kGradientBound = 0.015;

struct AttentionCase {
  nn::AttentionBackend backend;
  int64_t heads, kv_heads, head_dim;
  std::vector<int32_t> starts;
};
void PrintTo(const AttentionCase& c, std::ostream* out) {
  *out << nn::name(c.backend) << " " << c.heads << "/" << c.kv_heads << " x " << c.head_dim << ", " << c.starts.size()
       << " documents";
}

constexpr int64_t kRows = 2, kSeq = 512, kTokens = kRows * kSeq;

class AttentionTest : public NeedsGpu<testing::TestWithParam<AttentionCase>> {
 protected:
  // Everything that one forward and backward need and leave.
  struct Run {
    explicit Run(const AttentionCase& c)
        : qkv(random_bf16({kTokens, c.heads + 2 * c.kv_heads, c.head_dim}, 1)),
          slope(random_bf16({kTokens, c.heads, c.head_dim}, 2)),
          gpu_qkv(to_gpu(qkv)),
          gpu_slope(to_gpu(slope)),
          out(unwritten({kTokens, c.heads, c.head_dim}, at::kBFloat16)),
          log_sum_exp(unwritten({c.heads * kTokens}, at::kFloat)) {
      const at::Tensor workspace = nn::device_bytes(kCudaProductWorkspaceBytes, 0);
      nn::Gemm gemm(workspace.data_ptr(), kCudaProductWorkspaceBytes);
      const nn::CudaContext context{0, nullptr, gemm};
      ModelSpec model;
      model.heads = c.heads, model.kv_heads = c.kv_heads, model.head_dim = c.head_dim;
      nn::CudaAttention attention(model, {c.backend, c.backend, {}});
      MicroBatch batch;
      batch.rows = kRows, batch.seq = kSeq, batch.document_starts = c.starts;
      const int64_t stride = (c.heads + 2 * c.kv_heads) * c.head_dim;
      const uint16_t* data = bf16_of(gpu_qkv);
      const uint16_t* keys = data + c.heads * c.head_dim;
      const nn::AttentionInputs inputs{{data, stride}, {keys, stride}, {keys + c.kv_heads * c.head_dim, stride}};
      attention.forward(context, batch, inputs, bf16_of(out), fp32_of(log_sum_exp));
      gradients = attention.backward(context, batch, inputs, bf16_of(out), fp32_of(log_sum_exp), bf16_of(gpu_slope));
      copy_reason = attention.copy_reason();
    }
    at::Tensor qkv, slope, gpu_qkv, gpu_slope, out, log_sum_exp;
    nn::AttentionGradients gradients;
    std::string copy_reason;
  };
};

at::Tensor reference(const AttentionCase& c, const at::Tensor& qkv) {
  const at::Tensor q = qkv.narrow(1, 0, c.heads).transpose(0, 1);
  const auto per_head = [&](int64_t first) {
    return qkv.narrow(1, first, c.kv_heads).repeat_interleave(c.heads / c.kv_heads, 1).transpose(0, 1);
  };
  at::Tensor visible = at::zeros({kTokens, kTokens}, at::kBool);
  for (size_t i = 0; i < c.starts.size(); ++i) {
    const int64_t begin = c.starts[i], end = i + 1 < c.starts.size() ? c.starts[i + 1] : kTokens;
    visible.narrow(0, begin, end - begin).narrow(1, begin, end - begin).fill_(true);
  }
  at::Tensor scores = at::matmul(q, per_head(c.heads).transpose(1, 2)) / std::sqrt(static_cast<double>(c.head_dim));
  scores = scores.masked_fill(visible.tril().logical_not(), -INFINITY);
  return at::matmul(at::softmax(scores, -1), per_head(c.heads + c.kv_heads)).transpose(0, 1);
}

TEST_P(AttentionTest, MatchesFp64) {
  const AttentionCase& c = GetParam();
  const Run run(c);
  EXPECT_EQ(run.copy_reason, "");
  const at::Tensor qkv = to_double(run.qkv).set_requires_grad(true);
  const at::Tensor out = reference(c, qkv);
  out.backward(to_double(run.slope));
  const auto check = [](const char* what, const at::Tensor& ours, const at::Tensor& expected, double bound) {
    const double error = relative_error(ours.view(expected.sizes()), expected);
    std::printf("%s: RMS error %.4e\n", what, error);
    EXPECT_LT(error, bound) << what;
  };
  const at::Tensor all = qkv.grad();
  check("out", run.out, out, kOutputBound);
  check("query", run.gradients.query, all.narrow(1, 0, c.heads), kGradientBound);
  check("key", run.gradients.key, all.narrow(1, c.heads, c.kv_heads), kGradientBound);
  check("value", run.gradients.value, all.narrow(1, c.heads + c.kv_heads, c.kv_heads), kGradientBound);
}

// Promised by the tiled products only.
class TiledAttentionTest : public AttentionTest {};

TEST_P(TiledAttentionTest, GivesTheSameBitsTwice) {
  const Run once(GetParam()), twice(GetParam());
  EXPECT_TRUE(same_bits(once.out, twice.out));
  EXPECT_TRUE(same_bits(once.log_sum_exp, twice.log_sum_exp));
  EXPECT_TRUE(same_bits(once.gradients.query, twice.gradients.query));
  EXPECT_TRUE(same_bits(once.gradients.key, twice.gradients.key));
  EXPECT_TRUE(same_bits(once.gradients.value, twice.gradients.value));
}

std::vector<AttentionCase> fused_cases() {
  using enum nn::AttentionBackend;
  const std::vector<int32_t> rows{0, 512}, packed{0, 1, 300, 431, 512, 520};
  return {{cudnn, 4, 2, 128, rows},   {cudnn, 3, 1, 64, rows},   {flash, 4, 2, 128, rows},
          {flash, 4, 2, 128, packed}, {flash, 3, 1, 64, packed}, {flash, 2, 2, 96, packed}};
}

std::vector<AttentionCase> tiled_cases() {
  using enum nn::AttentionBackend;
  const std::vector<int32_t> rows{0, 512}, packed{0, 1, 300, 431, 512, 520};
  return {{tiled, 4, 2, 128, packed}, {tiled, 3, 1, 64, packed}, {tiled, 2, 2, 40, packed}, {tiled, 4, 1, 128, rows}};
}

INSTANTIATE_TEST_SUITE_P(Fused, AttentionTest, testing::ValuesIn(fused_cases()));
INSTANTIATE_TEST_SUITE_P(Tiled, AttentionTest, testing::ValuesIn(tiled_cases()));
INSTANTIATE_TEST_SUITE_P(Tiled, TiledAttentionTest, testing::ValuesIn(tiled_cases()));

}  // namespace
}  // namespace slidedp::test
