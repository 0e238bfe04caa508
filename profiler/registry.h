// All probes, in the order in which they run.
#pragma once

#include <memory>
#include <vector>

#include "profiler/probe.h"

namespace slidedp {

std::vector<std::unique_ptr<Probe>> all_probes();

}  // namespace slidedp
