// What a probe is: one question to the machine, answered by running the very code that training runs.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "model/calibration/fills.h"
#include "model/spec/model_spec.h"
#include "profiler/measure.h"

namespace slidedp {

// What the probes run against. Owned by the caller of run_profile.
struct ProbeContext {
  ModelSpec model;  // gives the kernels' shapes
  std::string backend = "cpu";
  int ranks = 2;
  int cores = 1;                       // that this process may use
  int64_t memory_bytes = 0;            // of the host, or what its cgroup allows
  int64_t available_bytes = 0;         // that this process may still allocate
  int64_t device_memory_bytes = 0;     // budget of a rank as wished; 0 = see the machine probe
  int64_t device_total_bytes = 0;      // memory of a rank's own device; 0 on the CPU backend
  int64_t device_available_bytes = 0;  // that one rank may allocate on its device (CPU backend: of the host)
  bool quick = false;
  // Buffers that must miss the caches, in bytes: large, because smaller ones sit in the last-level cache.
  int64_t rolling_bytes = 0;
  // Memory that stands for the training state, in bytes: much more, since memory is not everywhere equally fast, and
  // the state lies everywhere. 0: rolling_bytes.
  int64_t state_bytes = 0;
  // Time that one probe may take in all rounds, in seconds, shared among its measurements (some: a fixed multiple).
  double probe_seconds = 0;
  int rounds = 1;  // that all probes are repeated in, see add_round()
  const std::atomic<bool>* stop = nullptr;

  // Ranks are threads of this host, without devices of their own.
  bool on_host() const { return backend == "cpu"; }
  // Memory of one rank. On the CPU backend it comes out of the host's own: without another wish, half of that is shared
  // among the ranks.
  int64_t rank_memory_bytes() const;
  // A harness whose measurements share the probe's time in one round, or so many times that.
  Harness harness(int measurements, double times = 1) const;
  // The same for what warms itself up.
  Harness warm_harness(int measurements, double times = 1) const;
  // Seconds in which a team of workers is watched.
  double window_s() const { return quick ? 0.03 : 0.1; }
  int64_t state_memory() const { return state_bytes > 0 ? state_bytes : rolling_bytes; }
};

class Probe {
 public:
  virtual ~Probe() = default;
  virtual std::string key() const = 0;     // stable: the database and --only know a probe by it
  virtual std::string method() const = 0;  // one sentence: what is done and what is counted
  // Why this machine cannot be asked (then run() is not called); nullopt when it can.
  virtual std::optional<std::string> waived(const ProbeContext&) const { return std::nullopt; }
  virtual std::vector<Measurement> run(const ProbeContext&) const = 0;
  // Turns the samples into fields of the profile, see fills.h.
  virtual std::vector<Finding> fill(const FillFacts& facts, std::span<const Measurement> measured,
                                    HardwareSpec& spec) const {
    return fill_fields(key(), facts, measured, spec);
  }
};

}  // namespace slidedp
