// AdamW on the host state, the gradient norm and the sum over waves, over ranges of a unit's flat vector. Same bits for
// any split of the range at multiples of kBlockElements, any thread, any alignment and any instruction set: no FMA
// but the one in the sums of squares, where it cannot show (see kernels.h).
#pragma once

#include <cstdint>
#include <span>

#include "model/base/types.h"

namespace slidedp {

// Gradient of a range: `sources` arrays of `type`, all of the range's length. Summed in fp32 in order inside a group of
// `group_size` sources; then the groups' sums are added in order. (Group: the ranks' landing buffers of one gradient;
// a tied matrix has two groups, head then lookup.)
//
// With an `accumulator` (what earlier waves left, see accumulate; of the range's length) the sum is
// ((accumulator + s0) + s1) + ... over all sources in order: groups make no difference, and there may be no source.
struct GradientSources {
  std::span<const void* const> sources;
  int group_size = 1;
  DType type = DType::bf16;
  const float* accumulator = nullptr;
};

// One step's scalars, computed once in double.
struct AdamScalars {
  float beta1 = 0, beta2 = 0, one_minus_beta1 = 0, one_minus_beta2 = 0, eps = 0;
  float step_size = 0;              // lr / (1 - beta1^t)
  float bias_correction2_sqrt = 0;  // sqrt(1 - beta2^t)
  float decay = 1;                  // 1 - lr * weight_decay, for tensors with decay
  float gradient_scale = 0;         // clip factor / target tokens of the global batch
  double clip_factor = 1;           // what gradient_scale contains of it, for the log
  bool skip = false;                // non-finite gradients (deferred): leave the state as it is
};

// g = scale * sum; m += (1-b1)(g - m); v = b2 v + (1-b2) g g; p = p * decay - step_size * m / (sqrt(v)/bc2 + eps).
// Source: torch.optim.AdamW (decoupled weight decay, Loshchilov & Hutter 2019).
// All spans have the same length; hi/lo hold the master. `decay` selects scalars.decay or 1. Part `weights` reads all
// four and writes hi and lo only; `moments` reads and writes m and v only.
void adam_update(std::span<uint16_t> hi, std::span<uint16_t> lo, std::span<float> m, std::span<float> v,
                 const GradientSources& gradient, const AdamScalars& scalars, bool decay,
                 UpdatePart part = UpdatePart::whole);

// Sums of squares of the unscaled summed gradient, one double per block of kBlockElements (the last may be shorter: the
// same as if zeros followed), blocks in element order. Inside a block: eight partial sums, the j-th of elements j,
// j + 8, ..., folded 4 apart, then 2, then 1. Returns false if any summed element is not finite.
bool block_square_sums(const GradientSources& gradient, int64_t elements, std::span<double> block_sums);

// Adds one wave: accumulator = ((accumulator + s0) + s1) + ... over all sources in order (groups make no difference),
// of the accumulator's length. `first` overwrites it with (s0 + s1) + .... `wave` has no accumulator of its own. Adam
// and the norm may take the last wave as sources beside the accumulator, or read only the accumulator after that wave
// has been added: same bits.
void accumulate(std::span<float> accumulator, const GradientSources& wave, bool first);

// accumulate and then block_square_sums of the accumulator, in one pass over memory.
bool accumulate_and_square(std::span<float> accumulator, const GradientSources& wave, bool first,
                           std::span<double> block_sums);

// Adds block sums in a fixed shape (groups of 4096 blocks, then the groups in order): independent of chunks
// and threads.
double combine_block_sums(std::span<const double> block_sums);

}  // namespace slidedp
