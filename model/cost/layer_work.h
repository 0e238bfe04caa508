// What one decoder layer's kernels do, from shapes alone, and the time that a machine's rates give it.
#pragma once

#include <cstdint>

#include "model/base/types.h"
#include "model/spec/hardware_spec.h"
#include "model/spec/model_spec.h"

namespace slidedp {

// Multiply-add counts as 2 flops.
struct LayerWork {
  double product_flops = 0;    // matrix products
  double attention_flops = 0;  // causal: half of the square
  // Read and written on the device by everything else: norms, rotation, SwiGLU, residuals, and the layer's weights and
  // weight gradients, which do not grow with tokens.
  double bytes = 0;
  double flops() const { return product_flops + attention_flops; }
};

// rows x seq tokens, one document a row. Activations have the compute type, weights are bf16.
// Those of the two blocks add up to that of the whole.
LayerWork layer_forward_work(const ModelSpec& model, int64_t rows, int64_t seq, DType compute,
                             LayerBlock block = LayerBlock::whole);
// `first`: weight gradients are overwritten, else added to.
LayerWork layer_backward_work(const ModelSpec& model, int64_t rows, int64_t seq, DType compute, DType accumulator,
                              bool first, LayerBlock block = LayerBlock::whole);

// See LayerRate. `share`: how much of the layer's fixed time is in the work.
double layer_seconds(const LayerRate& rate, const LayerWork& work, double share = 1);
// See KernelRate.
double kernel_seconds(const KernelRate& rate, double flops);

}  // namespace slidedp
