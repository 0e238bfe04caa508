#include "runtime/nn/cuda/context.h"

#include <ATen/ops/empty.h>

#include "runtime/nn/kernels/column_sums.h"

namespace slidedp::nn {
namespace {

at::Tensor allocate(int64_t elements, at::ScalarType type, int device) {
  return at::empty(
      {elements}, at::TensorOptions().dtype(type).device(at::Device(at::kCUDA, static_cast<c10::DeviceIndex>(device))));
}

}  // namespace

at::Tensor device_bytes(int64_t count, int device) { return allocate(count, at::kByte, device); }

at::Tensor CudaContext::bf16(int64_t elements) const { return allocate(elements, at::kBFloat16, device); }
at::Tensor CudaContext::fp32(int64_t elements) const { return allocate(elements, at::kFloat, device); }
at::Tensor CudaContext::bytes(int64_t count) const { return device_bytes(count, device); }

uint16_t* bf16_data(const at::Tensor& tensor) { return static_cast<uint16_t*>(tensor.data_ptr()); }
float* fp32_data(const at::Tensor& tensor) { return static_cast<float*>(tensor.data_ptr()); }

void CudaGradientSlot::zero_gaps(const UnitLayout& unit, cudaStream_t stream, LayerBlock block) const {
  if (!first) return;
  const auto zero = [&](int64_t begin, int64_t end) {
    if (begin == end) return;
    check_cuda(cudaMemsetAsync(at(begin).data, 0, static_cast<size_t>((end - begin) * size_of(type)), stream),
               "cudaMemsetAsync");
  };
  const ElementRange range = unit.range(block);
  int64_t end = range.begin;
  for (const TensorLayout& tensor : unit.tensors) {
    if (tensor.offset < range.begin || tensor.offset >= range.end) continue;
    zero(end, tensor.offset);
    end = tensor.offset + tensor.elements;
  }
  zero(end, range.end);
}

void weight_gradient(const CudaContext& context, const CudaGradientSlot& slot, int64_t offset, const uint16_t* gradient,
                     int64_t outputs, const uint16_t* input, int64_t inputs, int64_t tokens) {
  void* out = slot.at(offset).data;
  context.multiply({.rows = outputs,
                    .columns = inputs,
                    .inner = tokens,
                    .a = {.data = gradient, .stride = outputs, .transposed = true},
                    .b = {.data = input, .stride = inputs},
                    .out = out,
                    .out_type = slot.type,
                    .out_stride = inputs,
                    .add = slot.first ? nullptr : out});
}

void input_gradient(const CudaContext& context, const uint16_t* gradient, int64_t outputs, const uint16_t* matrix,
                    int64_t inputs, int64_t tokens, uint16_t* out) {
  context.multiply({.rows = tokens,
                    .columns = inputs,
                    .inner = outputs,
                    .a = {.data = gradient, .stride = outputs},
                    .b = {.data = matrix, .stride = inputs},
                    .out = out,
                    .out_stride = inputs});
}

void bias_gradient(const CudaContext& context, GradientRange range, const uint16_t* gradient, int64_t tokens,
                   int64_t width) {
  const int64_t rows = column_partial_rows(tokens);
  const at::Tensor partials = context.fp32(rows * width);
  column_partials(gradient, tokens, width, fp32_data(partials), context.stream);
  store_column_sums(fp32_data(partials), rows, width, width, range, context.stream);
}

}  // namespace slidedp::nn
