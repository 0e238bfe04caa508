#include "runtime/nn/gradient_slot.h"

#include <cstring>

#include "runtime/nn/kernels.h"
#include "runtime/nn/tensors.h"
#include "runtime/nn/vector_math.h"

namespace slidedp::nn {

void GradientSlot::zero_gaps(const UnitLayout& unit, LayerBlock block) const {
  if (!first_) return;
  const int64_t element = size_of(type_);
  auto zero = [&](int64_t begin, int64_t end) {
    std::memset(static_cast<char*>(data_) + begin * element, 0, static_cast<size_t>((end - begin) * element));
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

void GradientSlot::store(int64_t offset, std::span<const double> sums) const {
  for (size_t i = 0; i < sums.size(); ++i) {
    const float sum = static_cast<float>(sums[i]);
    const int64_t at = offset + static_cast<int64_t>(i);
    if (type_ == DType::fp32) {
      *fp32(at) = first_ ? sum : *fp32(at) + sum;
    } else {
      *bf16(at) = to_bf16(first_ ? sum : from_bf16(*bf16(at)) + sum);
    }
  }
}

MatrixGradient::MatrixGradient(const GradientSlot& slot, int64_t offset, int64_t rows, int64_t columns)
    : slot_(slot), offset_(offset) {
  if (slot.type() == DType::fp32) {
    sum_ = view(slot.fp32(offset), rows, columns);
  } else {
    sum_ = matrix(rows, columns);
    if (!slot.first()) widen(slot.bf16(offset), sum_.data_ptr<float>(), sum_.numel());
  }
}

void MatrixGradient::add(int64_t begin, int64_t count, const at::Tensor& gradient, const at::Tensor& input,
                         bool overwrite) {
  at::Tensor rows = sum_.narrow(0, begin, count);
  multiply(rows, gradient.t(), input, !overwrite);
}

void MatrixGradient::commit() {
  if (slot_.type() == DType::bf16) narrow(sum_.const_data_ptr<float>(), slot_.bf16(offset_), sum_.numel());
}

}  // namespace slidedp::nn
