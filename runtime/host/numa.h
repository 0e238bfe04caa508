// Nodes of the host's memory and the cores beside them.
#pragma once

#include <cstdint>
#include <vector>

namespace slidedp {

struct NumaNode {
  int id = 0;              // the system's number
  std::vector<int> cores;  // those that this process may use, ascending; may be empty
};

// Nodes with memory that this process may use, ascending; at least one (a system without NUMA is one node).
std::vector<NumaNode> numa_nodes();

// Pages of the range (page aligned) that are not there yet will come from `node` while it has room.
void prefer_node(void* data, int64_t bytes, int node);
// The calling thread runs on these cores only; nothing if there are none or the system refuses.
void run_on_cores(const std::vector<int>& cores);

}  // namespace slidedp
