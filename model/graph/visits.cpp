#include "model/graph/visits.h"

#include <algorithm>
#include <array>
#include <limits>

namespace slidedp {
namespace {

bool rows_have_a_slot(const ModelLayout& layout, const Plan& plan) {
  if (plan.vocabulary_rows == VocabularyRows::all) return false;
  return layout.tied ? plan.vocabulary_kept : plan.vocabulary_slots > 1;
}

Residency lookup_weights(const ModelLayout& layout, const Plan& plan) {
  const SlotClass slot_class = rows_have_a_slot(layout, plan) ? SlotClass::touched_rows : SlotClass::vocabulary;
  return {0, slot_class, -1, true, plan.vocabulary_rows == VocabularyRows::touched};
}

void append_wave(std::vector<Visit>& visits, const ModelLayout& layout, const Plan& plan, int wave) {
  const auto needs = [&](int unit) {
    return Residency{unit, layout.units[static_cast<size_t>(unit)].slot_class, -1, true, false};
  };
  const int head = layout.layers + 1;
  visits.push_back({0, wave, false, {lookup_weights(layout, plan)}});
  for (int unit = 1; unit <= layout.layers; ++unit) visits.push_back({unit, wave, false, {needs(unit)}});
  Visit last{head, wave, false, {needs(head)}};
  if (layout.tied) last.weights.push_back(needs(0));
  visits.push_back(last);
  for (int unit = layout.layers; unit >= 1; --unit) visits.push_back({unit, wave, true, {needs(unit)}});
  visits.push_back({0, wave, true, {}});
}

// What the slots of one class hold while the visits are walked.
struct Slot {
  int unit = -1;
  bool touched = false;  // rows of it only
  int last_use = -1;     // index of the visit, over both walks
};

// Touched rows are different ones in every wave.
bool holds(const Slot& slot, const Residency& weights) {
  return slot.unit == weights.unit && !slot.touched && !weights.touched;
}

int next_use(const std::vector<Visit>& visits, size_t after, const Slot& slot) {
  for (size_t i = after + 1; i < visits.size(); ++i) {
    for (const Residency& weights : visits[i].weights) {
      if (holds(slot, weights)) return static_cast<int>(i);
    }
  }
  return std::numeric_limits<int>::max();
}

int choose_slot(const std::vector<Visit>& visits, size_t visit, const std::vector<Slot>& slots) {
  int best = 0;
  std::pair<int, int> best_key{-1, 0};
  for (size_t slot = 0; slot < slots.size(); ++slot) {
    const int use = slots[slot].unit < 0 ? std::numeric_limits<int>::max() : next_use(visits, visit, slots[slot]);
    const std::pair<int, int> key{use, -slots[slot].last_use};
    if (slot == 0 || key > best_key) {
      best = static_cast<int>(slot);
      best_key = key;
    }
  }
  return best;
}

}  // namespace

int weight_slots(const ModelLayout& layout, const Plan& plan, SlotClass slot_class) {
  switch (slot_class) {
    case SlotClass::layer:
      return std::min(plan.layer_slots, layout.layers);
    case SlotClass::vocabulary:
      if (plan.vocabulary_rows == VocabularyRows::touched) return 1;
      return std::min(plan.vocabulary_slots, layout.tied ? 1 : 2);
    case SlotClass::final_norm:
      return layout.tied ? 1 : 0;
    case SlotClass::touched_rows:
      return rows_have_a_slot(layout, plan) ? 1 : 0;
  }
  return 0;
}

std::vector<Visit> plan_visits(const ModelLayout& layout, const Plan& plan) {
  std::vector<Visit> visits;
  for (int wave = 0; wave < plan.waves; ++wave) append_wave(visits, layout, plan, wave);
  std::array<std::vector<Slot>, kSlotClasses> slots;
  for (int c = 0; c < kSlotClasses; ++c) {
    slots[static_cast<size_t>(c)].resize(static_cast<size_t>(weight_slots(layout, plan, static_cast<SlotClass>(c))));
  }
  // The second walk starts with the slots as the previous step left them, which is what steady state looks like.
  for (int walk = 0; walk < 2; ++walk) {
    for (auto& of_class : slots) {
      for (Slot& slot : of_class) slot.unit = -1;
    }
    for (size_t i = 0; i < visits.size(); ++i) {
      for (Residency& weights : visits[i].weights) {
        auto& of_class = slots[static_cast<size_t>(weights.slot_class)];
        const auto held =
            std::find_if(of_class.begin(), of_class.end(), [&](const Slot& slot) { return holds(slot, weights); });
        const bool again = weights.slot_class == SlotClass::vocabulary && !plan.vocabulary_kept;
        weights.deliver = held == of_class.end() || again;
        weights.slot =
            held != of_class.end() ? static_cast<int>(held - of_class.begin()) : choose_slot(visits, i, of_class);
        Slot& slot = of_class[static_cast<size_t>(weights.slot)];
        slot.unit = weights.unit;
        slot.touched = weights.touched;
        slot.last_use = walk * static_cast<int>(visits.size()) + static_cast<int>(i);
      }
    }
  }
  return visits;
}

}  // namespace slidedp
