// silu(gate) * up and its backward. gate_up: bf16 [tokens, 2 * width], gate then up. Memory-bound: forward reads 2 and
// writes 1, backward reads 3 and writes 2 (3 with the activation) times tokens * width * 2 bytes.
#pragma once

#include "runtime/nn/kernels/launch.h"

namespace slidedp::nn {

void swiglu(const uint16_t* gate_up, int64_t tokens, int64_t width, uint16_t* out, cudaStream_t stream);
// gradient: of the activation; if `form_activation`, out = the activation (the bits of swiglu()). gate_up: out =
// gradients of gate and up.
void swiglu_backward(uint16_t* gate_up, int64_t tokens, int64_t width, uint16_t* gradient, bool form_activation,
                     cudaStream_t stream);

}  // namespace slidedp::nn
