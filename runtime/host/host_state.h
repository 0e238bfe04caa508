// The one authoritative training state, in host memory: 12 bytes per parameter, whatever the number of ranks.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "model/spec/layout.h"
#include "runtime/host/arena.h"

namespace slidedp {

// fp32 master <-> (hi, lo). hi is the fp32 rounded half up (away from zero in magnitude) to bf16; lo is the low 16 bits
// of the fp32. hi = (bits + 0x8000) >> 16; the inverse subtracts the carry again: bits = ((hi - (lo >> 15)) << 16) |
// lo. Exact for every bit pattern, NaNs and infinities included.
struct HiLo {
  uint16_t hi, lo;
};
HiLo split_master(float master);
float join_master(HiLo parts);

// Views of one unit; `elements` = UnitLayout::elements. Gaps between tensors are zero and stay zero.
struct UnitState {
  std::span<uint16_t> hi, lo;
  std::span<float> m, v;
};

class HostState {
 public:
  // Allocates hi, lo, m, v of the whole model, zeroed. Throws Error if the host cannot hold it.
  explicit HostState(const ModelLayout& layout);
  UnitState unit(int unit);
  // hi of all units, back to back: what devices read.
  std::span<uint16_t> weights();
  const ModelLayout& layout() const { return layout_; }
  int64_t bytes() const;
  // Updates applied so far (Adam's t). Skipped steps do not count.
  int64_t updates = 0;

 private:
  ModelLayout layout_;
  Arena arena_;
  std::vector<UnitState> units_;
};

}  // namespace slidedp
