// Who this machine is, for messages, the profile's header and the database.
#pragma once

#include <cstdint>
#include <string>

namespace slidedp {

struct MachineIdentity {
  std::string host;              // node name
  std::string processor;         // model name of the first CPU
  std::string kernel;            // operating system and release
  int cores = 0;                 // that this process may run on (affinity mask)
  int64_t memory_bytes = 0;      // physical, or the cgroup's limit if that is smaller
  int64_t last_level_cache = 0;  // bytes; 0 if unknown
  std::string gpu = {};          // name of the first one; empty if none is used
};

MachineIdentity identify_machine();

// Threads that want a core at this moment besides the caller's own; 0 if unknown. Measurements on a busy machine are
// not worth much.
int other_running_threads();

}  // namespace slidedp
