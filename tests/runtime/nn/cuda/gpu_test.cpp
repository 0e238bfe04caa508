#include "tests/runtime/nn/cuda/gpu_test.h"

#include <ATen/ATen.h>
#include <cuda_runtime_api.h>

#include <cstdio>
#include <cstdlib>
#include <random>
#include <string_view>

namespace slidedp::test {

void require_gpu() {
  int count = 0;
  if (cudaGetDeviceCount(&count) == cudaSuccess && count > 0) return;
  const char* required = std::getenv("SLIDEDP_REQUIRE_GPU");
  if (required != nullptr && std::string_view(required) == "1") {
    FAIL() << "SLIDEDP_REQUIRE_GPU=1, but this process sees no GPU";
  }
  GTEST_SKIP() << "no GPU";
}

at::Tensor random_bf16(at::IntArrayRef sizes, uint64_t seed, double scale, double shift) {
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal(static_cast<float>(shift), static_cast<float>(scale));
  at::Tensor tensor = at::empty(sizes, at::kFloat);
  for (float *value = tensor.data_ptr<float>(), *end = value + tensor.numel(); value != end; ++value) {
    *value = normal(random);
  }
  return tensor.to(at::kBFloat16);
}

at::Tensor to_gpu(const at::Tensor& tensor) { return tensor.to(at::kCUDA); }
at::Tensor to_double(const at::Tensor& tensor) { return tensor.detach().to(at::kCPU).to(at::kDouble); }

at::Tensor unwritten(at::IntArrayRef sizes, at::ScalarType type, int shift) {
  int64_t elements = 1;
  for (const int64_t size : sizes) elements *= size;
  const auto width = static_cast<int64_t>(at::elementSize(type));
  const at::Tensor bytes =
      at::full({elements * width + 16 * shift}, 0xff, at::TensorOptions().dtype(at::kByte).device(at::kCUDA));
  return bytes.narrow(0, 16 * shift, elements * width).view(type).view(sizes);
}

uint16_t* bf16_of(const at::Tensor& tensor) { return static_cast<uint16_t*>(tensor.data_ptr()); }
float* fp32_of(const at::Tensor& tensor) { return static_cast<float*>(tensor.data_ptr()); }

bool same_bits(const at::Tensor& a, const at::Tensor& b) {
  return a.sizes() == b.sizes() && at::equal(a.contiguous().view(at::kByte), b.contiguous().view(at::kByte));
}

double relative_error(const at::Tensor& a, const at::Tensor& reference) {
  const at::Tensor expected = to_double(reference).flatten();
  return ((to_double(a).flatten() - expected).norm() / expected.norm()).item<double>();
}

double one_minus_cosine(const at::Tensor& a, const at::Tensor& reference) {
  const at::Tensor x = to_double(a).flatten(), y = to_double(reference).flatten();
  return 1.0 - (x.dot(y) / (x.norm() * y.norm())).item<double>();
}

void expect_no_worse(const std::string& what, const at::Tensor& ours, const at::Tensor& torch,
                     const at::Tensor& reference) {
  const double our_error = relative_error(ours, reference), torch_error = relative_error(torch, reference);
  std::printf("%s: RMS error ours %.4e, PyTorch %.4e\n", what.c_str(), our_error, torch_error);
  EXPECT_LE(our_error, 1.05 * torch_error) << what;
  EXPECT_GT(torch_error, 0.0) << what;
}

namespace {

ModelSpec base(const std::string& name) {
  ModelSpec model;
  model.name = name;
  model.hidden = 192;
  model.intermediate = 512;
  model.layers = 2;
  model.heads = 3;
  model.kv_heads = 1;
  model.head_dim = 64;
  model.vocabulary = 1003;
  model.max_position = 4096;
  model.rms_eps = 1e-5;
  return model;
}

}  // namespace

ModelSpec smollm2_like() {
  ModelSpec model = base("smollm2_like");
  model.tied = true;
  model.rope.theta = 100000.0;
  return model;
}

ModelSpec qwen3_like() {
  ModelSpec model = base("qwen3_like");
  model.family = ModelFamily::qwen3;
  model.hidden = 256;
  model.heads = 4;
  model.kv_heads = 2;
  model.head_dim = 128;
  model.qk_norm = true;
  model.tied = true;
  model.rms_eps = 1e-6;
  model.rope.theta = 1e6;
  return model;
}

ModelSpec llama_like() {
  ModelSpec model = base("llama_like");
  model.hidden = 512;
  model.intermediate = 1032;  // no multiple of a warp's vectors
  model.heads = 8;
  model.kv_heads = 2;
  model.rope = {RopeKind::llama3, 500000.0, 32.0, 1.0, 4.0, 64};
  return model;
}

ModelSpec biased_like() {
  ModelSpec model = base("biased_like");
  model.qkv_bias = model.o_bias = model.mlp_bias = true;
  model.head_dim = 96;
  return model;
}

std::vector<ModelSpec> gpu_models() { return {smollm2_like(), qwen3_like(), llama_like(), biased_like()}; }

}  // namespace slidedp::test
