#include "runtime/host/numa.h"

#include <numa.h>
#include <numaif.h>
#include <sched.h>

#include <memory>

#include "runtime/host/worker_cores.h"

namespace slidedp {
std::vector<NumaNode> numa_nodes() {
  if (numa_available() < 0) return {{0, allowed_cores()}};
  std::vector<NumaNode> nodes;
  const std::unique_ptr<bitmask, decltype(&numa_bitmask_free)> allowed(numa_get_mems_allowed(), &numa_bitmask_free);
  for (int id = 0; id <= numa_max_node(); ++id) {
    if (numa_bitmask_isbitset(allowed.get(), static_cast<unsigned>(id)) != 0) nodes.push_back({id, {}});
  }
  if (nodes.empty()) nodes.push_back({0, {}});
  for (const int core : allowed_cores()) {
    for (NumaNode& node : nodes) {
      if (nodes.size() == 1 || numa_node_of_cpu(core) == node.id) node.cores.push_back(core);
    }
  }
  return nodes;
}

void prefer_node(void* data, int64_t bytes, int node) {
  if (numa_available() < 0) return;
  bitmask* mask = numa_bitmask_alloc(static_cast<unsigned>(numa_max_node()) + 1);
  numa_bitmask_setbit(mask, static_cast<unsigned>(node));
  // A wish only: where the system refuses, pages come from the node of the thread that touches them first.
  mbind(data, static_cast<unsigned long>(bytes), MPOL_PREFERRED, mask->maskp, mask->size + 1, 0);
  numa_bitmask_free(mask);
}

void run_on_cores(const std::vector<int>& cores) {
  if (cores.empty()) return;
  cpu_set_t set;
  CPU_ZERO(&set);
  for (const int core : cores) CPU_SET(core, &set);
  sched_setaffinity(0, sizeof(set), &set);
}

}  // namespace slidedp
