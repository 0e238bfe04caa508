// From samples to fields of the hardware profile, probe by probe. Needs the samples only, so a profile can be fitted
// again on any machine.
#pragma once

#include <functional>
#include <span>
#include <string>
#include <vector>

#include "model/calibration/contention_fit.h"
#include "model/calibration/finding.h"
#include "model/calibration/layer_fit.h"
#include "model/calibration/measurement.h"
#include "model/spec/hardware_spec.h"

namespace slidedp {

// What fields depend on beside the samples.
struct FillFacts {
  int ranks = 1;  // that will train together
  int cores = 1;  // that the profiler could use
};

// Turns one probe's samples into fields of the profile. `spec` holds what earlier probes found: caps that several
// probes touch are only ever raised. Throws Error for samples that cannot be fitted.
using Fill = std::function<std::vector<Finding>(const FillFacts&, std::span<const Measurement>, HardwareSpec& spec)>;

// As the probe with this key fills. A probe that fills nothing is for the record only.
std::vector<Finding> fill_fields(const std::string& key, const FillFacts& facts, std::span<const Measurement> measured,
                                 HardwareSpec& spec);

// The samples of kernel.layer ("forward", "backward") and host.contention as their laws take them.
std::vector<LayerSample> layer_samples(std::span<const Measurement> measured, const std::string& value_name);
std::vector<ContentionSample> contention_samples(std::span<const Measurement> measured);

// Ranks that collectives are measured with when so many will train: two at least.
int collective_ranks(int ranks);

}  // namespace slidedp
