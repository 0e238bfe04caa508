// Causal attention inside documents, grouped KV heads. fp32, CPU.
#pragma once

#include <cstdint>
#include <span>

namespace slidedp::nn {

// One row a token; `stride` elements between tokens. Borrowed memory.
struct HeadMatrix {
  float* data = nullptr;
  int64_t stride = 0;
};

struct AttentionShape {
  int64_t heads = 0, kv_heads = 0, head_dim = 0, tokens = 0;
  std::span<const int32_t> document_starts;  // see MicroBatch
};

// out: [tokens, heads * head_dim]. log_sum_exp: heads * tokens, see SavedLayout.
void attention_forward(const AttentionShape& shape, HeadMatrix q, HeadMatrix k, HeadMatrix v, float* out,
                       float* log_sum_exp);
// q, k, v: in = the forward's operands, out = their gradients.
void attention_backward(const AttentionShape& shape, HeadMatrix q, HeadMatrix k, HeadMatrix v, const float* out,
                        const float* log_sum_exp, const float* out_gradient);

}  // namespace slidedp::nn
