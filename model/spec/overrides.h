// `--set key=value` and `--pin field=value` of slidedp-plan.
#pragma once

#include <string>
#include <vector>

#include "model/spec/hardware_spec.h"
#include "model/spec/train_spec.h"

namespace slidedp {

// One assignment "key=value"; `value` may be "*F" (multiply the present number by F). Keys are the YAML paths of the
// hardware spec ("pcie.h2d.gbps", "gpus", "host.dram_gbps") or, with prefix "train.", of the training spec
// ("train.batch_rows"). Short forms: a unique last part ("dram_gbps") is accepted, and "pcie.h2d_gbps" for
// "pcie.h2d.gbps". Throws Error that names the key and the nearest valid keys.
void apply_set(const std::string& assignment, HardwareSpec& hardware, TrainSpec& train);

}  // namespace slidedp
