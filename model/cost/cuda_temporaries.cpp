// Temporaries of the CUDA backend (runtime/nn/cuda), term by term.
#include <algorithm>

#include "model/cost/activations.h"

namespace slidedp {
namespace {

constexpr int64_t kFlashTokensPerDocument = 128;  // rows that the flash backward pads every document by
constexpr int64_t kFewestFlashDocuments = 64;
// ATen's allocator asks the device for whole pieces of this size, takes tensors up to 1 MiB (scalars, document lists,
// 1/rms) from pieces of their own, and hands out a remainder of up to 1 MiB with the tensor before it.
constexpr int64_t kAllocatorPiece = int64_t{2} << 20;
constexpr int64_t kSmallTensorBytes = 4 * kAllocatorPiece;
constexpr int64_t kRemainderBytes = int64_t{8} << 20;  // of eight tensors, the most that live at once
// Attention's forward workspace in cuDNN.
constexpr int64_t kForwardWorkspaceBytes = int64_t{16} << 20;
constexpr int64_t kPartialRows = 264;                 // of sums of the QK-norm weights
constexpr int64_t kPartialBytes = int64_t{10} << 20;  // of a norm's: rows * width * 4, rows falling with the width
constexpr int64_t kScatterPiece = 64;                 // tokens that one block of the embedding's scatter adds up
constexpr int64_t kSortBytesPerToken = 32;

struct CudaSizes {
  int64_t tokens, hidden, intermediate, queries, keys, longest;
  bool selective, all_keep;
  CudaSizes(const ModelSpec& model, const Plan& plan)
      : tokens(plan.micro_batch_tokens()),
        hidden(model.hidden),
        intermediate(model.intermediate),
        queries(model.heads * model.head_dim),
        keys(model.kv_heads * model.head_dim),
        longest(plan.seq),
        selective(some_selective(plan)),
        all_keep(slidedp::all_keep(plan)) {}
};

// Rotated heads that are not saved and QK-norm's 1/rms. Without QK-norm backward rotates qkv itself.
int64_t rotated_bytes(const ModelSpec& model, const CudaSizes& s, bool forward) {
  if (!s.selective || (!model.qk_norm && !forward)) return 0;
  const int64_t width = model.qk_norm ? s.queries + s.keys : s.queries + 2 * s.keys;
  return s.tokens * width * 2 + (model.qk_norm ? s.tokens * (model.heads + model.kv_heads) * 4 : 0);
}

// The tiled attention, which --deterministic uses. Forward holds scores and probabilities of one tile, backward the
// gradients of both as well, dots of the outputs, and the sums of one document's key and value gradients.
int64_t tile_elements(const ModelSpec& model, const CudaSizes& s) {
  return model.kv_heads * std::min(kAttentionTileRows, s.longest) * round_up(s.longest, 8);
}

int64_t attention_forward_bytes(const ModelSpec& model, const CudaSizes& s) {
  const int64_t fused = s.tokens * s.queries * 2      // output
                        + s.tokens * model.heads * 4  // log-sum-exp
                        + kForwardWorkspaceBytes;
  return std::max(fused, tile_elements(model, s) * (4 + 2));
}

int64_t attention_backward_bytes(const ModelSpec& model, const CudaSizes& s) {
  const int64_t gradients = s.tokens * (s.queries + 2 * s.keys) * 2;  // of q, k and v
  // Flash rounds a head up to 32 elements, above 128 to 64.
  const int64_t padded_head = round_up(model.head_dim, model.head_dim <= 128 ? 32 : 64);
  const int64_t padded_tokens = s.tokens + kFlashTokensPerDocument * flash_documents(s.tokens);
  const int64_t expanded = model.heads != model.kv_heads ? 2 * s.tokens * s.queries * 2 : 0;
  const int64_t flash = padded_tokens * model.heads * padded_head * 4  // gradient of q in fp32
                        + padded_tokens * model.heads * 4              // row sums
                        + expanded;                                    // gradients of k and v, per query head
  const int64_t tiled = tile_elements(model, s) * (2 * 4 + 2 * 2)      // scores, probabilities, gradients of both
                        + s.tokens * model.heads * 4                   // dots
                        + 2 * s.longest * s.keys * 4;                  // sums
  // Documents in several groups: the gradients of one group and of all.
  return gradients + std::max(gradients + flash, tiled);
}

int64_t layer_bytes(const ModelSpec& model, const CudaSizes& s) {
  // What is not saved, then (all but 1/rms) its gradient: a block's normed input and 1/rms; silu(gate) * up.
  const int64_t normed = s.selective ? s.tokens * s.hidden * 2 + s.tokens * 4 : 0;
  const int64_t activation = s.all_keep ? 0 : s.tokens * s.intermediate * 2;
  const int64_t biases = 128 * std::max({s.queries + 2 * s.keys, 2 * s.intermediate, s.hidden}) * 4;
  return std::max(
      {normed + kPartialBytes + (model.qkv_bias || model.o_bias || model.mlp_bias ? biases : 0),
       rotated_bytes(model, s, true) + attention_forward_bytes(model, s), activation + (model.mlp_bias ? biases : 0),
       rotated_bytes(model, s, false) + attention_backward_bytes(model, s) + kPartialRows * 2 * model.head_dim * 4});
}

int64_t head_bytes(const ModelSpec& model, const Plan& plan, const CudaSizes& s) {
  const int64_t chunk = std::min(plan.head_chunk_tokens, s.tokens);
  const bool fp32_sum = plan.accumulator == DType::bf16 && chunk < s.tokens;
  return chunk * round_up(model.vocabulary, 8) * 2            // logits, then their gradient
         + 2 * chunk * s.hidden * 2                           // normed hidden states and their gradient
         + chunk * 4 + s.tokens * 8                           // 1/rms, losses
         + kPartialBytes                                      //
         + (fp32_sum ? model.vocabulary * s.hidden * 4 : 0);  // gradient of the matrix
}

int64_t embedding_bytes(const CudaSizes& s) {
  return s.tokens * (3 * 4 + kSortBytesPerToken)                  // ids and tokens, sorted; the sort's own
         + 2 * ceil_div(s.tokens, kScatterPiece) * s.hidden * 4;  // sums of runs across pieces
}

}  // namespace

int64_t flash_documents(int64_t tokens) { return std::max(kFewestFlashDocuments, tokens / kFlashTokensPerDocument); }

int64_t cuda_rope_table_bytes(const ModelSpec& model, const Plan& plan) { return plan.seq * model.head_dim * 4; }

int64_t cuda_temporary_block_bytes(const ModelSpec& model, const Plan& plan) {
  const CudaSizes sizes(model, plan);
  return round_up(
      kRemainderBytes + std::max({layer_bytes(model, sizes), head_bytes(model, plan, sizes), embedding_bytes(sizes)}),
      kAllocatorPiece);
}

int64_t cuda_temporary_bytes(const ModelSpec& model, const Plan& plan) {
  const int64_t kept = kCudaProductWorkspaceBytes + cuda_rope_table_bytes(model, plan);
  return round_up(kept, kAllocatorPiece) + kSmallTensorBytes + cuda_temporary_block_bytes(model, plan);
}

}  // namespace slidedp
