// Derives a step graph's dependencies from what its tasks touch.
#pragma once

#include "model/graph/step_graph.h"

namespace slidedp {

// Fills deps and previous_deps of every task, and graph.lanes, from program order and accesses: a task depends on the
// last writers of the bytes it touches and, if it writes, on their readers since; writes of one partition of a step
// (Access::partition) do not wait for each other. Two steps are unrolled, so that edges
// across the step boundary come out of the same rule. Edges that in-order lanes imply are left out.
//
// Buffers that alternate between two halves with the step's parity (alternates(kind)) never conflict across steps: the
// executor begins step s + 2 only when step s is complete.
void derive_dependencies(StepGraph& graph);

// Step data: batch and loss buffers hold two halves, one for even and one for odd steps. Accesses name the first half.
bool alternates(BufferKind kind);

}  // namespace slidedp
