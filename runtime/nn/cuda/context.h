// What every part of the CUDA compute works with: the stream, the matrix products, temporaries and gradient slots.
#pragma once

#include <ATen/core/Tensor.h>
#include <cuda_runtime_api.h>

#include <cstdint>

#include "model/base/types.h"
#include "model/spec/layout.h"
#include "runtime/nn/cuda/gemm.h"
#include "runtime/nn/kernels/launch.h"

namespace slidedp::nn {

// Memory of ATen's caching allocator for the current stream, uninitialised.
at::Tensor device_bytes(int64_t count, int device);

// Borrows everything; made anew at every call.
struct CudaContext {
  int device = 0;
  cudaStream_t stream = nullptr;
  Gemm& gemm;

  // Temporaries of ATen's caching allocator, uninitialised; freed in stream order when the tensor goes.
  at::Tensor bf16(int64_t elements) const;
  at::Tensor fp32(int64_t elements) const;
  at::Tensor bytes(int64_t count) const;
  void multiply(const Product& product) const { gemm.run(product, stream); }
};

uint16_t* bf16_data(const at::Tensor& tensor);
float* fp32_data(const at::Tensor& tensor);

// A unit's flat gradient slot. Borrowed memory.
struct CudaGradientSlot {
  void* data = nullptr;
  DType type = DType::fp32;
  bool first = true;  // gradients overwrite the slot; else they are added

  GradientRange at(int64_t offset) const {
    return {static_cast<char*>(data) + offset * size_of(type), type == DType::fp32, first};
  }
  // When first: zeroes what lies between and after the tensors of the unit's block.
  void zero_gaps(const UnitLayout& unit, cudaStream_t stream, LayerBlock block = LayerBlock::whole) const;
};

// matrix gradient [outputs, inputs] at `offset` = or += gradient [tokens, outputs]^T * input [tokens, inputs]
void weight_gradient(const CudaContext& context, const CudaGradientSlot& slot, int64_t offset, const uint16_t* gradient,
                     int64_t outputs, const uint16_t* input, int64_t inputs, int64_t tokens);
// out [tokens, inputs] = gradient [tokens, outputs] * matrix [outputs, inputs]
void input_gradient(const CudaContext& context, const uint16_t* gradient, int64_t outputs, const uint16_t* matrix,
                    int64_t inputs, int64_t tokens, uint16_t* out);
// Bias gradient: the sum of `gradient` [tokens, width] over tokens.
void bias_gradient(const CudaContext& context, GradientRange range, const uint16_t* gradient, int64_t tokens,
                   int64_t width);

}  // namespace slidedp::nn
