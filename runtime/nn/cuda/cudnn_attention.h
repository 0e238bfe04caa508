// cuDNN's causal attention over rows that hold one document each, as graphs of cudnn-frontend: built once a shape,
// kept, and with every result straight in its place, where ATen's calls of the same kernels return tensors of their
// own.
#pragma once

#include <compare>
#include <cstdint>
#include <map>
#include <memory>
#include <string>

#include "runtime/nn/cuda/context.h"

namespace slidedp::nn {

// Strides in elements between tokens; the heads of one token are dense.
struct CudnnShape {
  int64_t rows = 0, seq = 0;
  int64_t heads = 0, kv_heads = 0, head_dim = 0;
  int64_t query_stride = 0, key_stride = 0, value_stride = 0;
  auto operator<=>(const CudnnShape&) const = default;
};

// Device memory, bf16 but log_sum_exp; borrowed. Outputs and all gradients are dense, one row a token; log_sum_exp is
// fp32 [rows, heads, seq]. Forward reads query, key and value and writes out and log_sum_exp; backward reads all of
// these and out_gradient and writes the other gradients.
struct CudnnOperands {
  const uint16_t *query = nullptr, *key = nullptr, *value = nullptr;
  const uint16_t* out = nullptr;
  const float* log_sum_exp = nullptr;
  const uint16_t* out_gradient = nullptr;
  uint16_t *query_gradient = nullptr, *key_gradient = nullptr, *value_gradient = nullptr;
};

class CudnnAttention {
 public:
  CudnnAttention();
  ~CudnnAttention();

  // Whether cuDNN has plans for forward and backward of this shape; they are built at the first question. Works on
  // ATen's current stream, as forward and backward do.
  bool takes(const CudnnShape& shape);
  // Why it did not take the last shape that it did not; empty if it took all.
  const std::string& refusal() const { return refusal_; }

  // The shape must have been taken. The workspace is a temporary of the context.
  void forward(const CudaContext& context, const CudnnShape& shape, const CudnnOperands& operands) const;
  void backward(const CudaContext& context, const CudnnShape& shape, const CudnnOperands& operands) const;

 private:
  struct Graphs;
  std::map<CudnnShape, std::unique_ptr<Graphs>> graphs_;  // null: not taken
  std::string refusal_;
};

}  // namespace slidedp::nn
