// Which cores the update workers get.
#pragma once

#include <vector>

namespace slidedp {

// Cores that this process may run on (its affinity, which a cpuset limits), in ascending order.
std::vector<int> allowed_cores();

// A core of its own for each of `workers` update workers: the last of `allowed`, so that the `others` threads beside
// them (those that issue work and feed data) find cores without workers before these. Empty if the cores do not suffice
// for all: a worker tied to a core that another thread keeps busy would wait there while others are idle.
std::vector<int> worker_cores(const std::vector<int>& allowed, int workers, int others);

}  // namespace slidedp
