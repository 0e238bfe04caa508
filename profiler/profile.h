// One profiling run: chosen probes in order, their samples, and the hardware profile that comes of them.
#pragma once

#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "model/calibration/profile_record.h"
#include "profiler/machine.h"
#include "profiler/probe.h"

namespace slidedp {

// The shapes that kernels are measured at when no model is given: SmolLM2-135M.
ModelSpec default_model();

// Context of a run on this machine: cores, memory, buffer sizes and time per probe.
ProbeContext make_context(const MachineIdentity& machine, const ModelSpec& model, bool quick);

// All of them, or those with the given keys, in registry order. Throws Error that lists the keys for an unknown one.
std::vector<const Probe*> choose_probes(std::span<const std::unique_ptr<Probe>> all, std::span<const std::string> keys);

// The median of other_running_threads() over a fifth of a second.
double busy_threads();

struct ProbePlace {
  int round;
  size_t index;  // of the probe
  const Probe& probe;
};
// Called before (outcome == nullptr) and after each probe of each round; nothing is fitted yet.
using Progress = std::function<void(const ProbePlace&, const ProbeOutcome* outcome)>;

// `start` holds the values of what is not measured now; `start.measured` is false when there are none.
ProfileRun run_profile(std::span<const Probe* const> probes, const ProbeContext& context,
                       const MachineIdentity& machine, const HardwareSpec& start, const Progress& progress);

}  // namespace slidedp
