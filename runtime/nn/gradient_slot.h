// Where weight gradients go: a unit's flat gradient slot, fp32 or bf16.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <span>
#include <vector>

#include "model/base/types.h"
#include "model/spec/layout.h"

namespace slidedp::nn {

// `first`: gradients overwrite the slot; else they are added. Borrowed memory.
class GradientSlot {
 public:
  GradientSlot(void* data, DType type, bool first) : data_(data), type_(type), first_(first) {}
  bool first() const { return first_; }
  DType type() const { return type_; }
  float* fp32(int64_t offset) const { return static_cast<float*>(data_) + offset; }
  uint16_t* bf16(int64_t offset) const { return static_cast<uint16_t*>(data_) + offset; }

  // When first: zeroes what lies between and after the tensors of the unit's block.
  void zero_gaps(const UnitLayout& unit, LayerBlock block = LayerBlock::whole) const;
  // Stores or adds one sum an element; rounded once.
  void store(int64_t offset, std::span<const double> sums) const;

 private:
  void* data_;
  DType type_;
  bool first_;
};

// The gradient of one matrix [rows, columns] at `offset`. An fp32 slot is written in place; for a bf16 slot the sum is
// formed in an fp32 temporary and rounded once by commit().
class MatrixGradient {
 public:
  MatrixGradient(const GradientSlot& slot, int64_t offset, int64_t rows, int64_t columns);
  // rows [begin, begin + count) += gradient^T * input; `overwrite`: = instead.
  void add(int64_t begin, int64_t count, const at::Tensor& gradient, const at::Tensor& input, bool overwrite);
  void commit();

 private:
  GradientSlot slot_;
  int64_t offset_;
  at::Tensor sum_;
};

}  // namespace slidedp::nn
