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

std::vector<int> worker_cores(const std::vector<int>& allowed, int workers, int others) {
  if (workers + others > static_cast<int>(allowed.size())) return {};
  return {allowed.end() - workers, allowed.end()};
}

}  // namespace slidedp
