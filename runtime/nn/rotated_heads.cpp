#include "runtime/nn/rotated_heads.h"

#include "runtime/nn/kernels.h"
#include "runtime/nn/tensors.h"

namespace slidedp::nn {

RotatedHeads::RotatedHeads(const LayerCall& call, float* place)
    : call_(call),
      stride_(call.model.qk_norm ? call.queries + call.keys : call.qkv_width()),
      temporary_(place == nullptr ? matrix(call.tokens, stride_) : at::Tensor()),
      heads_(place == nullptr ? temporary_.data_ptr<float>() : place),
      rstd_(call.saved.qk_rstd, call.model.qk_norm ? call.tokens * (call.model.heads + call.model.kv_heads) : 0) {}

RotatedHeads RotatedHeads::form(const LayerCall& call) {
  RotatedHeads heads(call, call.saved.qk_rotated);
  heads.norm_and_rotate();
  return heads;
}

RotatedHeads RotatedHeads::restore(const LayerCall& call) {
  if (call.saved.qk_rotated != nullptr) return {call, call.saved.qk_rotated};
  RotatedHeads heads(call, call.model.qk_norm ? nullptr : call.saved.qkv);
  heads.norm_and_rotate();
  return heads;
}

void RotatedHeads::norm_and_rotate() const {
  const ModelSpec& model = call_.model;
  if (model.qk_norm) {
    rms_norm(call_.projected_query_heads(), call_.weight(TensorRole::q_norm), model.rms_eps, query_rstd(),
             query_rows());
    rms_norm(call_.projected_key_heads(), call_.weight(TensorRole::k_norm), model.rms_eps, key_rstd(), key_rows());
  } else if (heads_ != call_.saved.qkv) {
    fill_rows(matrix_rows(heads_, call_.tokens, stride_), /*bias=*/nullptr,
              matrix_rows(call_.saved.qkv, call_.tokens, stride_));
  }
  rope(query_rows(), call_.batch.positions, call_.table, /*inverse=*/false);
  rope(key_rows(), call_.batch.positions, call_.table, /*inverse=*/false);
}

}  // namespace slidedp::nn
