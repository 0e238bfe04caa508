// What an update task does with one chunk: the step's scalars, AdamW over a range that may span tensors with and
// without weight decay, and the name of the tensor to blame for a non-finite gradient.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "model/spec/layout.h"
#include "model/spec/train_spec.h"
#include "runtime/host/cpu_adam.h"
#include "runtime/host/host_state.h"

namespace slidedp {

// The scalars of update number t (1 is the first). `gradient_norm_unscaled` is the square root of the sum of squares of
// the summed gradients; the mean gradient's norm is that over `target_tokens`. Clipping as torch's clip_grad_norm_:
// factor min(1, max_grad_norm / (norm + 1e-6)); max_grad_norm = 0 means none, and the norm may then be anything finite.
// A norm that is not finite sets `skip`.
AdamScalars make_scalars(const AdamSpec& adam, double max_grad_norm, double gradient_norm_unscaled,
                         int64_t target_tokens, int64_t t);

// The gradient of the elements from `offset` on. The result's pointers live in `moved`.
GradientSources advance(const GradientSources& gradient, int64_t offset, std::vector<const void*>& moved);

// AdamW on elements [begin, begin + elements) of a unit. `gradient` holds that range only: its arrays start at `begin`.
// Gaps between tensors (zero gradient, zero state) stay zero. With scalars.skip nothing changes, whatever the part.
void update_chunk(const UnitLayout& layout, UnitState state, int64_t begin, int64_t elements,
                  const GradientSources& gradient, const AdamScalars& scalars, UpdatePart part = UpdatePart::whole);

// Name of the first tensor in the range whose summed gradient has a non-finite element; empty if none has.
std::string first_nonfinite_tensor(const UnitLayout& layout, int64_t begin, int64_t elements,
                                   const GradientSources& gradient);

}  // namespace slidedp
