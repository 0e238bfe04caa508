// Final norm, LM head and cross-entropy on the GPU, forward and backward in one call.
#pragma once

#include <cstdint>

#include "model/spec/model_spec.h"
#include "runtime/nn/compute.h"
#include "runtime/nn/cuda/context.h"

namespace slidedp::nn {

struct CudaHeadCall {
  const ModelSpec& model;
  const MicroBatch& batch;
  int64_t chunk_tokens;          // logits of so many tokens exist at once
  const uint16_t* norm_weights;  // [hidden]
  const uint16_t* vocabulary;    // [vocabulary, hidden]
  CudaGradientSlot norm_gradients;
  int64_t norm_offset;  // elements, in norm_gradients
  CudaGradientSlot vocabulary_gradients;
  int64_t vocabulary_offset;
};

// Writes hidden_gradient [tokens, hidden] (may be hidden_in), both weight gradients and the sum of the losses.
void cuda_head(const CudaContext& context, const CudaHeadCall& call, const uint16_t* hidden_in,
               uint16_t* hidden_gradient, double* loss_sum);

}  // namespace slidedp::nn
