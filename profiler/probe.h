// What a probe is: one question to the machine, answered by running the very code that training runs.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "model/calibration/fit.h"
#include "model/spec/hardware_spec.h"
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
  // Buffers that stand for host state, in bytes: large, because smaller ones sit in the last-level cache.
  int64_t rolling_bytes = 0;
  // Time that one probe may take, in seconds, shared among its measurements (kernels: a fixed multiple).
  double probe_seconds = 0;
  const std::atomic<bool>* stop = nullptr;

  // Ranks are threads of this host, without devices of their own.
  bool on_host() const { return backend == "cpu"; }
  // Memory of one rank. On the CPU backend it comes out of the host's own: without another wish, half of that is shared
  // among the ranks.
  int64_t rank_memory_bytes() const;
  // A harness whose measurements share the probe's time.
  Harness harness(int measurements) const;
};

// A value that went into the hardware profile.
struct Finding {
  std::string field;  // YAML path
  double value = 0;
  std::string text;    // for people: "9.81 GB/s"
  std::string spread;  // for people: "se 0.8 %", "+- 1.2 %"
  std::string note;    // a warning in one sentence; mostly empty
};

class Probe {
 public:
  virtual ~Probe() = default;
  virtual std::string key() const = 0;     // stable: the database and --only know a probe by it
  virtual std::string method() const = 0;  // one sentence: what is done and what is counted
  // Why this machine cannot be asked (then run() is not called); nullopt when it can.
  virtual std::optional<std::string> waived(const ProbeContext&) const { return std::nullopt; }
  virtual std::vector<Measurement> run(const ProbeContext&) const = 0;
  // Turns measurements into fields of the profile. `spec` holds what earlier probes found: caps that several probes
  // touch are only ever raised.
  virtual std::vector<Finding> fill(const ProbeContext&, std::span<const Measurement>, HardwareSpec& spec) const = 0;
};

// Helpers for fill().
// Those of one value name, in order.
std::vector<const Measurement*> select(std::span<const Measurement>, const std::string& value_name);
// The only measurement with this name and these parameters (others may differ); throws std::logic_error if none.
const Measurement& find(std::span<const Measurement>, const std::string& value_name,
                        const std::map<std::string, double>& parameters = {});
// Every repeat as (parameter `work`, seconds).
std::vector<FitSample> fit_samples(std::span<const Measurement* const>, const std::string& work);
Finding finding(const std::string& field, double value, const std::string& unit, double relative_spread);
// Findings of a fitted link or kernel, fields PREFIX.latency_s and PREFIX.gbps or PREFIX.peak_gflops and .half_gflop.
std::vector<Finding> findings(const std::string& prefix, const LinkFit&);
std::vector<Finding> findings(const std::string& prefix, const KernelFit&);

}  // namespace slidedp
