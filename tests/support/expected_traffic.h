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

// The others are wanted once a wave, a tied matrix twice (with touched rows, the whole of it once: those of the lookup
// are not counted here). A final norm alone in its slot class, or a matrix that is kept, stays over all waves.
inline int64_t other_deliveries(const ModelLayout& layout, const Plan& plan, int unit) {
  const bool touched = plan.vocabulary_rows == VocabularyRows::touched;
  if (!layout.tied) return unit == 0 && touched ? 0 : plan.waves;
  if (unit > 0 || plan.vocabulary_kept) return 1;
  return (touched ? 1 : 2) * plan.waves;
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

// The embedding with touched rows: `touched` elements in the rows of all waves together. Delivered are those, and the
// whole matrix for a tied head; landed are those, and the whole of the head's gradient. The rest holds if all waves
// touch as many.
inline Traffic touched_embedding_traffic(const ModelLayout& layout, const Plan& plan, int64_t touched) {
  const int64_t elements = touched / plan.waves;
  const int64_t all = layout.embedding().elements, part = unit_traffic(plan, 1, 0, 1).landing / plan.waves;
  const int64_t ranks = plan.delivery == Delivery::replicated ? plan.ranks : 1;
  const bool eager = plan.update == UpdatePolicy::eager;
  const int64_t passes = plan.update == UpdatePolicy::split ? 2 : 1;
  const int64_t state = plan.update == UpdatePolicy::split ? 32 : 24;
  const int64_t head = layout.tied ? part : 0;
  Traffic traffic;
  traffic.delivery = 2 * ranks * (touched + all * other_deliveries(layout, plan, 0));
  traffic.landing = plan.waves * all * head + touched * part;
  if (plan.waves == 1) {
    traffic.norm = eager ? 0 : all * head + elements * part;
    traffic.update = all * state + passes * (all * head + elements * part);
    return traffic;
  }
  // Every wave's head gradient is added by itself, the first one overwrites; without one the rows that the first wave
  // does not touch are zeroed and the others overwritten. Then a wave's lookup is added to its rows.
  const int64_t lookups = plan.waves - 1;
  traffic.accumulate = layout.tied ? all * (plan.waves * (part + 8) - 4) + lookups * elements * (part + 8)
                                   : all * 4 + elements * (lookups * (part + 8) - 8);
  traffic.norm = eager ? 0 : (all - elements) * 4 + elements * (part + 8);
  traffic.update = all * (state + passes * 4) + (eager ? elements * part : 0);
  return traffic;
}

// `touched`: elements in the rows that the waves' lookups touch, summed over waves; plans without touched rows do not
// depend on it.
inline Traffic step_traffic(const ModelLayout& layout, const Plan& plan, int64_t touched) {
  Traffic total;
  for (const UnitLayout& unit : layout.units) {
    if (unit.kind == UnitKind::layer) continue;
    if (unit.kind == UnitKind::embedding && plan.vocabulary_rows == VocabularyRows::touched) {
      total += touched_embedding_traffic(layout, plan, touched);
      continue;
    }
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
