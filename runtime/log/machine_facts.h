// What machine this is, for the run log and the profile.
#pragma once

#include <string>
#include <vector>

namespace slidedp {

struct MachineFact {
  std::string key, value;
};

// "cpu" (model name), "cores" (that this process may use), "memory_bytes" (MemTotal), "kernel" (name, release and
// architecture), in this order. What the system does not tell is left out.
std::vector<MachineFact> machine_facts();

}  // namespace slidedp
