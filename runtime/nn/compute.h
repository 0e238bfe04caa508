// The math of one rank's compute lane. Plain pointers, so that no caller sees torch. Every function runs inside
// Device::launch on the compute stream and touches device memory only.
//
// Shapes: tokens = rows * seq of one micro-batch. Hidden states are [tokens, hidden] in the plan's compute type.
// Weights are a unit's flat bf16 vector, gradients a unit's flat vector of the plan's accumulator type, both laid out
// by UnitLayout. Gradients are sums over target tokens (never means). `first` overwrites the whole gradient range of
// the unit's, or of the layer block's, tensors and zeroes its gaps; otherwise gradients are added. Deterministic: same
// inputs and shapes give the same bits, for any thread count and address. Thread safety: one object a rank, used from
// its compute stream; only cast() may run at the same time, on the comm stream.
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "model/base/types.h"
#include "model/spec/layout.h"
#include "model/spec/plan.h"

namespace slidedp {

// One micro-batch's tokens. `ids`, `targets`, `positions` are device memory, [rows * seq]; targets[t] is the token that
// position t must predict, or -100. `document_starts` is host memory: offsets in [0, tokens) at which documents (and
// rows) start, ascending, first 0; attention stays inside a document.
struct MicroBatch {
  int64_t rows = 0, seq = 0;
  const int32_t* ids = nullptr;
  const int32_t* targets = nullptr;
  const int32_t* positions = nullptr;
  std::span<const int32_t> document_starts;
  int64_t tokens() const { return rows * seq; }
};

class Compute {
 public:
  virtual ~Compute() = default;

  // The embedding's matrix, or some of its rows: then ids count among those.
  // hidden_out[t] = weights[ids[t]].
  virtual void embedding_forward(const void* weights, const MicroBatch&, void* hidden_out) = 0;
  // gradients[ids[t]] += hidden_gradient[t], in token order. `first`: all `rows` rows are overwritten, with zero where
  // no token is; what follows them stays.
  virtual void embedding_backward(const MicroBatch&, const void* hidden_gradient, void* gradients, int64_t rows,
                                  bool first) = 0;

  // One block of a layer (not `whole`). Reads and writes the block's share of weights, gradients and `saved`
  // (SavedLayout says which) and no more; all pointers are to the beginning of the whole. The attention block reads
  // hidden_in, the MLP block writes hidden_out, which may be null (recompute: only `saved` is wanted).
  virtual void block_forward(LayerBlock block, int layer, const void* weights, const MicroBatch&, const void* hidden_in,
                             void* saved, void* hidden_out) = 0;
  // The MLP block comes first. hidden_gradient: in = gradient of the block's output, out = gradient of its input, in
  // place. May overwrite the block's share of saved; attention's also takes the place of gate_up.
  virtual void block_backward(LayerBlock block, int layer, const void* weights, const MicroBatch&,
                              const void* hidden_in, void* saved, void* hidden_gradient, void* gradients,
                              bool first) = 0;
  // Both blocks of a layer, one after the other.
  void layer_forward(int layer, const void* weights, const MicroBatch& batch, const void* hidden_in, void* saved,
                     void* hidden_out) {
    block_forward(LayerBlock::attention, layer, weights, batch, hidden_in, saved, nullptr);
    block_forward(LayerBlock::mlp, layer, weights, batch, nullptr, saved, hidden_out);
  }
  void layer_backward(int layer, const void* weights, const MicroBatch& batch, const void* hidden_in, void* saved,
                      void* hidden_gradient, void* gradients, bool first) {
    block_backward(LayerBlock::mlp, layer, weights, batch, nullptr, saved, hidden_gradient, gradients, first);
    block_backward(LayerBlock::attention, layer, weights, batch, hidden_in, saved, hidden_gradient, gradients, first);
  }

  // Final norm, LM head and cross-entropy, forward and backward, in chunks of plan.head_chunk_tokens.
  // Untied: `weights` and `gradients` hold the norm and the matrix; vocabulary pointers are null.
  // Tied: `weights`, `gradients` hold the norm; `vocabulary` is the embedding unit's weights, vocabulary_gradients its
  // gradient slot (the head's share only).
  // loss_sum (device, double) = sum over target tokens of -log p(target), in a fixed order.
  virtual void head(const void* weights, const void* vocabulary, const MicroBatch&, const void* hidden_in,
                    void* hidden_gradient, void* gradients, void* vocabulary_gradients, bool first,
                    double* loss_sum) = 0;

  // Rounds to nearest even. from == to copies.
  virtual void cast(const void* from, DType from_type, void* to, DType to_type, int64_t elements) = 0;
};

}  // namespace slidedp
