#include "runtime/nn/cuda/attention.h"

#include <ATen/ops/_flash_attention_backward.h>
#include <ATen/ops/_flash_attention_forward.h>
#include <ATen/ops/_scaled_dot_product_cudnn_attention.h>
#include <ATen/ops/_scaled_dot_product_cudnn_attention_backward.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <stdexcept>

#include "model/cost/activations.h"

namespace slidedp::nn {
namespace {

// Batches whose document lists stay on the device.
constexpr size_t kKnownBatches = 64;

at::TensorOptions on_device(int device, at::ScalarType type) {
  return at::TensorOptions().dtype(type).device(at::Device(at::kCUDA, static_cast<c10::DeviceIndex>(device)));
}

at::Tensor borrow(const CudaContext& context, const void* data, at::IntArrayRef sizes, at::IntArrayRef strides,
                  at::ScalarType type) {
  const at::TensorOptions options = on_device(context.device, type);
  // With the device named, ATen does not ask the driver where the memory lies.
  return at::for_blob(const_cast<void*>(data), sizes)
      .strides(strides)
      .target_device(options.device())
      .options(options)
      .make_tensor();
}

// Heads of `tokens` tokens from `first` on, [tokens, heads, head_dim].
at::Tensor token_heads(const CudaContext& context, HeadView view, int64_t first, int64_t tokens, int64_t heads,
                       int64_t head_dim) {
  return borrow(context, view.data + first * view.stride, {tokens, heads, head_dim}, {view.stride, head_dim, 1},
                at::kBFloat16);
}

// The same as [rows, heads, seq, head_dim].
at::Tensor row_heads(const CudaContext& context, HeadView view, const MicroBatch& batch, int64_t heads,
                     int64_t head_dim) {
  return borrow(context, view.data, {batch.rows, heads, batch.seq, head_dim},
                {batch.seq * view.stride, head_dim, view.stride, 1}, at::kBFloat16);
}

void copy(const CudaContext& context, void* to, const at::Tensor& from) {
  check_cuda(cudaMemcpyAsync(to, from.const_data_ptr(), from.nbytes(), cudaMemcpyDeviceToDevice, context.stream),
             "cudaMemcpyAsync");
}

// [rows, heads, seq, head_dim] in whatever order it lies -> dense [tokens, heads * head_dim]; no copy if it lies so.
at::Tensor by_token(const at::Tensor& heads) { return heads.transpose(1, 2).contiguous(); }

// Every row is one document.
bool one_document_rows(const MicroBatch& batch) {
  if (static_cast<int64_t>(batch.document_starts.size()) != batch.rows) return false;
  for (int64_t row = 0; row < batch.rows; ++row) {
    if (batch.document_starts[static_cast<size_t>(row)] != row * batch.seq) return false;
  }
  return true;
}

}  // namespace

std::string_view name(AttentionBackend backend) {
  switch (backend) {
    case AttentionBackend::cudnn:
      return "cudnn";
    case AttentionBackend::flash:
      return "flash";
    case AttentionBackend::tiled:
      return "tiled";
  }
  throw std::logic_error("unknown AttentionBackend");
}

CudaAttention::Choice CudaAttention::deterministic() {
  return {AttentionBackend::tiled, AttentionBackend::tiled, "tiled matrix products (deterministic)"};
}

CudaAttention::CudaAttention(const ModelSpec& model, Choice choice)
    : heads_(model.heads), kv_heads_(model.kv_heads), head_dim_(model.head_dim), choice_(std::move(choice)) {}

AttentionBackend CudaAttention::backend(const MicroBatch& batch) const {
  return one_document_rows(batch) ? choice_.one_document_rows : choice_.packed_rows;
}

void CudaAttention::forward(const CudaContext& context, const MicroBatch& batch, const AttentionInputs& inputs,
                            uint16_t* out, float* log_sum_exp) {
  switch (backend(batch)) {
    case AttentionBackend::cudnn:
      return forward_cudnn(context, batch, inputs, out, log_sum_exp);
    case AttentionBackend::flash:
      return forward_flash(context, batch, inputs, out, log_sum_exp);
    case AttentionBackend::tiled:
      return TiledAttention{heads_, kv_heads_, head_dim_, batch.tokens(), batch.document_starts}.forward(
          context, inputs, out, log_sum_exp);
  }
}

AttentionGradients CudaAttention::backward(const CudaContext& context, const MicroBatch& batch,
                                           const AttentionInputs& inputs, const uint16_t* out, const float* log_sum_exp,
                                           const uint16_t* out_gradient) {
  switch (backend(batch)) {
    case AttentionBackend::cudnn:
      return backward_cudnn(context, batch, inputs, out, log_sum_exp, out_gradient);
    case AttentionBackend::flash:
      return backward_flash(context, batch, inputs, out, log_sum_exp, out_gradient);
    case AttentionBackend::tiled:
      return TiledAttention{heads_, kv_heads_, head_dim_, batch.tokens(), batch.document_starts}.backward(
          context, inputs, out, log_sum_exp, out_gradient);
  }
  throw std::logic_error("unknown AttentionBackend");
}

CudnnShape CudaAttention::cudnn_shape(const MicroBatch& batch, const AttentionInputs& inputs) const {
  return {batch.rows,        batch.seq,          heads_, kv_heads_, head_dim_, inputs.query.stride,
          inputs.key.stride, inputs.value.stride};
}

// By cudnn-frontend; through ATen, with copies, for what that does not take.
void CudaAttention::forward_cudnn(const CudaContext& context, const MicroBatch& batch, const AttentionInputs& inputs,
                                  uint16_t* out, float* log_sum_exp) {
  const CudnnShape shape = cudnn_shape(batch, inputs);
  if (cudnn_.takes(shape)) {
    return cudnn_.forward(context, shape, {inputs.query.data, inputs.key.data, inputs.value.data, out, log_sum_exp});
  }
  const at::Tensor query = row_heads(context, inputs.query, batch, heads_, head_dim_);
  const at::Tensor key = row_heads(context, inputs.key, batch, kv_heads_, head_dim_);
  const at::Tensor value = row_heads(context, inputs.value, batch, kv_heads_, head_dim_);
  const auto result = at::_scaled_dot_product_cudnn_attention(query, key, value, /*attn_bias=*/std::nullopt,
                                                              /*compute_log_sumexp=*/true, /*dropout_p=*/0.0,
                                                              /*is_causal=*/true, /*return_debug_mask=*/false);
  const at::Tensor& statistics = std::get<1>(result);
  cudnn_statistics_dims_ = statistics.dim();
  if (statistics.numel() != heads_ * batch.tokens()) {
    throw std::logic_error("cuDNN's softmax statistics do not have one element a head and token");
  }
  copy(context, out, by_token(std::get<0>(result)));
  copy(context, log_sum_exp, statistics);
}

AttentionGradients CudaAttention::backward_cudnn(const CudaContext& context, const MicroBatch& batch,
                                                 const AttentionInputs& inputs, const uint16_t* out,
                                                 const float* log_sum_exp, const uint16_t* out_gradient) {
  const int64_t width = heads_ * head_dim_, kv_width = kv_heads_ * head_dim_;
  const CudnnShape shape = cudnn_shape(batch, inputs);
  if (cudnn_.takes(shape)) {
    const AttentionGradients gradients{context.bf16(batch.tokens() * width), context.bf16(batch.tokens() * kv_width),
                                       context.bf16(batch.tokens() * kv_width)};
    cudnn_.backward(context, shape,
                    {inputs.query.data, inputs.key.data, inputs.value.data, out, log_sum_exp, out_gradient,
                     bf16_data(gradients.query), bf16_data(gradients.key), bf16_data(gradients.value)});
    return gradients;
  }
  const at::Tensor query = row_heads(context, inputs.query, batch, heads_, head_dim_);
  const at::Tensor key = row_heads(context, inputs.key, batch, kv_heads_, head_dim_);
  const at::Tensor value = row_heads(context, inputs.value, batch, kv_heads_, head_dim_);
  const at::Tensor output = row_heads(context, {out, width}, batch, heads_, head_dim_);
  const at::Tensor slope = row_heads(context, {out_gradient, width}, batch, heads_, head_dim_);
  at::Tensor statistics =
      borrow(context, log_sum_exp, {batch.rows, heads_, batch.seq}, {heads_ * batch.seq, batch.seq, 1}, at::kFloat);
  if (cudnn_statistics_dims_ == 4) statistics = statistics.unsqueeze(-1);
  const at::Tensor no_dropout = at::empty({}, on_device(context.device, at::kLong));  // never read
  auto [query_gradient, key_gradient, value_gradient] = at::_scaled_dot_product_cudnn_attention_backward(
      slope, query, key, value, output, statistics, no_dropout, no_dropout, /*attn_bias=*/at::Tensor(),
      /*cum_seq_q=*/at::Tensor(), /*cum_seq_k=*/at::Tensor(), batch.seq, batch.seq, /*dropout_p=*/0.0,
      /*is_causal=*/true);
  return {by_token(query_gradient), by_token(key_gradient), by_token(value_gradient)};
}

// The lists lie in memory of the compute lane's stream, so that one that is replaced is not reused too early.
const std::vector<CudaAttention::Group>& CudaAttention::groups(const CudaContext& context, const MicroBatch& batch) {
  for (const Documents& known : known_) {
    if (known.tokens == batch.tokens() && std::ranges::equal(known.starts, batch.document_starts)) return known.groups;
  }
  Documents documents{{batch.document_starts.begin(), batch.document_starts.end()}, batch.tokens(), {}};
  const int64_t limit = flash_documents(batch.tokens());
  const auto count = static_cast<int64_t>(documents.starts.size());
  const auto start = [&](int64_t i) {
    return i < count ? static_cast<int64_t>(documents.starts[static_cast<size_t>(i)]) : documents.tokens;
  };
  for (int64_t first = 0; first < count; first += limit) {
    const int64_t last = std::min(first + limit, count);
    Group group{start(first), start(last), 0, {}};
    std::vector<int32_t> starts;
    for (int64_t i = first; i <= last; ++i) starts.push_back(static_cast<int32_t>(start(i) - group.begin));
    for (int64_t i = first; i < last; ++i) group.longest = std::max(group.longest, start(i + 1) - start(i));
    group.starts = at::empty({static_cast<int64_t>(starts.size())}, on_device(context.device, at::kInt));
    check_cuda(cudaMemcpyAsync(group.starts.data_ptr(), starts.data(), starts.size() * sizeof(int32_t),
                               cudaMemcpyHostToDevice, context.stream),
               "cudaMemcpyAsync");
    documents.groups.push_back(std::move(group));
  }
  if (known_.size() < kKnownBatches) {
    known_.push_back(std::move(documents));
    return known_.back().groups;
  }
  Documents& replaced = known_[next_known_++ % kKnownBatches];
  replaced = std::move(documents);
  return replaced.groups;
}

void CudaAttention::forward_flash(const CudaContext& context, const MicroBatch& batch, const AttentionInputs& inputs,
                                  uint16_t* out, float* log_sum_exp) {
  for (const Group& group : groups(context, batch)) {
    const int64_t tokens = group.end - group.begin;
    // At least 2: with 1 the kernel would take a path of its own, for decoding.
    const int64_t longest = std::max<int64_t>(group.longest, 2);
    const auto result = at::_flash_attention_forward(
        token_heads(context, inputs.query, group.begin, tokens, heads_, head_dim_),
        token_heads(context, inputs.key, group.begin, tokens, kv_heads_, head_dim_),
        token_heads(context, inputs.value, group.begin, tokens, kv_heads_, head_dim_), group.starts, group.starts,
        longest, longest, /*dropout_p=*/0.0, /*is_causal=*/true, /*return_debug_mask=*/false);
    const at::Tensor& statistics = std::get<1>(result);  // [heads, tokens]
    if (statistics.numel() != heads_ * tokens) {
      throw std::logic_error("flash attention's softmax statistics do not have one element a head and token");
    }
    copy(context, out + group.begin * heads_ * head_dim_, std::get<0>(result).contiguous());
    copy(context, log_sum_exp + group.begin * heads_, statistics);
  }
}

AttentionGradients CudaAttention::backward_flash(const CudaContext& context, const MicroBatch& batch,
                                                 const AttentionInputs& inputs, const uint16_t* out,
                                                 const float* log_sum_exp, const uint16_t* out_gradient) {
  const int64_t width = heads_ * head_dim_, kv_width = kv_heads_ * head_dim_;
  const std::vector<Group>& parts = groups(context, batch);
  AttentionGradients all;
  if (parts.size() > 1) {
    all = {context.bf16(batch.tokens() * width), context.bf16(batch.tokens() * kv_width),
           context.bf16(batch.tokens() * kv_width)};
  }
  for (const Group& group : parts) {
    const int64_t tokens = group.end - group.begin;
    const int64_t longest = std::max<int64_t>(group.longest, 2);
    const auto heads = [&](HeadView view, int64_t count) {
      return token_heads(context, view, group.begin, tokens, count, head_dim_);
    };
    const at::Tensor statistics =
        borrow(context, log_sum_exp + group.begin * heads_, {heads_, tokens}, {tokens, 1}, at::kFloat);
    const at::Tensor no_dropout = at::empty({2}, on_device(context.device, at::kLong));  // never read
    auto [query, key, value] = at::_flash_attention_backward(
        heads({out_gradient, width}, heads_), heads(inputs.query, heads_), heads(inputs.key, kv_heads_),
        heads(inputs.value, kv_heads_), heads({out, width}, heads_), statistics, group.starts, group.starts, longest,
        longest, /*dropout_p=*/0.0, /*is_causal=*/true, no_dropout, no_dropout);
    if (parts.size() == 1) return {query.contiguous(), key.contiguous(), value.contiguous()};
    copy(context, bf16_data(all.query) + group.begin * width, query.contiguous());
    copy(context, bf16_data(all.key) + group.begin * kv_width, key.contiguous());
    copy(context, bf16_data(all.value) + group.begin * kv_width, value.contiguous());
  }
  return all;
}

}  // namespace slidedp::nn
