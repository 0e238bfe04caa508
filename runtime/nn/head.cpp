#include "runtime/nn/head.h"

#include <algorithm>
#include <vector>

#include "model/cost/activations.h"
#include "runtime/nn/kernels.h"
#include "runtime/nn/tensors.h"

namespace slidedp::nn {
namespace {

// The vocabulary matrix goes through fp32 in blocks of rows, once for the logits and once for the backward of every
// token chunk, so that never more than one block of it exists in fp32.
template <typename Use>
void for_each_block(const HeadCall& call, const Use& use) {
  const int64_t vocabulary = call.model.vocabulary, hidden = call.model.hidden;
  const int64_t block = head_block_rows(call.model);
  for (int64_t begin = 0; begin < vocabulary; begin += block) {
    const int64_t rows = std::min(block, vocabulary - begin);
    use(begin, rows, weights_as_fp32(call.vocabulary + begin * hidden, rows, hidden));
  }
}

}  // namespace

double head_forward_backward(const HeadCall& call, const float* hidden_in, float* hidden_gradient) {
  const int64_t tokens = call.batch.tokens(), hidden = call.model.hidden, vocabulary = call.model.vocabulary;
  MatrixGradient matrix_sum(call.vocabulary_gradients, call.vocabulary_offset, vocabulary, hidden);
  std::vector<double> norm_sums(static_cast<size_t>(hidden), 0.0);
  double loss = 0;
  for (int64_t begin = 0; begin < tokens; begin += call.chunk_tokens) {
    const int64_t count = std::min(call.chunk_tokens, tokens - begin);
    const ConstRows x = matrix_rows(hidden_in + begin * hidden, count, hidden);
    std::vector<float> rstd(static_cast<size_t>(count));
    const at::Tensor normed = matrix(count, hidden);
    rms_norm(x, call.norm_weights, call.model.rms_eps, rstd.data(),
             matrix_rows(normed.data_ptr<float>(), count, hidden));

    const at::Tensor logits = matrix(count, vocabulary);
    for_each_block(call, [&](int64_t row, int64_t rows, const at::Tensor& weights) {
      at::Tensor out = logits.narrow(1, row, rows);
      multiply(out, normed, weights.t(), /*add=*/false);
    });
    loss +=
        cross_entropy(logits.data_ptr<float>(), {call.batch.targets + begin, static_cast<size_t>(count)}, vocabulary);

    at::Tensor normed_gradient = matrix(count, hidden);
    const bool overwrite = call.vocabulary_gradients.first() && begin == 0;
    for_each_block(call, [&](int64_t row, int64_t rows, const at::Tensor& weights) {
      const at::Tensor gradient = logits.narrow(1, row, rows);
      multiply(normed_gradient, gradient, weights, /*add=*/row > 0);
      matrix_sum.add(row, rows, gradient, normed, overwrite);
    });
    const ConstRows gradient_rows = matrix_rows(normed_gradient.const_data_ptr<float>(), count, hidden);
    rms_norm_weight_sums(x, rstd.data(), gradient_rows, norm_sums);
    rms_norm_backward(x, call.norm_weights, rstd.data(), gradient_rows,
                      matrix_rows(hidden_gradient + begin * hidden, count, hidden), /*add=*/false);
  }
  matrix_sum.commit();
  call.norm_gradients.store(call.norm_offset, norm_sums);
  return loss;
}

}  // namespace slidedp::nn
