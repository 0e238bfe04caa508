// In which order units are visited in a step, and which slot holds which weights when.
#pragma once

#include <vector>

#include "model/graph/step_graph.h"

namespace slidedp {

inline constexpr int kSlotClasses = 4;

// Weights of a unit in a slot during a visit. `deliver`: they must be copied to the device for this visit; otherwise
// the slot still holds them from an earlier visit of this step.
struct Residency {
  int unit = -1;
  SlotClass slot_class{};
  int slot = -1;
  bool deliver = false;
  bool touched = false;  // only the rows that the wave's tokens touch
};

// One unit passing through the compute lane: forward (embedding, layers), head (forward and backward of the loss) or
// backward (layers, then the embedding, which needs no weights).
struct Visit {
  int unit = -1;
  int wave = 0;
  bool backward = false;
  std::vector<Residency> weights;
};

// Weight slots of a class under this plan. More than the units of the class is never useful. With touched rows the
// lookup's rows and the head's matrix, one after the other, share a vocabulary slot, unless the head's matrix is to
// stay (vocabulary_kept) or there is another slot for it anyway (vocabulary_slots of an untied model).
int weight_slots(const ModelLayout& layout, const Plan& plan, SlotClass slot_class);

// Visits of a step, wave after wave, with slots assigned so that the unit needed furthest in the future makes room, and
// among units that are not needed any more the one that has been idle longest (its slot is free first across the step
// boundary). Weights never stay from one step to the next: the update changes them.
std::vector<Visit> plan_visits(const ModelLayout& layout, const Plan& plan);

}  // namespace slidedp
