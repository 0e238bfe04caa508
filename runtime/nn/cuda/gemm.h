// Matrix products of bf16 matrices with fp32 accumulation, by cuBLASLt, straight between flat buffers. Row-major
// throughout. The algorithm is chosen once a shape, from what the library proposes, by a fixed rule (gemm_choice.h) and
// with a fixed assumption about alignment, so the same shapes give the same bits at any address.
#pragma once

#include <cublasLt.h>

#include <array>
#include <cstdint>
#include <map>
#include <memory>

#include "model/base/types.h"

namespace slidedp::nn {

// A matrix, or a batch of them. `transposed`: what is stored is its transpose.
struct Operand {
  const void* data = nullptr;
  int64_t stride = 0;  // elements between stored rows; a multiple of 8
  bool transposed = false;
  int64_t batch_stride = 0;
};

// out [rows, columns] = alpha * a [rows, inner] * b [inner, columns] + add + bias
struct Product {
  int64_t rows = 0, columns = 0, inner = 0;
  Operand a, b;
  void* out = nullptr;
  DType out_type = DType::bf16;
  int64_t out_stride = 0;
  const void* add = nullptr;       // laid out and typed like `out`, may be `out`; null: nothing
  const uint16_t* bias = nullptr;  // [columns], for bf16 results; null: nothing
  float alpha = 1.0f;
  int64_t batch = 1;
  int64_t out_batch_stride = 0;
};

class Gemm {
 public:
  // `workspace`: device memory that only products of one stream use.
  Gemm(void* workspace, int64_t workspace_bytes);
  ~Gemm();
  Gemm(const Gemm&) = delete;
  Gemm& operator=(const Gemm&) = delete;

  void run(const Product& product, cudaStream_t stream);

 private:
  struct Chosen;  // descriptors and algorithm of one shape
  using Key = std::array<int64_t, 16>;
  static Key key(const Product& product);
  Chosen& chosen(const Product& product);

  cublasLtHandle_t handle_ = nullptr;
  void* workspace_;
  size_t workspace_bytes_;
  bool hopper_;
  std::map<Key, std::unique_ptr<Chosen>> chosen_;
};

}  // namespace slidedp::nn
