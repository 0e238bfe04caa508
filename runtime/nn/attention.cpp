#include "runtime/nn/attention.h"

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward.h>
#include <ATen/ops/from_blob.h>

namespace slidedp::nn {
namespace {

// ATen's kernel knows no grouped heads, but it takes any strides: the KV heads become its batch, the query heads of a
// group its heads, and the keys and values of a group are one array seen `group` times (stride 0). So nothing is
// expanded going in; the gradients of k and v come out once per query head and are added here, in head order.
class Document {
 public:
  Document(const AttentionShape& shape, size_t index)
      : shape_(shape), group_(shape.heads / shape.kv_heads), begin_(shape.document_starts[index]) {
    const bool last = index + 1 == shape.document_starts.size();
    length_ = (last ? shape.tokens : shape.document_starts[index + 1]) - begin_;
  }

  // [kv_heads, group, length, head_dim]
  at::Tensor per_query_head(const float* data, int64_t stride) const {
    return blob(data + begin_ * stride, {group_ * shape_.head_dim, shape_.head_dim, stride, 1});
  }
  at::Tensor per_kv_head(const HeadMatrix& matrix) const {
    return blob(matrix.data + begin_ * matrix.stride, {shape_.head_dim, 0, matrix.stride, 1});
  }
  at::Tensor queries(const HeadMatrix& matrix) const { return per_query_head(matrix.data, matrix.stride); }
  at::Tensor attention(const float* data) const { return per_query_head(data, shape_.heads * shape_.head_dim); }
  // [kv_heads, group, length], stored [kv_heads, length, group].
  at::Tensor log_sum_exp(const float* data) const {
    float* at = const_cast<float*>(data) + begin_ * shape_.heads;
    return at::from_blob(at, {shape_.kv_heads, group_, length_}, {length_ * group_, 1, group_}, at::dtype(at::kFloat));
  }

  // matrix = sum over the group of gradient [kv_heads, group, length, head_dim].
  void sum_group(const at::Tensor& gradient, const HeadMatrix& matrix) const {
    const float* from = gradient.const_data_ptr<float>();
    const int64_t kv_stride = gradient.stride(0), group_stride = gradient.stride(1), stride = gradient.stride(2);
    at::parallel_for(0, length_, 64, [&](int64_t first, int64_t last) {
      for (int64_t t = first; t < last; ++t) {
        for (int64_t kv = 0; kv < shape_.kv_heads; ++kv) {
          float* to = matrix.data + (begin_ + t) * matrix.stride + kv * shape_.head_dim;
          const float* head = from + kv * kv_stride + t * stride;
          for (int64_t i = 0; i < shape_.head_dim; ++i) to[i] = head[i];
          for (int64_t g = 1; g < group_; ++g) {
            for (int64_t i = 0; i < shape_.head_dim; ++i) to[i] += head[g * group_stride + i];
          }
        }
      }
    });
  }

 private:
  at::Tensor blob(const float* data, at::IntArrayRef strides) const {
    return at::from_blob(const_cast<float*>(data), {shape_.kv_heads, group_, length_, shape_.head_dim}, strides,
                         at::dtype(at::kFloat));
  }

  const AttentionShape& shape_;
  int64_t group_, begin_, length_ = 0;
};

}  // namespace

void attention_forward(const AttentionShape& shape, HeadMatrix q, HeadMatrix k, HeadMatrix v, float* out,
                       float* log_sum_exp) {
  for (size_t i = 0; i < shape.document_starts.size(); ++i) {
    const Document document(shape, i);
    const auto [output, lse] = at::_scaled_dot_product_flash_attention_for_cpu(
        document.queries(q), document.per_kv_head(k), document.per_kv_head(v), /*dropout_p=*/0.0, /*is_causal=*/true);
    document.attention(out).copy_(output);
    document.log_sum_exp(log_sum_exp).copy_(lse);
  }
}

void attention_backward(const AttentionShape& shape, HeadMatrix q, HeadMatrix k, HeadMatrix v, const float* out,
                        const float* log_sum_exp, const float* out_gradient) {
  for (size_t i = 0; i < shape.document_starts.size(); ++i) {
    const Document document(shape, i);
    const auto [dq, dk, dv] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
        document.attention(out_gradient), document.queries(q), document.per_kv_head(k), document.per_kv_head(v),
        document.attention(out), document.log_sum_exp(log_sum_exp), /*dropout_p=*/0.0, /*is_causal=*/true);
    document.queries(q).copy_(dq);
    document.sum_group(dk, k);
    document.sum_group(dv, v);
  }
}

}  // namespace slidedp::nn
