// Host DRAM bytes of one step in closed form, from the plan alone: what a step graph must reproduce.
#pragma once

#include <algorithm>
#include <cstdint>

#include "model/spec/layout.h"
#include "model/spec/model_spec.h"
#include "model/spec/plan.h"

namespace slidedp::testing {

// Bytes of one unit and step; of all units when summed.
struct Traffic {
  int64_t delivery = 0;    // read by h2d
  int64_t landing = 0;     // written by d2h
  int64_t accumulate = 0;  // read + written by host_accumulate
  int64_t norm = 0;        // read + written by norm (without its partial sums)
  int64_t update = 0;      // read + written by update, both passes of split
  bool operator==(const Traffic&) const = default;
  int64_t total() const { return delivery + landing + accumulate + norm + update; }
  Traffic& operator+=(const Traffic& other) {
    delivery += other.delivery;
    landing += other.landing;
    accumulate += other.accumulate;
    norm += other.norm;
    update += other.update;
    return *this;
  }
};

// How often all layers together are delivered in a step, in layers. Each wave passes them upwards and downwards; what
// the slots hold at a turn (in each wave, and between waves) is not delivered again.
inline int64_t layer_deliveries(const ModelLayout& layout, const Plan& plan) {
  const int64_t turns = 2 * plan.waves - 1;
  return int64_t{2} * plan.waves * layout.layers - turns * std::min(plan.layer_slots, layout.layers);
}

// The others are wanted once a wave, a tied matrix twice. A final norm alone in its slot class, or a matrix that is
// kept, stays over all waves.
inline int64_t other_deliveries(const ModelLayout& layout, const Plan& plan, int unit) {
  if (!layout.tied) return plan.waves;
  if (unit > 0 || plan.vocabulary_kept) return 1;
  return 2 * plan.waves;
}

// `deliveries` of a unit of `elements` parameters whose gradient comes in `groups` parts a wave.
inline Traffic unit_traffic(const Plan& plan, int64_t elements, int64_t deliveries, int64_t groups) {
  const int64_t landed = plan.wire == DType::bf16 ? 2 : 4;
  const int64_t sources = plan.reduction == Reduction::cpu ? plan.ranks : 1;
  const int64_t parts = plan.waves * groups, part = sources * landed;  // bytes a parameter
  const bool accumulated = plan.waves > 1, eager = plan.update == UpdatePolicy::eager;
  const int64_t passes = plan.update == UpdatePolicy::split ? 2 : 1;
  Traffic traffic;
  traffic.delivery = deliveries * 2 * (plan.delivery == Delivery::replicated ? plan.ranks : 1);
  traffic.landing = parts * part;
  // hi, lo, m, v are read and written once: 24. Split reads m and v in both passes.
  const int64_t state = plan.update == UpdatePolicy::split ? 32 : 24;
  if (!accumulated) {
    traffic.norm = eager ? 0 : parts * part;  // the sources once more, before the update may start
    traffic.update = state + passes * parts * part;
  } else {
    // All parts but the last are added by host_accumulate; the first one overwrites.
    traffic.accumulate = (parts - 1) * (part + 8) - 4;
    traffic.norm = eager ? 0 : part + 8;  // adds the last part
    traffic.update = state + passes * 4 + (eager ? part : 0);
  }
  for (int64_t* bytes : {&traffic.delivery, &traffic.landing, &traffic.accumulate, &traffic.norm, &traffic.update}) {
    *bytes *= elements;
  }
  return traffic;
}

inline Traffic step_traffic(const ModelLayout& layout, const Plan& plan) {
  Traffic total;
  for (const UnitLayout& unit : layout.units) {
    if (unit.kind == UnitKind::layer) continue;
    const int64_t groups = layout.tied && unit.kind == UnitKind::embedding ? 2 : 1;
    total += unit_traffic(plan, unit.elements, other_deliveries(layout, plan, unit.unit), groups);
  }
  // All layers have the same size.
  const int64_t elements = layout.units[1].elements;
  Traffic layers = unit_traffic(plan, elements * layout.layers, 0, 1);
  layers.delivery = unit_traffic(plan, elements, layer_deliveries(layout, plan), 1).delivery;
  total += layers;
  return total;
}

// Read by act_h2d, and as much again written by act_d2h, over all ranks: the input of every layer that offloads, for
// every token of the step.
inline int64_t offloaded_bytes(const ModelSpec& model, const Plan& plan) {
  const auto layers = std::ranges::count(plan.activation, ActivationPolicy::offload);
  return layers * plan.batch_rows() * plan.seq * model.hidden * size_of(plan.compute);
}

}  // namespace slidedp::testing
