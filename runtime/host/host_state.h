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
  // Reserves hi, lo, m, v of the whole model, zeroed, each unit on one of the memory nodes, so that all nodes hold
  // about the same. Throws Error if the host cannot hold it.
  explicit HostState(const ModelLayout& layout, const std::vector<NumaNode>& nodes = numa_nodes());
  // Commits all of it (arena.h); otherwise each page is committed when it is first used.
  void touch(int threads, const TouchProgress& progress);
  UnitState unit(int unit);
  // The memory node that holds the unit; index into the nodes it was made with.
  int node(int unit) const { return unit_node_[static_cast<size_t>(unit)]; }
  // hi of all units, back to back, one range a node: what devices read.
  const std::vector<std::span<uint16_t>>& weights() const { return weights_; }
  const ModelLayout& layout() const { return layout_; }
  int64_t bytes() const;
  // The memory itself, one region a node.
  const std::vector<Arena>& arenas() const { return arenas_; }
  // Updates applied so far (Adam's t). Skipped steps do not count.
  int64_t updates = 0;

 private:
  ModelLayout layout_;
  std::vector<int> unit_node_;
  std::vector<Arena> arenas_;
  std::vector<std::span<uint16_t>> weights_;
  std::vector<UnitState> units_;
};

}  // namespace slidedp
