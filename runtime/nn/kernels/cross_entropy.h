// Softmax cross-entropy over rows of bf16 logits, and the gradient in their place. Memory-bound: each row is read
// twice (the second time mostly from the L2 cache) and written once.
#pragma once

#include "runtime/nn/kernels/launch.h"

namespace slidedp::nn {

// logits [tokens, stride], of which `vocabulary` columns count; stride is a multiple of kVectorElements. in = logits,
// out = softmax - onehot (zero where the target is -100). losses[t] = -log p(target), 0 where the target is -100. A
// target outside the vocabulary gives NaN.
void cross_entropy(uint16_t* logits, const int32_t* targets, int64_t tokens, int64_t vocabulary, int64_t stride,
                   double* losses, cudaStream_t stream);
// *sum = the sum of the losses in a fixed order.
void sum_losses(const double* losses, int64_t tokens, double* sum, cudaStream_t stream);

}  // namespace slidedp::nn
