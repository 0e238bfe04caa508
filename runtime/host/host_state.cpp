#include "runtime/host/host_state.h"

#include <algorithm>
#include <bit>
#include <string>

#include "model/base/format.h"

namespace slidedp {

HiLo split_master(float master) {
  const auto bits = std::bit_cast<uint32_t>(master);
  // The sum may wrap (NaNs with all bits set); join_master's subtraction wraps back.
  return {static_cast<uint16_t>((bits + 0x8000u) >> 16), static_cast<uint16_t>(bits)};
}

float join_master(HiLo parts) {
  const uint32_t low = parts.lo;
  return std::bit_cast<float>(((static_cast<uint32_t>(parts.hi) - (low >> 15)) << 16) | low);
}

namespace {

int64_t state_bytes(int64_t elements) {
  return 2 * Arena::footprint(elements * 2) + 2 * Arena::footprint(elements * 4);
}

// Each unit goes to the node that holds least so far, the largest unit first.
std::vector<int> place_units(const ModelLayout& layout, size_t nodes) {
  std::vector<const UnitLayout*> by_size;
  for (const UnitLayout& unit : layout.units) by_size.push_back(&unit);
  std::stable_sort(by_size.begin(), by_size.end(),
                   [](const UnitLayout* a, const UnitLayout* b) { return a->elements > b->elements; });
  std::vector<int> place(layout.units.size());
  std::vector<int64_t> held(nodes);
  for (const UnitLayout* unit : by_size) {
    const auto least = std::min_element(held.begin(), held.end());
    place[static_cast<size_t>(unit->unit)] = static_cast<int>(least - held.begin());
    *least += unit->elements;
  }
  return place;
}

}  // namespace

HostState::HostState(const ModelLayout& layout, const std::vector<NumaNode>& nodes)
    : layout_(layout), unit_node_(place_units(layout, nodes.size())), units_(layout.units.size()) {
  for (size_t node = 0; node < nodes.size(); ++node) {
    int64_t elements = 0;
    for (const UnitLayout& unit : layout_.units) {
      if (this->node(unit.unit) == static_cast<int>(node)) elements += unit.elements;
    }
    const std::string what = nodes.size() == 1 ? "The training state (12 bytes for each parameter)"
                                               : fmt::format(
                                                     "The part of the training state on memory node {} (12 "
                                                     "bytes for each parameter)",
                                                     nodes[node].id);
    Arena& arena = arenas_.emplace_back(state_bytes(elements), what, nodes[node]);
    // One array each over all of the node's units, back to back.
    auto* hi = static_cast<uint16_t*>(arena.take(elements * 2));
    weights_.emplace_back(hi, static_cast<size_t>(elements));
    auto* lo = static_cast<uint16_t*>(arena.take(elements * 2));
    auto* m = static_cast<float*>(arena.take(elements * 4));
    auto* v = static_cast<float*>(arena.take(elements * 4));
    for (const UnitLayout& unit : layout_.units) {
      if (this->node(unit.unit) != static_cast<int>(node)) continue;
      const auto count = static_cast<size_t>(unit.elements);
      units_[static_cast<size_t>(unit.unit)] = {{hi, count}, {lo, count}, {m, count}, {v, count}};
      hi += count;
      lo += count;
      m += count;
      v += count;
    }
  }
}

void HostState::touch(int threads, const TouchProgress& progress) {
  std::vector<const Arena*> arenas;
  for (const Arena& arena : arenas_) arenas.push_back(&arena);
  slidedp::touch(arenas, threads, progress);
}

UnitState HostState::unit(int unit) { return units_.at(static_cast<size_t>(unit)); }

int64_t HostState::bytes() const {
  int64_t bytes = 0;
  for (const Arena& arena : arenas_) bytes += arena.bytes();
  return bytes;
}

}  // namespace slidedp
