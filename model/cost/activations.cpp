#include "model/cost/activations.h"

#include <algorithm>

namespace slidedp {
namespace {

constexpr int64_t kAlignBytes = 64;
constexpr int64_t kHeadBlockBytes = int64_t{16} << 20;

// Hands out 64-byte aligned ranges one after another.
struct Offsets {
  int64_t end = 0;
  int64_t take(int64_t bytes) {
    const int64_t begin = end;
    end += round_up(bytes, kAlignBytes);
    return begin;
  }
};

// Sizes in fp32 elements of what the CPU backend allocates; see runtime/nn.
struct Sizes {
  int64_t hidden, intermediate, queries, keys;
  int64_t tokens, longest;  // of a micro-batch; of one document (at most a row)
  explicit Sizes(const ModelSpec& model, const Plan& plan)
      : hidden(model.hidden),
        intermediate(model.intermediate),
        queries(model.heads * model.head_dim),
        keys(model.kv_heads * model.head_dim),
        tokens(plan.micro_batch_tokens()),
        longest(plan.seq) {}
  int64_t qkv_matrix() const { return (queries + 2 * keys) * hidden; }
  int64_t o_matrix() const { return hidden * queries; }
  int64_t gate_up_matrix() const { return 2 * intermediate * hidden; }
  int64_t down_matrix() const { return hidden * intermediate; }
};

// ATen's flash attention on CPU: query and key tile by sequence length, one scratch buffer a thread. Source:
// aten/src/ATen/native/cpu/FlashAttentionKernel.cpp (flash_attention_kernel_impl, cpu_flash_attention[_backward]).
struct AttentionTile {
  int64_t queries, keys;
};
AttentionTile attention_tile(int64_t length) {
  const int64_t queries = length >= 768 ? 256 : length >= 192 ? 64 : 32;
  return {std::min(queries, length), std::min<int64_t>(512, length)};
}

// Largest number of query rows in a tile over documents of up to `longest` tokens is that of the longest document.
int64_t attention_forward_elements(const ModelSpec& model, const Plan& plan, const Sizes& s) {
  const AttentionTile tile = attention_tile(s.longest);
  const int64_t scratch = tile.queries * (tile.keys + 2 + model.head_dim);  // scores, row max, row sum, output
  return s.longest * s.queries                                              // output of one document
         + s.longest * model.heads                                          // its log-sum-exp
         + plan.threads.compute_per_rank * scratch;
}

int64_t attention_backward_elements(const ModelSpec& model, const Plan& plan, const Sizes& s) {
  const AttentionTile tile = attention_tile(s.longest);
  const int64_t copies = model.kv_heads > 1 ? 1 : 0;  // of the output gradient: the kernel wants it dense by KV head
  const int64_t scratch = 2 * tile.queries * tile.keys + tile.queries;  // scores, their gradient, row sums
  return (3 + copies) * s.longest * s.queries  // gradients of q and of k, v per query head, one document
         + plan.threads.compute_per_rank * scratch;
}

// What lies in the saved area of other layers. Backward's gradients of these tensors take the same place as the
// tensors, saved or not.
struct NotSaved {
  int64_t activation = 0;      // silu(gate) * up: only keep saves it
  int64_t normed = 0;          // a block's normed input and its 1/rms: selective does not save them
  int64_t forward_heads = 0;   // rotated queries and keys (without QK-norm a copy of qkv) and QK-norm's 1/rms
  int64_t backward_heads = 0;  // the same; without QK-norm backward rotates qkv itself
  NotSaved(const ModelSpec& model, const Plan& plan, const Sizes& s) {
    if (!all_keep(plan)) activation = s.tokens * s.intermediate;
    if (!some_selective(plan)) return;
    normed = s.tokens * s.hidden + s.tokens;
    backward_heads = model.qk_norm ? s.tokens * (s.queries + s.keys + model.heads + model.kv_heads) : 0;
    forward_heads = model.qk_norm ? backward_heads : s.tokens * (s.queries + 2 * s.keys);
  }
};

int64_t layer_elements(const ModelSpec& model, const Plan& plan, const Sizes& s) {
  const NotSaved not_saved(model, plan, s);
  // Forward, one block after another: the normed input or activation of a block and its matrix in fp32. Backward needs
  // the same pairs; a bf16 gradient slot needs an fp32 matrix of the same size instead of the weights, never both.
  return std::max({not_saved.normed + s.qkv_matrix(),                                     //
                   not_saved.forward_heads + attention_forward_elements(model, plan, s),  //
                   s.o_matrix(),                                                          //
                   not_saved.normed + s.gate_up_matrix(),                                 //
                   not_saved.activation + s.down_matrix(),                                //
                   not_saved.backward_heads + attention_backward_elements(model, plan, s)});
}

int64_t head_elements(const ModelSpec& model, const Plan& plan, const Sizes& s) {
  const int64_t chunk = std::min(plan.head_chunk_tokens, s.tokens);
  const int64_t block = head_block_rows(model) * s.hidden;
  int64_t elements = chunk * model.vocabulary  // logits, then their gradient
                     + 2 * chunk * s.hidden    // normed hidden states and their gradient
                     + block;                  // rows of the matrix in fp32
  // A bf16 slot cannot take one rounded sum per token chunk: the matrix gradient is summed in fp32 first.
  if (plan.accumulator == DType::bf16) elements += model.vocabulary * s.hidden;
  return elements;
}

}  // namespace

SavedLayout saved_layout(const ModelSpec& model, int64_t tokens, DType compute, ActivationPolicy policy) {
  const bool all = policy != ActivationPolicy::selective;
  const int64_t element = size_of(compute);
  const int64_t queries = model.heads * model.head_dim, keys = model.kv_heads * model.head_dim;
  Offsets offsets;
  SavedLayout layout;
  const auto take_norm = [&](int64_t& rstd, int64_t& normed) {
    rstd = offsets.take(tokens * 4);
    normed = offsets.take(tokens * model.hidden * element);
  };
  if (all) take_norm(layout.input_rstd, layout.normed_input);
  layout.qkv = offsets.take(tokens * (queries + 2 * keys) * element);
  if (all && !model.qk_norm) layout.qk_rotated = layout.qkv;
  if (all && model.qk_norm) {
    layout.qk_rstd = offsets.take(tokens * (model.heads + model.kv_heads) * 4);
    layout.qk_rotated = offsets.take(tokens * (queries + keys) * element);
  }
  layout.attention = offsets.take(tokens * queries * element);
  layout.log_sum_exp = offsets.take(tokens * model.heads * 4);
  layout.residual = offsets.take(tokens * model.hidden * element);
  if (all) take_norm(layout.residual_rstd, layout.normed_residual);
  layout.gate_up = offsets.take(tokens * std::max(2 * model.intermediate, queries) * element);
  if (policy == ActivationPolicy::keep) layout.activation = offsets.take(tokens * model.intermediate * element);
  layout.bytes = offsets.end;
  return layout;
}

int64_t head_block_rows(const ModelSpec& model) {
  const int64_t rows = kHeadBlockBytes / (model.hidden * 4) / kBlockElements * kBlockElements;
  return std::min(std::max(rows, kBlockElements), model.vocabulary);
}

int64_t temporary_bytes(const ModelSpec& model, const Plan& plan) {
  if (plan.backend == "cuda") return cuda_temporary_bytes(model, plan);
  const Sizes sizes(model, plan);
  const int64_t rope_table = plan.seq * model.head_dim;  // cos and sin of half a head, for every position; kept
  return 4 * (rope_table + std::max(layer_elements(model, plan, sizes), head_elements(model, plan, sizes)));
}

}  // namespace slidedp
