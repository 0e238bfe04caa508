// 1/rms of every row that a norm read.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "runtime/nn/tensors.h"

namespace slidedp::nn {

// Lies in the saved area where the layer's policy keeps it (`saved`, borrowed), else in a temporary.
class RowScale {
 public:
  RowScale(float* saved, int64_t rows)
      : temporary_(saved == nullptr ? matrix(rows, 1) : at::Tensor()),
        data_(saved == nullptr ? temporary_.data_ptr<float>() : saved) {}
  float* data() const { return data_; }

 private:
  at::Tensor temporary_;
  float* data_;
};

}  // namespace slidedp::nn
