// The kernels that know tokens: rotation and QK-norm, embedding, cross-entropy. References in fp64 on the CPU.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "runtime/nn/kernels/column_sums.h"
#include "runtime/nn/kernels/cross_entropy.h"
#include "runtime/nn/kernels/embedding.h"
#include "runtime/nn/kernels/qk_rope.h"
#include "tests/runtime/nn/cuda/gpu_test.h"

namespace slidedp::test {
namespace {

constexpr double kEps = 1e-6;

at::Tensor leaf(const at::Tensor& tensor) { return tensor.detach().clone().set_requires_grad(true); }

struct HeadCase {
  int heads, kv_heads, head_dim;
  bool norm;
};
void PrintTo(const HeadCase& c, std::ostream* out) {
  *out << c.heads << "_" << c.kv_heads << "_" << c.head_dim << (c.norm ? "_norm" : "");
}

// One call's operands on the GPU, and the same computation by ATen in any type.
struct HeadProblem {
  explicit HeadProblem(const HeadCase& head_case) : c(head_case) {
    width = static_cast<int64_t>(c.heads + 2 * c.kv_heads) * c.head_dim;
    rotated_width = static_cast<int64_t>(c.heads + c.kv_heads) * c.head_dim;
    qkv = random_bf16({tokens, width}, 1);
    query_weight = random_bf16({c.head_dim}, 2, 0.2, 1.0);
    key_weight = random_bf16({c.head_dim}, 3, 0.2, 1.0);
    positions = (at::arange(tokens, at::kInt) * 7).remainder(table_positions).to(at::kInt);
    const at::Tensor angles = at::outer(at::arange(table_positions, at::kDouble),
                                        at::pow(10000.0, -at::arange(0, c.head_dim, 2, at::kDouble) / c.head_dim));
    cos = angles.cos().to(at::kFloat);
    sin = angles.sin().to(at::kFloat);
    gpu_qkv = to_gpu(qkv), gpu_query_weight = to_gpu(query_weight), gpu_key_weight = to_gpu(key_weight);
    gpu_positions = to_gpu(positions), gpu_cos = to_gpu(cos), gpu_sin = to_gpu(sin);
  }
  nn::HeadShape shape() const { return {tokens, c.heads, c.kv_heads, c.head_dim}; }
  nn::Rotation rotation() const {
    return {gpu_positions.const_data_ptr<int32_t>(), fp32_of(gpu_cos), fp32_of(gpu_sin), table_positions};
  }
  nn::HeadNorm norm() const {
    if (!c.norm) return {};
    return {bf16_of(gpu_query_weight), bf16_of(gpu_key_weight), static_cast<float>(kEps)};
  }

  // As transformers computes it: statistics in at least fp32, all else in the type of `x`.
  at::Tensor normed(const at::Tensor& x, const at::Tensor& weight) const {
    if (!c.norm) return x;
    const at::Tensor wide = x.scalar_type() == at::kBFloat16 ? x.to(at::kFloat) : x;
    return weight * (wide * at::rsqrt(wide.pow(2).mean(-1, true) + kEps)).to(x.scalar_type());
  }
  at::Tensor rotated(const at::Tensor& x) const {
    const auto table = [&](const at::Tensor& t) {
      return t.index_select(0, positions.to(at::kLong)).to(x.options()).unsqueeze(1);
    };
    const at::Tensor full_cos = at::cat({table(cos), table(cos)}, -1), full_sin = at::cat({table(sin), table(sin)}, -1);
    const int64_t half = c.head_dim / 2;
    const at::Tensor turned = at::cat({-x.narrow(-1, half, half), x.narrow(-1, 0, half)}, -1);
    return x * full_cos + turned * full_sin;
  }
  // Rotated queries and keys, then values: [tokens, heads + 2 * kv_heads, head_dim].
  at::Tensor by_aten(const at::Tensor& x, const at::Tensor& q_weight, const at::Tensor& k_weight) const {
    const at::Tensor heads = x.view({tokens, c.heads + 2 * c.kv_heads, c.head_dim});
    return at::cat({rotated(normed(heads.narrow(1, 0, c.heads), q_weight)),
                    rotated(normed(heads.narrow(1, c.heads, c.kv_heads), k_weight)),
                    heads.narrow(1, c.heads + c.kv_heads, c.kv_heads)},
                   1);
  }

  HeadCase c;
  // So many that every block of the kernels goes several times through its places in shared memory.
  static constexpr int64_t tokens = 2003, table_positions = 512;
  int64_t width, rotated_width;
  at::Tensor qkv, query_weight, key_weight, positions, cos, sin;
  at::Tensor gpu_qkv, gpu_query_weight, gpu_key_weight, gpu_positions, gpu_cos, gpu_sin;
};

class RopeKernel : public NeedsGpu<testing::TestWithParam<HeadCase>> {};

TEST_P(RopeKernel, ForwardMatchesFp64) {
  const HeadProblem p(GetParam());
  const at::Tensor out = unwritten({p.tokens, p.rotated_width}, at::kBFloat16);
  const at::Tensor rstd = unwritten({p.tokens, p.c.heads + p.c.kv_heads}, at::kFloat);
  nn::qk_rope(p.shape(), p.rotation(), p.norm(), bf16_of(p.gpu_qkv), p.width, bf16_of(out), p.rotated_width,
              p.c.norm ? fp32_of(rstd) : nullptr, nullptr);
  // In place, with another stride: the same bits, and values as they were.
  const at::Tensor in_place = unwritten({p.tokens, p.width}, at::kBFloat16, 1).copy_(p.gpu_qkv);
  nn::qk_rope(p.shape(), p.rotation(), p.norm(), bf16_of(in_place), p.width, bf16_of(in_place), p.width, nullptr,
              nullptr);
  EXPECT_TRUE(same_bits(in_place.narrow(1, 0, p.rotated_width), out));
  const int64_t values = p.width - p.rotated_width;
  EXPECT_TRUE(same_bits(in_place.narrow(1, p.rotated_width, values), p.gpu_qkv.narrow(1, p.rotated_width, values)));

  const auto rotated = [&](const at::Tensor& all) { return all.reshape({p.tokens, -1}).narrow(1, 0, p.rotated_width); };
  const at::Tensor torch = rotated(p.by_aten(p.gpu_qkv, p.gpu_query_weight, p.gpu_key_weight));
  const at::Tensor expected = rotated(p.by_aten(to_double(p.qkv), to_double(p.query_weight), to_double(p.key_weight)));
  expect_no_worse("qk_rope", out, torch, expected);
}

TEST_P(RopeKernel, BackwardMatchesFp64) {
  const HeadProblem p(GetParam());
  const at::Tensor slope = random_bf16({p.tokens, p.width}, 9), gpu_slope = to_gpu(slope);
  const int64_t queries = static_cast<int64_t>(p.c.heads) * p.c.head_dim, keys = p.rotated_width - queries;
  const at::Tensor dq = gpu_slope.narrow(1, 0, queries).contiguous();
  const at::Tensor dk = gpu_slope.narrow(1, queries, keys).contiguous();
  const at::Tensor dv = gpu_slope.narrow(1, queries + keys, keys).contiguous();
  const at::Tensor rotated = unwritten({p.tokens, p.rotated_width}, at::kBFloat16);
  const at::Tensor rstd = unwritten({p.tokens, p.c.heads + p.c.kv_heads}, at::kFloat);
  nn::qk_rope(p.shape(), p.rotation(), p.norm(), bf16_of(p.gpu_qkv), p.width, bf16_of(rotated), p.rotated_width,
              p.c.norm ? fp32_of(rstd) : nullptr, nullptr);
  const int64_t parts = nn::qk_rope_partial_rows(), dim = p.c.head_dim;
  std::vector<at::Tensor> gradients, weight_sums;
  for (const int shift : {0, 1}) {
    gradients.push_back(unwritten({p.tokens, p.width}, at::kBFloat16, shift));
    if (p.c.norm) gradients.back().copy_(p.gpu_qkv);  // without the norm its input is not read
    const at::Tensor partials = unwritten({parts, 2, dim}, at::kFloat, shift);
    nn::qk_rope_backward(p.shape(), p.rotation(), p.norm(), fp32_of(rstd), {bf16_of(dq), bf16_of(dk), bf16_of(dv)},
                         bf16_of(gradients.back()), p.c.norm ? fp32_of(partials) : nullptr, nullptr);
    if (!p.c.norm) continue;
    weight_sums.push_back(unwritten({2, dim}, at::kBFloat16, shift));
    for (const int64_t which : {0, 1}) {
      nn::store_column_sums(fp32_of(partials) + which * dim, parts, dim, 2 * dim,
                            {bf16_of(weight_sums.back()) + which * dim, false, true}, nullptr);
    }
  }
  EXPECT_TRUE(same_bits(gradients[0], gradients[1]));

  const auto backward = [&](const at::Tensor& x, const at::Tensor& q_weight, const at::Tensor& k_weight) {
    p.by_aten(x, q_weight, k_weight).backward(slope.to(x.options()).view({p.tokens, -1, dim}));
  };
  const at::Tensor x64 = leaf(to_double(p.qkv)), q64 = leaf(to_double(p.query_weight)),
                   k64 = leaf(to_double(p.key_weight));
  backward(x64, q64, k64);
  const at::Tensor x = leaf(p.gpu_qkv), q = leaf(p.gpu_query_weight), k = leaf(p.gpu_key_weight);
  backward(x, q, k);
  const int64_t rotated_width = p.rotated_width;
  const auto turned = [&](const at::Tensor& all) { return all.narrow(1, 0, rotated_width); };
  expect_no_worse("qk_rope_backward", turned(gradients[0]), turned(x.grad()), turned(x64.grad()));
  EXPECT_TRUE(same_bits(gradients[0].narrow(1, rotated_width, keys), dv));
  if (!p.c.norm) return;
  EXPECT_TRUE(same_bits(weight_sums[0], weight_sums[1]));
  expect_no_worse("qk_rope_backward query weight", weight_sums[0][0], q.grad(), q64.grad());
  expect_no_worse("qk_rope_backward key weight", weight_sums[0][1], k.grad(), k64.grad());
}

TEST_P(RopeKernel, PositionOutsideTheTableGivesNan) {
  const HeadProblem p(GetParam());
  p.gpu_positions[5].fill_(static_cast<int32_t>(p.table_positions));
  p.gpu_positions[9].fill_(-1);
  const at::Tensor out = at::zeros_like(unwritten({p.tokens, p.rotated_width}, at::kBFloat16));
  nn::qk_rope(p.shape(), p.rotation(), p.norm(), bf16_of(p.gpu_qkv), p.width, bf16_of(out), p.rotated_width, nullptr,
              nullptr);
  const at::Tensor bad = at::isnan(out).all(1);
  EXPECT_EQ(bad.sum().item<int64_t>(), 2);
  EXPECT_TRUE(bad[5].item<bool>() && bad[9].item<bool>());
  EXPECT_EQ(at::isnan(out).sum().item<int64_t>(), 2 * p.rotated_width);
}

INSTANTIATE_TEST_SUITE_P(Heads, RopeKernel,
                         testing::Values(HeadCase{32, 8, 128, true}, HeadCase{32, 8, 128, false},
                                         HeadCase{9, 3, 64, false}, HeadCase{5, 1, 64, true}, HeadCase{4, 2, 96, true},
                                         HeadCase{3, 1, 80, false}, HeadCase{2, 2, 256, true}, HeadCase{2, 1, 24, true},
                                         // More heads than a block takes.
                                         HeadCase{64, 8, 128, true}));

class EmbeddingKernel : public NeedsGpu<> {};

TEST_F(EmbeddingKernel, GatherCopiesRowsAndMarksWrongIds) {
  const int64_t rows = 50, hidden = 576;
  const at::Tensor table = to_gpu(random_bf16({rows, hidden}, 1));
  const at::Tensor ids = to_gpu(at::tensor({0, 49, 50, 7, -1}, at::kInt));
  const at::Tensor out = at::zeros_like(unwritten({5, hidden}, at::kBFloat16));
  nn::embedding_gather(bf16_of(table), ids.const_data_ptr<int32_t>(), 5, hidden, rows, bf16_of(out), nullptr);
  for (const auto& [token, row] : {std::pair<int64_t, int64_t>{0, 0}, {1, 49}, {3, 7}}) {
    EXPECT_TRUE(same_bits(out[token], table[row])) << token;
  }
  EXPECT_TRUE(at::isnan(out[2]).all().item<bool>());
  EXPECT_TRUE(at::isnan(out[4]).all().item<bool>());
}

// Ids of a scatter test: runs inside a piece of 64 sorted tokens, across two pieces, and over many whole pieces.
at::Tensor scatter_ids(int64_t tokens, int64_t rows) {
  at::Tensor ids = at::empty({tokens}, at::kInt);
  auto* data = ids.data_ptr<int32_t>();
  uint32_t state = 12345;
  for (int64_t t = 0; t < tokens; ++t) {
    state = state * 1664525u + 1013904223u;
    const uint32_t draw = state >> 8;
    data[t] = static_cast<int32_t>(draw % 4 != 0 ? draw % 3 : draw % static_cast<uint32_t>(rows));
  }
  return ids;
}

TEST_F(EmbeddingKernel, ScatterMatchesFp64AndAdds) {
  for (const int64_t tokens : {1, 64, 65, 2001}) {
    const int64_t rows = 97, hidden = tokens == 65 ? 2560 : 72;
    const at::Tensor ids = scatter_ids(tokens, rows), gpu_ids = to_gpu(ids);
    const at::Tensor slope = random_bf16({tokens, hidden}, 2), gpu_slope = to_gpu(slope);
    const at::Tensor expected =
        at::zeros({rows, hidden}, at::kDouble).index_add(0, ids.to(at::kLong), to_double(slope));
    const at::Tensor scratch = unwritten({nn::embedding_scratch_bytes(tokens, hidden)}, at::kByte);
    for (const bool fp32 : {true, false}) {
      std::vector<at::Tensor> sums;
      for (const int shift : {0, 1}) {
        sums.push_back(unwritten({rows, hidden}, fp32 ? at::kFloat : at::kBFloat16, shift));
        nn::embedding_scatter(gpu_ids.const_data_ptr<int32_t>(), tokens, hidden, bf16_of(gpu_slope), rows,
                              {sums.back().data_ptr(), fp32, true}, scratch.data_ptr(), nullptr);
      }
      EXPECT_TRUE(same_bits(sums[0], sums[1]));
      // fp32 sums of up to 2000 terms; bf16 rounds once, at most 2^-9 an element.
      EXPECT_LT(relative_error(sums[0], expected), fp32 ? 1e-6 : 0.003) << tokens;
      nn::embedding_scatter(gpu_ids.const_data_ptr<int32_t>(), tokens, hidden, bf16_of(gpu_slope), rows,
                            {sums[0].data_ptr(), fp32, false}, scratch.data_ptr(), nullptr);
      EXPECT_LT(relative_error(sums[0], 2 * expected), fp32 ? 1e-6 : 0.005) << tokens;
    }
    const at::Tensor torch = at::embedding_dense_backward(gpu_slope, gpu_ids, rows, -1, false);
    const at::Tensor ours = unwritten({rows, hidden}, at::kBFloat16);
    nn::embedding_scatter(gpu_ids.const_data_ptr<int32_t>(), tokens, hidden, bf16_of(gpu_slope), rows,
                          {ours.data_ptr(), false, true}, scratch.data_ptr(), nullptr);
    EXPECT_LE(relative_error(ours, expected), 1.05 * relative_error(torch, expected)) << tokens;
  }
}

TEST_F(EmbeddingKernel, ScatterLeavesOutWrongIdsAndRowsOfNoToken) {
  const int64_t rows = 4, hidden = 64;
  const at::Tensor ids = to_gpu(at::tensor({2, -1, 2, 4}, at::kInt)),
                   slope = to_gpu(at::ones({4, hidden}, at::kBFloat16));
  const at::Tensor around = unwritten({rows + 2, hidden}, at::kFloat);
  const at::Tensor scratch = unwritten({nn::embedding_scratch_bytes(4, hidden)}, at::kByte);
  nn::embedding_scatter(ids.const_data_ptr<int32_t>(), 4, hidden, bf16_of(slope), rows,
                        {fp32_of(around) + hidden, true, true}, scratch.data_ptr(), nullptr);
  const at::Tensor expected = at::tensor({0.0, 0.0, 2.0, 0.0}, at::kDouble).unsqueeze(1).expand({rows, hidden});
  EXPECT_TRUE(at::equal(to_double(around.narrow(0, 1, rows)), expected));
  EXPECT_TRUE(at::isnan(around[0]).all().item<bool>() && at::isnan(around[rows + 1]).all().item<bool>());
}

class LossKernel : public NeedsGpu<> {};
class CrossEntropyKernel : public NeedsGpu<testing::TestWithParam<int64_t>> {};

TEST_P(CrossEntropyKernel, LossAndGradientMatchFp64) {
  const int64_t tokens = 37, vocabulary = GetParam(), stride = (vocabulary + 7) / 8 * 8;
  const at::Tensor logits = random_bf16({tokens, stride}, 1, 3.0);
  at::Tensor targets = (at::arange(tokens, at::kInt) * 7919).remainder(vocabulary).to(at::kInt);
  for (const int64_t ignored : {0, 5, 36}) targets[ignored] = -100;
  const at::Tensor gpu_targets = to_gpu(targets);
  std::vector<at::Tensor> gradients, sums;
  for (const int shift : {0, 1}) {
    gradients.push_back(unwritten({tokens, stride}, at::kBFloat16, shift).copy_(logits));
    const at::Tensor losses = unwritten({tokens}, at::kDouble, shift);
    sums.push_back(unwritten({1}, at::kDouble, shift));
    nn::cross_entropy(bf16_of(gradients.back()), gpu_targets.const_data_ptr<int32_t>(), tokens, vocabulary, stride,
                      losses.data_ptr<double>(), nullptr);
    nn::sum_losses(losses.data_ptr<double>(), tokens, sums.back().data_ptr<double>(), nullptr);
  }
  const auto counted = [&](const at::Tensor& all) { return all.narrow(1, 0, vocabulary); };
  EXPECT_TRUE(same_bits(counted(gradients[0]), counted(gradients[1])));
  EXPECT_TRUE(same_bits(sums[0], sums[1]));

  const auto loss_of = [&](const at::Tensor& x) {
    return at::cross_entropy_loss(x, targets.to(at::kLong).to(x.device()), {}, at::Reduction::Sum, -100);
  };
  const at::Tensor reference = leaf(counted(to_double(logits))), torch = leaf(counted(to_gpu(logits)));
  const at::Tensor expected = loss_of(reference);
  expected.backward();
  loss_of(torch.to(at::kFloat)).backward();
  expect_no_worse("cross_entropy " + std::to_string(vocabulary), counted(gradients[0]), torch.grad(), reference.grad());
  // fp32 exponentials and sums.
  EXPECT_NEAR(sums[0].item<double>(), expected.item<double>(), 1e-6 * expected.item<double>());
  EXPECT_TRUE(at::equal(counted(gradients[0])[5], at::zeros_like(counted(gradients[0])[5])));
}

INSTANTIATE_TEST_SUITE_P(Vocabularies, CrossEntropyKernel, testing::Values(5, 8, 1003, 49152, 151936));

TEST_F(LossKernel, CrossEntropyPassesOnWhatIsNotFinite) {
  const at::Tensor logits = to_gpu(random_bf16({4, 64}, 1));
  logits[1][3].fill_(std::numeric_limits<float>::quiet_NaN());
  const at::Tensor targets = to_gpu(at::tensor({3, 5, 64, -100}, at::kInt));  // the third is outside
  const at::Tensor losses = unwritten({4}, at::kDouble);
  nn::cross_entropy(bf16_of(logits), targets.const_data_ptr<int32_t>(), 4, 64, 64, losses.data_ptr<double>(), nullptr);
  const at::Tensor finite = at::isfinite(losses.cpu());
  EXPECT_TRUE(finite[0].item<bool>() && finite[3].item<bool>());
  EXPECT_FALSE(finite[1].item<bool>() || finite[2].item<bool>());
  EXPECT_TRUE(at::isnan(logits[1]).all().item<bool>());
  EXPECT_TRUE(at::isnan(logits[2]).all().item<bool>());
}

}  // namespace
}  // namespace slidedp::test
