// One profiling run as it is stored: the machine, every probe's samples, and the hardware profile that is fitted to
// them.
#pragma once

#include <cstdint>
#include <exception>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "model/calibration/fills.h"

namespace slidedp {

// Who a machine is, for messages, the profile's header and the database.
struct MachineIdentity {
  std::string host;              // node name
  std::string processor;         // model name of the first CPU
  std::string kernel;            // operating system and release
  int cores = 0;                 // that the profiler may run on (affinity mask)
  int64_t memory_bytes = 0;      // physical, or the cgroup's limit if that is smaller
  int64_t last_level_cache = 0;  // bytes; 0 if unknown
  std::string gpu = {};          // name of the first one; empty if none is used
};

struct ProbeOutcome {
  std::string key, method;
  std::optional<std::string> waived = std::nullopt;  // the reason; then nothing is fitted
  std::vector<Measurement> measurements = {};
  std::vector<Finding> findings = {};
  double seconds = 0;           // that the probe took
  int64_t finished_unix_s = 0;  // wall clock
};

struct ProfileRun {
  MachineIdentity machine;
  std::string backend, model;  // model: whose shapes the kernels had
  int ranks = 0;
  bool quick = false;
  int rounds = 1;  // that every probe was repeated in
  std::string program_version = SLIDEDP_VERSION;
  int64_t started_unix_s = 0;
  double seconds = 0;
  double other_threads = 0;  // of other programs that ran when the first probe started
  HardwareSpec spec;
  std::vector<ProbeOutcome> outcomes;
};

// A profile without values, for what is measured by so many ranks on this machine.
HardwareSpec empty_profile(const MachineIdentity& machine, const std::string& backend, int ranks);

// Fills by probe key.
using FillOfProbe = std::function<std::vector<Finding>(const std::string& key, const FillFacts&,
                                                       std::span<const Measurement>, HardwareSpec&)>;

// One probe that fails does not take the others' results with it. What it would have found is then missing, and said to
// be.
void waive_for(ProbeOutcome& outcome, const std::exception& error);  // rethrows an interruption

// Fits one probe's samples: the outcome's findings, and their values in `spec`. A probe whose samples cannot be fitted
// is waived with the reason, and `spec` stays.
void fit_outcome(ProbeOutcome& outcome, const FillFacts& facts, HardwareSpec& spec, const FillOfProbe& fill);

// Fits all samples of the run: its spec, with uncertainties, and findings. `start` holds the values of what was not
// measured. A value's standard error is the larger of what the scatter of its repeats predicts and what rounds differ
// by (jackknife over rounds, of the whole way from samples to profile), and at least a floor.
void fit_profile(ProfileRun& run, const HardwareSpec& start, const FillOfProbe& fill = fill_fields);

// "2026-01-31 12:00:00 UTC"
std::string utc_text(int64_t unix_s);

// The profile with a comment header: date, machine, spread of each value, waived probes, notes.
std::string profile_text(const ProfileRun& run);

// The run's profile as a file, written beside it first, read back strictly, then renamed. Throws Error, with waived
// probes named, when values are missing.
void write_profile(const ProfileRun& run, const std::filesystem::path& file);

}  // namespace slidedp
