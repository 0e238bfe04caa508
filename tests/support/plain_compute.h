// A decoder in plain loops, without torch: small models only. Sanitizers see every read and write of it, and it is a
// second opinion on the CPU backend's math.
#pragma once

#include <memory>

#include "model/spec/layout.h"
#include "model/spec/model_spec.h"
#include "model/spec/plan.h"
#include "runtime/device/backends.h"
#include "runtime/nn/compute.h"

namespace slidedp::testing {

// Models without biases and QK-norm, with standard RoPE; fp32 activations. Reads all weights and writes all gradients
// of a unit, or of a layer's block, in each call, as any real compute does.
std::unique_ptr<Compute> make_plain_compute(const ModelSpec& model, const ModelLayout& layout, const Plan& plan);

// CPU devices and the local collective with plain compute: everything that SlideDP runs on CPU ranks but ATen.
Backend make_plain_backend(const ModelSpec& model, const ModelLayout& layout, const Plan& plan);

// A model that plain compute can run and the tiny trainings' data fit: 4 layers, two query heads on one KV head.
// Touched rows need a hidden size of whole blocks; the small one is quicker.
inline constexpr int64_t kSmallHidden = 16;
ModelSpec plain_model(bool tied, int64_t hidden = kBlockElements);

}  // namespace slidedp::testing
