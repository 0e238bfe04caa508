#include "model/cost/flops.h"

#include "model/cost/layer_work.h"

namespace slidedp {

double layer_forward_flops(const ModelSpec& model, int64_t rows, int64_t seq, LayerBlock block) {
  return layer_forward_work(model, rows, seq, DType::bf16, block).flops();
}

double formed_again_bytes(const ModelSpec& model, int64_t tokens, DType compute, ActivationPolicy policy,
                          LayerBlock block) {
  if (policy == ActivationPolicy::keep) return 0;
  int64_t attention = 0, mlp = model.intermediate;
  if (policy == ActivationPolicy::selective) {
    attention = 2 * model.hidden + 2 * (model.heads + model.kv_heads) * model.head_dim;
    mlp += 2 * model.hidden;
  }
  const int64_t elements = (block == LayerBlock::mlp ? 0 : attention) + (block == LayerBlock::attention ? 0 : mlp);
  return static_cast<double>(tokens) * static_cast<double>(elements) * static_cast<double>(size_of(compute));
}

double head_flops(const ModelSpec& model, int64_t tokens) {
  return 3.0 * 2.0 * static_cast<double>(tokens) * static_cast<double>(model.vocabulary) *
         static_cast<double>(model.hidden);
}

double embedding_forward_elements(const ModelSpec& model, int64_t tokens) {
  return static_cast<double>(tokens) * static_cast<double>(model.hidden);
}

double embedding_backward_elements(const ModelSpec& model, int64_t tokens, bool first) {
  const double rows = static_cast<double>(tokens) + (first ? static_cast<double>(model.vocabulary) : 0.0);
  return rows * static_cast<double>(model.hidden);
}

}  // namespace slidedp
