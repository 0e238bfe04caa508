// What attention reads besides the values: queries and keys after QK-norm and RoPE.
#pragma once

#include <ATen/core/Tensor.h>

#include "runtime/nn/attention.h"
#include "runtime/nn/decoder_layer.h"
#include "runtime/nn/row_scale.h"

namespace slidedp::nn {

// They lie in the saved area where the layer's policy keeps them, else in temporaries that live as long as this. The
// stride between tokens is the same under every policy, so that attention makes the same calls and gives the same bits.
class RotatedHeads {
 public:
  // Forward: formed from the projected heads, which stay what they are if they are saved apart.
  static RotatedHeads form(const LayerCall& call);
  // Backward: the saved ones, or formed again. Without QK-norm, whose gradient needs the projected heads, they take the
  // place of those.
  static RotatedHeads restore(const LayerCall& call);

  HeadMatrix queries() const { return {heads_, stride_}; }
  HeadMatrix keys() const { return {heads_ + call_.queries, stride_}; }
  // One row a head.
  Rows query_rows() const { return rows(queries(), call_.model.heads); }
  Rows key_rows() const { return rows(keys(), call_.model.kv_heads); }
  // QK-norm's 1/rms of those rows.
  float* query_rstd() const { return rstd_.data(); }
  float* key_rstd() const { return rstd_.data() + call_.tokens * call_.model.heads; }

 private:
  RotatedHeads(const LayerCall& call, float* place);  // null: a temporary
  void norm_and_rotate() const;
  Rows rows(const HeadMatrix& matrix, int64_t heads) const {
    return {matrix.data, call_.tokens * heads, call_.model.head_dim, matrix.stride, heads};
  }

  const LayerCall& call_;
  int64_t stride_;
  at::Tensor temporary_;
  float* heads_;
  RowScale rstd_;
};

}  // namespace slidedp::nn
