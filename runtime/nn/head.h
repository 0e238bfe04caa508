// Final norm, LM head and cross-entropy, forward and backward in one call.
#pragma once

#include <cstdint>

#include "model/spec/layout.h"
#include "model/spec/model_spec.h"
#include "runtime/nn/compute.h"
#include "runtime/nn/gradient_slot.h"

namespace slidedp::nn {

struct HeadCall {
  const ModelSpec& model;
  const MicroBatch& batch;
  int64_t chunk_tokens;          // logits of so many tokens exist at once
  const uint16_t* norm_weights;  // bf16 [hidden]
  const uint16_t* vocabulary;    // bf16 [vocabulary, hidden]
  GradientSlot norm_gradients;
  int64_t norm_offset;  // elements, in norm_gradients
  GradientSlot vocabulary_gradients;
  int64_t vocabulary_offset;
};

// Writes hidden_gradient [tokens, hidden] and both weight gradients; returns the sum of the losses.
double head_forward_backward(const HeadCall& call, const float* hidden_in, float* hidden_gradient);

}  // namespace slidedp::nn
