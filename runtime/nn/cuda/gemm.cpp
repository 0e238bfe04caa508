#include "runtime/nn/cuda/gemm.h"

#include "runtime/nn/cuda/gemm_descriptors.h"

namespace slidedp::nn {

struct Gemm::Chosen : ProductDescriptors {
  Chosen(const Product& p, cublasLtHandle_t handle, size_t workspace_bytes, bool hopper) : ProductDescriptors(p) {
    const auto found = algorithms(handle, workspace_bytes);
    algorithm = found[choose_algorithm(found, p.inner, hopper)].algo;
  }

  cublasLtMatmulAlgo_t algorithm{};
};

Gemm::Gemm(void* workspace, int64_t workspace_bytes)
    : workspace_(workspace), workspace_bytes_(static_cast<size_t>(workspace_bytes)), hopper_(is_hopper()) {
  check_cublas(cublasLtCreate(&handle_), "cublasLtCreate");
}

Gemm::~Gemm() {
  chosen_.clear();
  cublasLtDestroy(handle_);
}

Gemm::Key Gemm::key(const Product& p) {
  const int64_t flags = (p.a.transposed ? 1 : 0) | (p.b.transposed ? 2 : 0) | (p.bias != nullptr ? 4 : 0) |
                        (p.out_type == DType::fp32 ? 8 : 0) | (p.add != nullptr ? 16 : 0) | (p.add == p.out ? 32 : 0);
  return {p.rows,     p.columns,        p.inner,      p.a.stride, p.a.batch_stride,
          p.b.stride, p.b.batch_stride, p.out_stride, p.batch,    p.out_batch_stride,
          flags};
}

Gemm::Chosen& Gemm::chosen(const Product& product) {
  std::unique_ptr<Chosen>& entry = chosen_[key(product)];
  if (!entry) entry = std::make_unique<Chosen>(product, handle_, workspace_bytes_, hopper_);
  return *entry;
}

void Gemm::run(const Product& product, cudaStream_t stream) {
  if (product.rows == 0 || product.columns == 0) return;
  Chosen& use = chosen(product);
  if (product.bias != nullptr) use.description.set_bias(product.bias);
  const float beta = product.add != nullptr ? 1.0f : 0.0f;
  const void* add = product.add != nullptr ? product.add : product.out;
  check_cublas(cublasLtMatmul(handle_, use.description.get(), &product.alpha, product.b.data, use.b.get(),
                              product.a.data, use.a.get(), &beta, add, use.out.get(), product.out, use.out.get(),
                              &use.algorithm, workspace_, workspace_bytes_, stream),
               "cublasLtMatmul");
}

}  // namespace slidedp::nn
