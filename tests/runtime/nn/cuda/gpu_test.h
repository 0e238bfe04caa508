// What the GPU tests of runtime/nn share: they are skipped visibly where there is no GPU, and fail there with
// SLIDEDP_REQUIRE_GPU=1; device memory as ATen tensors; errors against references in double.
#pragma once

#include <ATen/core/Tensor.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

#include "model/spec/model_spec.h"

namespace slidedp::test {

// For a fixture's SetUp().
void require_gpu();

template <typename Base = ::testing::Test>
class NeedsGpu : public Base {
 protected:
  void SetUp() override { require_gpu(); }
};

// Standard normal values, rounded to bf16, on the CPU; the same for the same seed.
at::Tensor random_bf16(at::IntArrayRef sizes, uint64_t seed, double scale = 1.0, double shift = 0.0);
at::Tensor to_gpu(const at::Tensor& tensor);
at::Tensor to_double(const at::Tensor& tensor);  // on the CPU
// A new tensor on the GPU that holds NaN everywhere, so that what nobody writes shows. `shift` elements of 16 bytes
// into its memory.
at::Tensor unwritten(at::IntArrayRef sizes, at::ScalarType type, int shift = 0);
uint16_t* bf16_of(const at::Tensor& tensor);
float* fp32_of(const at::Tensor& tensor);
bool same_bits(const at::Tensor& a, const at::Tensor& b);

// |a - reference| / |reference|
double relative_error(const at::Tensor& a, const at::Tensor& reference);
double one_minus_cosine(const at::Tensor& a, const at::Tensor& reference);
// Our error is at most 1.05 times that of PyTorch's own bf16 operations on the same input; both go into the report.
void expect_no_worse(const std::string& what, const at::Tensor& ours, const at::Tensor& torch,
                     const at::Tensor& reference);

// Small models of the shapes that are trained: head sizes and features as in the originals, fewer and narrower layers.
ModelSpec smollm2_like();  // tied, head_dim 64, groups of 3
ModelSpec qwen3_like();    // QK-norm, head_dim 128, heads wider than the hidden size
ModelSpec llama_like();    // untied, llama3 rope, groups of 4
ModelSpec biased_like();   // every bias
std::vector<ModelSpec> gpu_models();

}  // namespace slidedp::test
