// What machine this is, for the run log and the profile.
#pragma once

#include <string>
#include <vector>

namespace slidedp {

struct MachineFact {
  std::string key, value;
};

// Cores that this process may use; at least 1.
int usable_cores();

// "cpu" (model name), "cores" (that this process may use), "memory_bytes" (MemTotal), "kernel" (name, release and
// architecture), in this order. What the system does not tell is left out.
std::vector<MachineFact> machine_facts();

// CPU time since the system started, summed over its cores. Steal: wanted by this virtual machine but given to others.
struct CpuTime {
  double busy_s = 0;  // without steal
  double steal_s = 0;
};
CpuTime cpu_time();  // zeros if the system does not tell

}  // namespace slidedp
