// Every fused kernel against fp64 on the CPU, beside PyTorch's own bf16 operations on the same input; and twice, at two
// addresses, for the same bits.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>

#include "runtime/nn/kernels/column_sums.h"
#include "runtime/nn/kernels/convert.h"
#include "runtime/nn/kernels/rms_norm.h"
#include "runtime/nn/kernels/swiglu.h"
#include "tests/runtime/nn/cuda/gpu_test.h"

namespace slidedp::test {
namespace {

constexpr float kEps = 1e-6f;

class Kernels : public NeedsGpu<> {};
class NormKernel : public NeedsGpu<testing::TestWithParam<int64_t>> {};

at::Tensor reference_norm(const at::Tensor& x, const at::Tensor& weight) {
  return x * at::rsqrt(x.pow(2).mean(-1, true) + static_cast<double>(kEps)) * weight;
}

at::Tensor leaf(const at::Tensor& tensor) { return tensor.detach().clone().set_requires_grad(true); }

TEST_P(NormKernel, ForwardMatchesFp64) {
  const int64_t rows = 301, width = GetParam();
  const at::Tensor x = random_bf16({rows, width}, 1), weight = random_bf16({width}, 2, 0.2, 1.0);
  const at::Tensor gpu_x = to_gpu(x), gpu_weight = to_gpu(weight);
  const at::Tensor out = unwritten({rows, width}, at::kBFloat16), again = unwritten({rows, width}, at::kBFloat16, 1);
  const at::Tensor rstd = unwritten({rows}, at::kFloat);
  nn::rms_norm(bf16_of(gpu_x), bf16_of(gpu_weight), kEps, rows, width, fp32_of(rstd), bf16_of(out), nullptr);
  nn::rms_norm(bf16_of(gpu_x), bf16_of(gpu_weight), kEps, rows, width, nullptr, bf16_of(again), nullptr);
  EXPECT_TRUE(same_bits(out, again));
  const at::Tensor torch = at::rms_norm(gpu_x, {width}, gpu_weight, kEps);
  expect_no_worse("rms_norm " + std::to_string(width), out, torch, reference_norm(to_double(x), to_double(weight)));
}

TEST_P(NormKernel, BackwardMatchesFp64) {
  const int64_t width = GetParam();
  for (const int64_t rows : {3, 1301}) {  // fewer rows than blocks, and more
    const at::Tensor x = random_bf16({rows, width}, 1), weight = random_bf16({width}, 2, 0.2, 1.0);
    const at::Tensor slope = random_bf16({rows, width}, 3), residual = random_bf16({rows, width}, 4);
    const at::Tensor gpu_x = to_gpu(x), gpu_weight = to_gpu(weight), gpu_slope = to_gpu(slope);
    const at::Tensor rstd = unwritten({rows}, at::kFloat), out = unwritten({rows, width}, at::kBFloat16);
    nn::rms_norm(bf16_of(gpu_x), bf16_of(gpu_weight), kEps, rows, width, fp32_of(rstd), bf16_of(out), nullptr);
    const int64_t parts = nn::rms_norm_partial_rows(rows, width);
    std::vector<at::Tensor> gradients, sums;
    for (const int shift : {0, 1}) {
      gradients.push_back(unwritten({rows, width}, at::kBFloat16, shift).copy_(residual));
      const at::Tensor partials = unwritten({parts, width}, at::kFloat, shift);
      nn::rms_norm_backward(bf16_of(gpu_x), bf16_of(gpu_weight), fp32_of(rstd), bf16_of(gpu_slope), rows, width,
                            bf16_of(gradients.back()), /*add=*/true, fp32_of(partials), /*continued=*/false, nullptr);
      sums.push_back(unwritten({width}, at::kBFloat16, shift));
      nn::store_column_sums(fp32_of(partials), parts, width, width, {sums.back().data_ptr(), false, true}, nullptr);
    }
    EXPECT_TRUE(same_bits(gradients[0], gradients[1]));
    EXPECT_TRUE(same_bits(sums[0], sums[1]));

    const at::Tensor x64 = leaf(to_double(x)), weight64 = leaf(to_double(weight));
    reference_norm(x64, weight64).backward(to_double(slope));
    const at::Tensor torch_x = leaf(gpu_x), torch_weight = leaf(gpu_weight);
    at::rms_norm(torch_x, {width}, torch_weight, kEps).backward(gpu_slope);
    const std::string shape = std::to_string(rows) + " x " + std::to_string(width);
    expect_no_worse("rms_norm_backward " + shape, gradients[0], torch_x.grad() + to_gpu(residual),
                    x64.grad() + to_double(residual));
    expect_no_worse("rms_norm_backward weight " + shape, sums[0], torch_weight.grad(), weight64.grad());
  }
}

TEST_P(NormKernel, BackwardInPartsAddsUpAndMayWriteOverItsInput) {
  const int64_t rows = 700, width = GetParam();
  const at::Tensor x = to_gpu(random_bf16({rows, width}, 1)), weight = to_gpu(random_bf16({width}, 2, 0.2, 1.0));
  const at::Tensor slope = to_gpu(random_bf16({rows, width}, 3));
  const at::Tensor rstd = unwritten({rows}, at::kFloat), whole = unwritten({rows, width}, at::kBFloat16);
  nn::rms_norm(bf16_of(x), bf16_of(weight), kEps, rows, width, fp32_of(rstd), bf16_of(whole), nullptr);
  const int64_t parts = nn::rms_norm_partial_rows(rows, width), first = 512;
  const at::Tensor partials = unwritten({parts, width}, at::kFloat), sum = unwritten({width}, at::kFloat);
  nn::rms_norm_backward(bf16_of(x), bf16_of(weight), fp32_of(rstd), bf16_of(slope), rows, width, bf16_of(whole), false,
                        fp32_of(partials), false, nullptr);
  nn::store_column_sums(fp32_of(partials), parts, width, width, {sum.data_ptr(), true, true}, nullptr);

  const at::Tensor over = x.clone(), pieces = unwritten({parts, width}, at::kFloat), piece_sum = at::zeros_like(sum);
  const int64_t piece_rows = nn::rms_norm_partial_rows(first, width);
  nn::rms_norm_backward(bf16_of(over), bf16_of(weight), fp32_of(rstd), bf16_of(slope), first, width, bf16_of(over),
                        false, fp32_of(pieces), false, nullptr);
  nn::rms_norm_backward(bf16_of(over) + first * width, bf16_of(weight), fp32_of(rstd) + first,
                        bf16_of(slope) + first * width, rows - first, width, bf16_of(over) + first * width, false,
                        fp32_of(pieces), true, nullptr);
  nn::store_column_sums(fp32_of(pieces), piece_rows, width, width, {piece_sum.data_ptr(), true, false}, nullptr);
  EXPECT_TRUE(same_bits(over, whole));
  EXPECT_LT(relative_error(piece_sum, sum), 1e-5);  // fp32 sums of 700 rows in another order
}

INSTANTIATE_TEST_SUITE_P(Widths, NormKernel, testing::Values(64, 576, 2560, 4096, 5120, 12288));

TEST_F(Kernels, SwigluMatchesFp64) {
  for (const int64_t width : {8, 1032, 9728}) {
    const int64_t tokens = 77;
    const at::Tensor gate_up = random_bf16({tokens, 2 * width}, 1, 2.0), slope = random_bf16({tokens, width}, 2);
    const at::Tensor gpu = to_gpu(gate_up), out = unwritten({tokens, width}, at::kBFloat16);
    nn::swiglu(bf16_of(gpu), tokens, width, bf16_of(out), nullptr);
    std::vector<at::Tensor> slopes, activations;
    for (const int run : {0, 1, 2}) {
      slopes.push_back(unwritten({tokens, 2 * width}, at::kBFloat16, run % 2).copy_(gate_up));
      activations.push_back(unwritten({tokens, width}, at::kBFloat16, run % 2).copy_(slope));
      nn::swiglu_backward(bf16_of(slopes.back()), tokens, width, bf16_of(activations.back()),
                          /*form_activation=*/run < 2, nullptr);
    }
    EXPECT_TRUE(same_bits(slopes[0], slopes[1]));
    EXPECT_TRUE(same_bits(slopes[0], slopes[2]));
    EXPECT_TRUE(same_bits(activations[0], activations[1]));
    EXPECT_TRUE(same_bits(activations[0], out));
    EXPECT_TRUE(same_bits(activations[2], to_gpu(slope)));  // left as it was

    const auto forward = [&](const at::Tensor& x) {
      return at::silu(x.narrow(1, 0, width)) * x.narrow(1, width, width);
    };
    const at::Tensor reference = leaf(to_double(gate_up)), torch = leaf(gpu);
    const at::Tensor expected = forward(reference), torch_out = forward(torch);
    expected.backward(to_double(slope));
    torch_out.backward(to_gpu(slope));
    expect_no_worse("swiglu " + std::to_string(width), out, torch_out, expected);
    expect_no_worse("swiglu_backward " + std::to_string(width), slopes[0], torch.grad(), reference.grad());
  }
}

TEST_F(Kernels, SwigluIsFiniteForAnyGate) {
  const at::Tensor gate_up = at::tensor({-3e38f, -100.0f, -88.0f, 0.0f, 88.0f, 100.0f, 3e38f, -0.0f,  //
                                         1.0f, 1.0f, 1.0f, 1.0f, 1.0f, 1.0f, 1.0f, 1.0f})
                                 .to(at::kBFloat16);
  const at::Tensor gpu = to_gpu(gate_up), out = unwritten({8}, at::kBFloat16);
  nn::swiglu(bf16_of(gpu), 1, 8, bf16_of(out), nullptr);
  const at::Tensor slope = to_gpu(at::ones({8}, at::kBFloat16));
  nn::swiglu_backward(bf16_of(gpu), 1, 8, bf16_of(slope), /*form_activation=*/true, nullptr);
  EXPECT_TRUE(at::isfinite(out).all().item<bool>());
  EXPECT_TRUE(at::isfinite(gpu).all().item<bool>());
  const at::Tensor expected = at::silu(to_double(gate_up).narrow(0, 0, 8));
  EXPECT_LT(relative_error(out, expected), 0.004);  // bf16 rounds at 2^-9
}

TEST_F(Kernels, ColumnSumsMatchFp64AndAdd) {
  for (const int64_t rows : {1, 9, 5000}) {
    const int64_t width = 328;
    const at::Tensor values = random_bf16({rows, width}, 1), gpu = to_gpu(values);
    const int64_t parts = nn::column_partial_rows(rows);
    const at::Tensor partials = unwritten({parts, width}, at::kFloat), sum = unwritten({width}, at::kFloat);
    nn::column_partials(bf16_of(gpu), rows, width, fp32_of(partials), nullptr);
    nn::store_column_sums(fp32_of(partials), parts, width, width, {sum.data_ptr(), true, true}, nullptr);
    const at::Tensor expected = to_double(values).sum(0);
    EXPECT_LT(relative_error(sum, expected), 1e-6) << rows;  // fp32, a few dozen terms a partial sum
    nn::store_column_sums(fp32_of(partials), parts, width, width, {sum.data_ptr(), true, false}, nullptr);
    EXPECT_LT(relative_error(sum, 2 * expected), 1e-6) << rows;
  }
}

TEST_F(Kernels, ConversionsRoundToNearestEvenAtAnyAlignment) {
  const int64_t elements = 100003;
  const at::Tensor values = at::randn({elements + 3}, at::kFloat) * 1e3;
  const at::Tensor gpu = to_gpu(values);
  for (const int64_t from : {0, 1, 3}) {  // floats: 16-byte aligned or not
    const at::Tensor narrow = unwritten({elements}, at::kBFloat16), wide = unwritten({elements}, at::kFloat);
    nn::narrow_to_bf16(fp32_of(gpu) + from, bf16_of(narrow), elements, nullptr);
    const at::Tensor expected = values.narrow(0, from, elements).to(at::kBFloat16);
    EXPECT_TRUE(same_bits(narrow.cpu(), expected)) << from;
    nn::widen_to_fp32(bf16_of(narrow), fp32_of(wide), elements, nullptr);
    EXPECT_TRUE(same_bits(wide.cpu(), expected.to(at::kFloat))) << from;
    nn::accumulate_bf16(bf16_of(narrow), fp32_of(wide), /*first=*/false, elements, nullptr);
    EXPECT_TRUE(same_bits(wide.cpu(), expected.to(at::kFloat) * 2)) << from;
    nn::accumulate_bf16(bf16_of(narrow), fp32_of(wide), /*first=*/true, elements, nullptr);
    EXPECT_TRUE(same_bits(wide.cpu(), expected.to(at::kFloat))) << from;
  }
}

TEST_F(Kernels, EveryBf16SurvivesTheWayThroughFp32) {
  at::Tensor every = at::empty({65536}, at::kBFloat16);
  for (int i = 0; i < 65536; ++i) static_cast<uint16_t*>(every.data_ptr())[i] = static_cast<uint16_t>(i);
  const at::Tensor gpu = to_gpu(every), wide = unwritten({65536}, at::kFloat), back = unwritten({65536}, at::kBFloat16);
  nn::widen_to_fp32(bf16_of(gpu), fp32_of(wide), 65536, nullptr);
  nn::narrow_to_bf16(fp32_of(wide), bf16_of(back), 65536, nullptr);
  const at::Tensor result = back.cpu();
  for (int i = 0; i < 65536; ++i) {
    const bool nan = (i & 0x7fff) > 0x7f80;
    const uint16_t bits = static_cast<const uint16_t*>(result.const_data_ptr())[i];
    if (nan ? (bits & 0x7fff) <= 0x7f80 : bits != i) FAIL() << "bits " << i << " became " << bits;
  }
}

TEST_F(Kernels, SquareSumsHaveTheHostsBits) {
  const int64_t elements = 64 * 1000 + 17, blocks = 1001;
  const at::Tensor values = at::randn({elements}, at::kFloat), gpu = to_gpu(values);
  const at::Tensor sums = unwritten({blocks}, at::kDouble);
  nn::square_sums_fp32(fp32_of(gpu), elements, sums.data_ptr<double>(), nullptr);
  const at::Tensor result = sums.cpu();
  for (int64_t block = 0; block < blocks; ++block) {
    double part[8] = {};
    for (int64_t i = 0; i < 64 && block * 64 + i < elements; ++i) {
      const double value = values.data_ptr<float>()[block * 64 + i];
      part[i % 8] += value * value;
    }
    const double expected = ((part[0] + part[4]) + (part[2] + part[6])) + ((part[1] + part[5]) + (part[3] + part[7]));
    ASSERT_EQ(result.data_ptr<double>()[block], expected) << block;
  }
  const at::Tensor narrow = to_gpu(values.to(at::kBFloat16)), narrow_sums = unwritten({blocks}, at::kDouble);
  const at::Tensor wide = narrow.to(at::kFloat);
  nn::square_sums_bf16(bf16_of(narrow), elements, narrow_sums.data_ptr<double>(), nullptr);
  nn::square_sums_fp32(fp32_of(wide), elements, sums.data_ptr<double>(), nullptr);
  EXPECT_TRUE(same_bits(narrow_sums, sums));
}

}  // namespace
}  // namespace slidedp::test
