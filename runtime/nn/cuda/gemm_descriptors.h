// Owners of cuBLASLt's descriptors, and what a Product is there.
#pragma once

#include <cublasLt.h>

#include <stdexcept>
#include <string>
#include <vector>

#include "runtime/nn/cuda/gemm.h"
#include "runtime/nn/cuda/gemm_choice.h"
#include "runtime/nn/kernels/launch.h"

namespace slidedp::nn {

// Every matrix of this project starts at a multiple of 16 bytes and has rows of such a length. Telling the library no
// more than that keeps its choice, and with it the bits, independent of where a buffer happens to lie.
inline constexpr uint32_t kAlignmentBytes = 16;
// Products that are split along `inner` add their parts in fp32, in the workspace.
inline constexpr uint32_t kReductions = CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;

// More than the library has for any product of a training step.
inline constexpr int kProposals = 16;

inline void check_cublas(cublasStatus_t status, const char* call) {
  if (status == CUBLAS_STATUS_SUCCESS) return;
  throw std::runtime_error(std::string(call) + " failed: " + cublasLtGetStatusString(status));
}

// Whether the current device is of the generation that choose_algorithm knows.
inline bool is_hopper() {
  int device = 0, major = 0, minor = 0;
  check_cuda(cudaGetDevice(&device), "cudaGetDevice");
  check_cuda(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device), "cudaDeviceGetAttribute");
  check_cuda(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device), "cudaDeviceGetAttribute");
  return major == 9 && minor == 0;
}

inline cudaDataType_t data_type(DType type) { return type == DType::fp32 ? CUDA_R_32F : CUDA_R_16BF; }

// cuBLAS is column-major: a row-major matrix with `stride` elements between rows is its transpose there.
class Layout {
 public:
  Layout(cudaDataType_t type, int64_t stored_rows, int64_t stored_columns, int64_t stride, int64_t batch,
         int64_t batch_stride) {
    check_cublas(cublasLtMatrixLayoutCreate(&layout_, type, static_cast<uint64_t>(stored_columns),
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
    check_cublas(cublasLtMatrixLayoutSetAttribute(layout_, attribute, value, bytes),
                 "cublasLtMatrixLayoutSetAttribute");
  }
  cublasLtMatrixLayout_t layout_ = nullptr;
};

inline Layout operand_layout(const Operand& operand, int64_t rows, int64_t columns, int64_t batch) {
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
    check_cublas(cublasLtMatmulDescCreate(&description_, CUBLAS_COMPUTE_32F, CUDA_R_32F), "cublasLtMatmulDescCreate");
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
    check_cublas(cublasLtMatmulDescSetAttribute(description_, attribute, value, bytes),
                 "cublasLtMatmulDescSetAttribute");
  }
  cublasLtMatmulDesc_t description_ = nullptr;
};

class Preference {
 public:
  explicit Preference(size_t workspace_bytes) {
    check_cublas(cublasLtMatmulPreferenceCreate(&preference_), "cublasLtMatmulPreferenceCreate");
    set(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace_bytes, sizeof(workspace_bytes));
    set(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &kReductions, sizeof(kReductions));
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
    check_cublas(cublasLtMatmulPreferenceSetAttribute(preference_, attribute, value, bytes),
                 "cublasLtMatmulPreferenceSetAttribute");
  }
  cublasLtMatmulPreference_t preference_ = nullptr;
};

// The descriptors of one product.
struct ProductDescriptors {
  explicit ProductDescriptors(const Product& p)
      : description(p),
        a(operand_layout(p.a, p.rows, p.inner, p.batch)),
        b(operand_layout(p.b, p.inner, p.columns, p.batch)),
        out(data_type(p.out_type), p.rows, p.columns, p.out_stride, p.batch, p.out_batch_stride) {}

  // The library's algorithms, best first; never none.
  std::vector<cublasLtMatmulHeuristicResult_t> algorithms(cublasLtHandle_t handle, size_t workspace_bytes) const {
    const Preference preference(workspace_bytes);
    std::vector<cublasLtMatmulHeuristicResult_t> found(kProposals);
    int count = 0;
    check_cublas(cublasLtMatmulAlgoGetHeuristic(handle, description.get(), b.get(), a.get(), out.get(), out.get(),
                                                preference.get(), kProposals, found.data(), &count),
                 "cublasLtMatmulAlgoGetHeuristic");
    found.resize(static_cast<size_t>(count));
    std::erase_if(found, [](const auto& each) { return each.state != CUBLAS_STATUS_SUCCESS; });
    if (found.empty()) throw std::runtime_error("cuBLASLt has no algorithm for a matrix product of this shape");
    return found;
  }

  Description description;
  Layout a, b, out;
};

// The place in `found` of the algorithm that a product takes.
inline size_t choose_algorithm(const std::vector<cublasLtMatmulHeuristicResult_t>& found, int64_t inner, bool hopper) {
  std::vector<ProposedAlgorithm> proposed;
  for (const cublasLtMatmulHeuristicResult_t& each : found) {
    uint32_t tile = 0;
    size_t written = 0;
    check_cublas(
        cublasLtMatmulAlgoConfigGetAttribute(&each.algo, CUBLASLT_ALGO_CONFIG_TILE_ID, &tile, sizeof(tile), &written),
        "cublasLtMatmulAlgoConfigGetAttribute");
    proposed.push_back({tile, each.wavesCount});
  }
  return choose_algorithm(proposed, inner, hopper);
}

}  // namespace slidedp::nn
