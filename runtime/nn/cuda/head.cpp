#include "runtime/nn/cuda/head.h"

#include <algorithm>

#include "runtime/nn/kernels/column_sums.h"
#include "runtime/nn/kernels/convert.h"
#include "runtime/nn/kernels/cross_entropy.h"
#include "runtime/nn/kernels/rms_norm.h"

namespace slidedp::nn {
namespace {

// The gradient of the vocabulary matrix over the token chunks. A bf16 slot cannot take one rounded sum a chunk, so with
// several chunks the sum is formed in an fp32 temporary.
class MatrixSum {
 public:
  MatrixSum(const CudaContext& context, const CudaHeadCall& call)
      : context_(context),
        call_(call),
        slot_(call.vocabulary_gradients),
        elements_(call.model.vocabulary * call.model.hidden) {
    const bool one_chunk = call.chunk_tokens >= call.batch.tokens();
    if (slot_.type == DType::fp32 || (one_chunk && slot_.first)) return;
    sum_ = context.fp32(elements_);
    if (!slot_.first) {
      widen_to_fp32(static_cast<const uint16_t*>(place().data), fp32_data(sum_), elements_, context.stream);
    }
  }

  // += logit_gradients [count, vocabulary]^T * normed [count, hidden]
  void add(const uint16_t* logit_gradients, int64_t stride, const uint16_t* normed, int64_t count, bool first_chunk) {
    const bool overwrite = slot_.first && first_chunk;
    void* out = sum_.defined() ? sum_.data_ptr() : place().data;
    context_.multiply({.rows = call_.model.vocabulary,
                       .columns = call_.model.hidden,
                       .inner = count,
                       .a = {.data = logit_gradients, .stride = stride, .transposed = true},
                       .b = {.data = normed, .stride = call_.model.hidden},
                       .out = out,
                       .out_type = sum_.defined() ? DType::fp32 : slot_.type,
                       .out_stride = call_.model.hidden,
                       .add = overwrite ? nullptr : out});
  }

  void finish() {
    if (!sum_.defined()) return;
    narrow_to_bf16(fp32_data(sum_), static_cast<uint16_t*>(place().data), elements_, context_.stream);
  }

 private:
  GradientRange place() const { return slot_.at(call_.vocabulary_offset); }

  const CudaContext& context_;
  const CudaHeadCall& call_;
  CudaGradientSlot slot_;
  int64_t elements_;
  at::Tensor sum_;  // undefined: straight into the slot
};

}  // namespace

void cuda_head(const CudaContext& context, const CudaHeadCall& call, const uint16_t* hidden_in,
               uint16_t* hidden_gradient, double* loss_sum) {
  const int64_t tokens = call.batch.tokens(), hidden = call.model.hidden, vocabulary = call.model.vocabulary;
  const int64_t chunk = std::min(call.chunk_tokens, tokens), stride = round_up(vocabulary, kVectorElements);
  const float eps = static_cast<float>(call.model.rms_eps);
  MatrixSum matrix_sum(context, call);
  const at::Tensor logits = context.bf16(chunk * stride);
  const at::Tensor normed = context.bf16(chunk * hidden), slope = context.bf16(chunk * hidden);
  const at::Tensor rstd = context.fp32(chunk), losses = context.bytes(tokens * 8);
  // The first chunk is the largest, so it has the most rows of partial sums; later ones add to them.
  const int64_t partial_rows = rms_norm_partial_rows(chunk, hidden);
  const at::Tensor partials = context.fp32(partial_rows * hidden);
  auto* token_losses = static_cast<double*>(losses.data_ptr());
  for (int64_t begin = 0; begin < tokens; begin += chunk) {
    const int64_t count = std::min(chunk, tokens - begin);
    const uint16_t* x = hidden_in + begin * hidden;
    rms_norm(x, call.norm_weights, eps, count, hidden, fp32_data(rstd), bf16_data(normed), context.stream);
    context.multiply({.rows = count,
                      .columns = vocabulary,
                      .inner = hidden,
                      .a = {.data = bf16_data(normed), .stride = hidden},
                      .b = {.data = call.vocabulary, .stride = hidden, .transposed = true},
                      .out = bf16_data(logits),
                      .out_stride = stride});
    cross_entropy(bf16_data(logits), call.batch.targets + begin, count, vocabulary, stride, token_losses + begin,
                  context.stream);
    matrix_sum.add(bf16_data(logits), stride, bf16_data(normed), count, begin == 0);
    context.multiply({.rows = count,
                      .columns = hidden,
                      .inner = vocabulary,
                      .a = {.data = bf16_data(logits), .stride = stride},
                      .b = {.data = call.vocabulary, .stride = hidden},
                      .out = bf16_data(slope),
                      .out_stride = hidden});
    rms_norm_backward(x, call.norm_weights, fp32_data(rstd), bf16_data(slope), count, hidden,
                      hidden_gradient + begin * hidden, /*add=*/false, fp32_data(partials), /*continued=*/begin > 0,
                      context.stream);
  }
  matrix_sum.finish();
  store_column_sums(fp32_data(partials), partial_rows, hidden, hidden, call.norm_gradients.at(call.norm_offset),
                    context.stream);
  sum_losses(token_losses, tokens, loss_sum, context.stream);
}

}  // namespace slidedp::nn
