#include "runtime/nn/cuda/gemm.h"

#include <stdexcept>
#include <string>

namespace slidedp::nn {
namespace {

// Every matrix of this project starts at a multiple of 16 bytes and has rows of such a length. Telling the library no
// more than that keeps its choice, and with it the bits, independent of where a buffer happens to lie.
constexpr uint32_t kAlignmentBytes = 16;

void check(cublasStatus_t status, const char* call) {
  if (status == CUBLAS_STATUS_SUCCESS) return;
  throw std::runtime_error(std::string(call) + " failed: " + cublasLtGetStatusString(status));
}

cudaDataType_t data_type(DType type) { return type == DType::fp32 ? CUDA_R_32F : CUDA_R_16BF; }

// cuBLAS is column-major: a row-major matrix with `stride` elements between rows is its transpose there.
class Layout {
 public:
  Layout(cudaDataType_t type, int64_t stored_rows, int64_t stored_columns, int64_t stride, int64_t batch,
         int64_t batch_stride) {
    check(cublasLtMatrixLayoutCreate(&layout_, type, static_cast<uint64_t>(stored_columns),
                                     static_cast<uint64_t>(stored_rows), stride),
          "cublasLtMatrixLayoutCreate");
    const auto count = static_cast<int32_t>(batch);
    set(CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &count, sizeof(count));
    set(CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &batch_stride, sizeof(batch_stride));
  }
  ~Layout() { cublasLtMatrixLayoutDestroy(layout_); }
  Layout(const Layout&) = delete;
  Layout& operator=(const Layout&) = delete;
  cublasLtMatrixLayout_t get() const { return layout_; }

 private:
  void set(cublasLtMatrixLayoutAttribute_t attribute, const void* value, size_t bytes) {
    check(cublasLtMatrixLayoutSetAttribute(layout_, attribute, value, bytes), "cublasLtMatrixLayoutSetAttribute");
  }
  cublasLtMatrixLayout_t layout_ = nullptr;
};

Layout operand_layout(const Operand& operand, int64_t rows, int64_t columns, int64_t batch) {
  return {CUDA_R_16BF,
          operand.transposed ? columns : rows,
          operand.transposed ? rows : columns,
          operand.stride,
          batch,
          operand.batch_stride};
}

class Description {
 public:
  explicit Description(const Product& p) {
    check(cublasLtMatmulDescCreate(&description_, CUBLAS_COMPUTE_32F, CUDA_R_32F), "cublasLtMatmulDescCreate");
    // The library computes the transposed product: its first factor is `b`.
    const cublasOperation_t first = p.b.transposed ? CUBLAS_OP_T : CUBLAS_OP_N;
    const cublasOperation_t second = p.a.transposed ? CUBLAS_OP_T : CUBLAS_OP_N;
    set(CUBLASLT_MATMUL_DESC_TRANSA, &first, sizeof(first));
    set(CUBLASLT_MATMUL_DESC_TRANSB, &second, sizeof(second));
    if (p.bias == nullptr) return;
    const cublasLtEpilogue_t epilogue = CUBLASLT_EPILOGUE_BIAS;
    set(CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue, sizeof(epilogue));
    set_bias(p.bias);
  }
  ~Description() { cublasLtMatmulDescDestroy(description_); }
  Description(const Description&) = delete;
  Description& operator=(const Description&) = delete;
  cublasLtMatmulDesc_t get() const { return description_; }
  void set_bias(const void* bias) { set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, &bias, sizeof(bias)); }

 private:
  void set(cublasLtMatmulDescAttributes_t attribute, const void* value, size_t bytes) {
    check(cublasLtMatmulDescSetAttribute(description_, attribute, value, bytes), "cublasLtMatmulDescSetAttribute");
  }
  cublasLtMatmulDesc_t description_ = nullptr;
};

class Preference {
 public:
  explicit Preference(size_t workspace_bytes) {
    check(cublasLtMatmulPreferenceCreate(&preference_), "cublasLtMatmulPreferenceCreate");
    set(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace_bytes, sizeof(workspace_bytes));
    // Products that are split along `inner` add their parts in fp32, in the workspace.
    const uint32_t reductions = CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
    set(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &reductions, sizeof(reductions));
    for (const auto attribute :
         {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
          CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES}) {
      set(attribute, &kAlignmentBytes, sizeof(kAlignmentBytes));
    }
  }
  ~Preference() { cublasLtMatmulPreferenceDestroy(preference_); }
  Preference(const Preference&) = delete;
  Preference& operator=(const Preference&) = delete;
  cublasLtMatmulPreference_t get() const { return preference_; }

 private:
  void set(cublasLtMatmulPreferenceAttributes_t attribute, const void* value, size_t bytes) {
    check(cublasLtMatmulPreferenceSetAttribute(preference_, attribute, value, bytes),
          "cublasLtMatmulPreferenceSetAttribute");
  }
  cublasLtMatmulPreference_t preference_ = nullptr;
};

}  // namespace

struct Gemm::Chosen {
  Chosen(const Product& p, cublasLtHandle_t handle, size_t workspace_bytes)
      : description(p),
        a(operand_layout(p.a, p.rows, p.inner, p.batch)),
        b(operand_layout(p.b, p.inner, p.columns, p.batch)),
        out(data_type(p.out_type), p.rows, p.columns, p.out_stride, p.batch, p.out_batch_stride) {
    const Preference preference(workspace_bytes);
    cublasLtMatmulHeuristicResult_t result{};
    int found = 0;
    check(cublasLtMatmulAlgoGetHeuristic(handle, description.get(), b.get(), a.get(), out.get(), out.get(),
                                         preference.get(), 1, &result, &found),
          "cublasLtMatmulAlgoGetHeuristic");
    if (found == 0) throw std::runtime_error("cuBLASLt has no algorithm for a matrix product of this shape");
    algorithm = result.algo;
  }

  Description description;
  Layout a, b, out;
  cublasLtMatmulAlgo_t algorithm{};
};

Gemm::Gemm(void* workspace, int64_t workspace_bytes)
    : workspace_(workspace), workspace_bytes_(static_cast<size_t>(workspace_bytes)) {
  check(cublasLtCreate(&handle_), "cublasLtCreate");
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
  if (!entry) entry = std::make_unique<Chosen>(product, handle_, workspace_bytes_);
  return *entry;
}

void Gemm::run(const Product& product, cudaStream_t stream) {
  if (product.rows == 0 || product.columns == 0) return;
  Chosen& use = chosen(product);
  if (product.bias != nullptr) use.description.set_bias(product.bias);
  const float beta = product.add != nullptr ? 1.0f : 0.0f;
  const void* add = product.add != nullptr ? product.add : product.out;
  check(cublasLtMatmul(handle_, use.description.get(), &product.alpha, product.b.data, use.b.get(), product.a.data,
                       use.a.get(), &beta, add, use.out.get(), product.out, use.out.get(), &use.algorithm, workspace_,
                       workspace_bytes_, stream),
        "cublasLtMatmul");
}

}  // namespace slidedp::nn
