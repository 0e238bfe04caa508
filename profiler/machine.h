// Who this machine is, and whether it is busy.
#pragma once

#include "model/calibration/profile_record.h"

namespace slidedp {

MachineIdentity identify_machine();

// Threads that want a core at this moment besides the caller's own; 0 if unknown. Measurements on a busy machine are
// not worth much.
int other_running_threads();

}  // namespace slidedp
