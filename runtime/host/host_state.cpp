#include "runtime/host/host_state.h"

#include <bit>
#include <stdexcept>

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

}  // namespace

HostState::HostState(const ModelLayout& layout)
    : layout_(layout), arena_(state_bytes(layout.elements), "The training state (12 bytes for each parameter)") {
  // One array each over the whole model, units back to back: hi is registered with the devices as one range.
  auto* hi = static_cast<uint16_t*>(arena_.take(layout.elements * 2));
  auto* lo = static_cast<uint16_t*>(arena_.take(layout.elements * 2));
  auto* m = static_cast<float*>(arena_.take(layout.elements * 4));
  auto* v = static_cast<float*>(arena_.take(layout.elements * 4));
  int64_t begin = 0;
  for (const UnitLayout& unit : layout_.units) {
    const auto count = static_cast<size_t>(unit.elements);
    units_.push_back({{hi + begin, count}, {lo + begin, count}, {m + begin, count}, {v + begin, count}});
    begin += unit.elements;
  }
  if (begin != layout.elements) throw std::logic_error("HostState: the layout's units do not add up to its elements");
}

std::span<uint16_t> HostState::weights() {
  return units_.empty() ? std::span<uint16_t>()
                        : std::span(units_.front().hi.data(), static_cast<size_t>(layout_.elements));
}

UnitState HostState::unit(int unit) { return units_.at(static_cast<size_t>(unit)); }

int64_t HostState::bytes() const { return arena_.bytes(); }

}  // namespace slidedp
