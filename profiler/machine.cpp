#include "profiler/machine.h"

#include <sys/utsname.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <string>

#include "runtime/host/machine_facts.h"

namespace slidedp {
namespace {

std::string processor_name() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    if (!line.starts_with("model name") && !line.starts_with("Model")) continue;
    const size_t colon = line.find(": ");
    if (colon != std::string::npos) return line.substr(colon + 2);
  }
  return "unknown processor";
}

// The limit of the root cgroup as a container sees it (v2, then v1); "max" and absent files are no limit.
int64_t cgroup_limit(int64_t physical) {
  for (const char* path : {"/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"}) {
    std::ifstream file(path);
    int64_t limit = 0;
    if (file >> limit && limit > 0) return std::min(limit, physical);
  }
  return physical;
}

}  // namespace

MachineIdentity identify_machine() {
  MachineIdentity machine;
  utsname names{};
  if (uname(&names) == 0) {
    machine.host = names.nodename;
    machine.kernel = std::string(names.sysname) + " " + names.release;
  }
  machine.processor = processor_name();
  machine.cores = usable_cores();
  machine.memory_bytes = cgroup_limit(static_cast<int64_t>(sysconf(_SC_PHYS_PAGES)) * sysconf(_SC_PAGESIZE));
  machine.last_level_cache = std::max<int64_t>(sysconf(_SC_LEVEL3_CACHE_SIZE), 0);
  return machine;
}

int other_running_threads() {
  std::ifstream file("/proc/loadavg");
  std::string averages;
  int running = 0;
  // "0.20 0.18 0.12 1/80 11206": the fourth field is runnable threads, this one among them, over all threads.
  for (int i = 0; i < 3; ++i) file >> averages;
  return file >> running ? std::max(running - 1, 0) : 0;
}

}  // namespace slidedp
