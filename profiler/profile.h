// One profiling run: chosen probes in order, their samples, and the hardware profile that comes of them.
#pragma once

#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "profiler/machine.h"
#include "profiler/probe.h"

namespace slidedp {

struct ProbeOutcome {
  std::string key, method;
  std::optional<std::string> waived;  // the reason; then there are no measurements
  std::vector<Measurement> measurements;
  std::vector<Finding> findings;
  double seconds = 0;           // that the probe took
  int64_t finished_unix_s = 0;  // wall clock
};

struct ProfileRun {
  MachineIdentity machine;
  std::string backend, model;  // model: whose shapes the kernels had
  int ranks = 0;
  bool quick = false;
  int64_t started_unix_s = 0;
  double seconds = 0;
  double other_threads = 0;  // of other programs that ran when the first probe started, see busy_threads()
  HardwareSpec spec;
  std::vector<ProbeOutcome> outcomes;
};

// The shapes that kernels are measured at when no model is given: SmolLM2-135M.
ModelSpec default_model();

// Context of a run on this machine: cores, memory, buffer sizes and time per probe.
ProbeContext make_context(const MachineIdentity& machine, const ModelSpec& model, bool quick);

// All of them, or those with the given keys, in registry order. Throws Error that lists the keys for an unknown one.
std::vector<const Probe*> choose_probes(std::span<const std::unique_ptr<Probe>> all, std::span<const std::string> keys);

// The median of other_running_threads() over a fifth of a second.
double busy_threads();

// Called before (outcome == nullptr) and after each probe.
using Progress = std::function<void(size_t index, size_t count, const Probe&, const ProbeOutcome* outcome)>;

// `start` holds the values of what is not measured now; `start.measured` is false when there are none.
ProfileRun run_profile(std::span<const Probe* const> probes, const ProbeContext& context,
                       const MachineIdentity& machine, const HardwareSpec& start, const Progress& progress);

// The profile with a comment header: date, machine, spread of each value, waived probes, notes.
std::string profile_text(const ProfileRun& run);

// The run's profile as a file, written beside it first, read back strictly, then renamed. Throws Error, with waived
// probes named, when values are missing.
void write_profile(const ProfileRun& run, const std::filesystem::path& file);

}  // namespace slidedp
