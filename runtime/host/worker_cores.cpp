#include "runtime/host/worker_cores.h"

#include <sched.h>

namespace slidedp {

std::vector<int> allowed_cores() {
  std::vector<int> cores;
  cpu_set_t allowed;
  CPU_ZERO(&allowed);
  if (sched_getaffinity(0, sizeof(allowed), &allowed) != 0) return cores;
  for (int core = 0; core < CPU_SETSIZE; ++core) {
    if (CPU_ISSET(core, &allowed)) cores.push_back(core);
  }
  return cores;
}

std::vector<WorkerPlace> worker_places(const std::vector<NumaNode>& nodes, int workers, int others) {
  size_t cores = 0;
  for (const NumaNode& node : nodes) cores += node.cores.size();
  if (static_cast<size_t>(workers + others) > cores) return {};
  std::vector<WorkerPlace> places;
  size_t before = 0;  // cores of the nodes before
  for (size_t node = 0; node < nodes.size(); ++node) {
    const std::vector<int>& of_node = nodes[node].cores;
    // Shares of the workers, rounded so that they add up.
    const auto share = [&](size_t first_cores) { return static_cast<size_t>(workers) * first_cores / cores; };
    const size_t count = share(before + of_node.size()) - share(before);
    for (size_t i = of_node.size() - count; i < of_node.size(); ++i)
      places.push_back({of_node[i], static_cast<int>(node)});
    before += of_node.size();
  }
  return places;
}

}  // namespace slidedp
