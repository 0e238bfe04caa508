// The CPU backend's compute: decoder math in fp32, matrix products and attention by ATen, the rest by plain loops. The
// permanent reference for every other backend. Plain header: no torch types.
#pragma once

#include <memory>

#include "model/spec/layout.h"
#include "model/spec/model_spec.h"
#include "model/spec/plan.h"
#include "runtime/nn/compute.h"

namespace slidedp {

// One object a rank. plan.compute must be fp32. Uses plan.threads.compute_per_rank intra-op threads, whichever thread
// calls it; installs the counting allocator (counting_allocator.h).
std::unique_ptr<Compute> make_aten_compute(const ModelSpec& model, const ModelLayout& layout, const Plan& plan);

}  // namespace slidedp
