// A closed-form guess of the step time, for choosing which plans of a large space to simulate. Never reported.
#pragma once

#include "planner/space.h"

namespace slidedp {

// Seconds of a step in which every lane streams without gaps inside a pass: a pass (forward or backward of a wave)
// takes as long as the slowest of computing, copies and collectives in it, and in the first and last pass of a step
// also of the updates, whose place depends on the update policy. Sees no latencies of chunks, no pipeline fill and no
// slots.
double estimate_step(const SearchProblem& problem, const Plan& plan);

}  // namespace slidedp
