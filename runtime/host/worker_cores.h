// Which cores the update workers get.
#pragma once

#include <vector>

#include "runtime/host/numa.h"

namespace slidedp {

// Cores that this process may run on (its affinity, which a cpuset limits), in ascending order.
std::vector<int> allowed_cores();

// Where a worker runs. `node`: index into numa_nodes().
struct WorkerPlace {
  int core = 0, node = 0;
  bool operator==(const WorkerPlace&) const = default;
};

// A core of its own for each of `workers` update workers, spread over the nodes as their cores are: the last of each
// node, so that the `others` threads beside them (those that issue work and feed data) find cores without workers
// before these. Empty if the cores do not suffice for all: a worker tied to a core that another thread keeps busy would
// wait there while others are idle.
std::vector<WorkerPlace> worker_places(const std::vector<NumaNode>& nodes, int workers, int others);

}  // namespace slidedp
