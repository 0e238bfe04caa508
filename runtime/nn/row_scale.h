// 1/rms of every row that a norm read.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "runtime/nn/kernels.h"
#include "runtime/nn/tensors.h"

namespace slidedp::nn {

// Lies in the saved area where the layer's policy keeps it (`saved`, borrowed), else in a temporary.
class RowScale {
 public:
  RowScale(float* saved, int64_t rows)
      : temporary_(saved == nullptr ? matrix(rows, 1) : at::Tensor()),
        data_(saved == nullptr ? temporary_.data_ptr<float>() : saved) {}
  float* data() const { return data_; }

  // The norm's output once more, in backward; the same bits either way.
  void norm_again(ConstRows x, const uint16_t* weight, double eps, Rows out) const {
    if (temporary_.defined()) {
      rms_norm(x, weight, eps, data_, out);
    } else {
      rms_norm_apply(x, weight, data_, out);
    }
  }

 private:
  at::Tensor temporary_;
  float* data_;
};

}  // namespace slidedp::nn
