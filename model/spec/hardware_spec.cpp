#include "model/spec/hardware_spec.h"

#include <utility>

#include "model/base/format.h"
#include "model/spec/spec_fields.h"

namespace slidedp {

std::optional<Problem> check_hardware(const HardwareSpec& spec) {
  const DeviceSpec& device = spec.device;
  if (device.context_bytes >= device.memory_bytes) {
    return Problem{"device.context_bytes",
                   fmt::format("is {}, but must be less than device.memory_bytes, {}",
                               format_bytes(device.context_bytes), format_bytes(device.memory_bytes))};
  }
  for (const auto& [key, rate] :
       {std::pair("pcie.h2d.gbps", spec.pcie.h2d), std::pair("pcie.d2h.gbps", spec.pcie.d2h)}) {
    if (rate.gbps == 0) return Problem{key, "is 0, but must be greater than 0"};
  }
  // A machine with one GPU has no collectives to measure.
  const CollectiveSpec& collectives = spec.collectives;
  for (const auto& [key, rate] : {std::pair("collectives.all_gather.gbps", collectives.all_gather),
                                  std::pair("collectives.reduce_scatter.gbps", collectives.reduce_scatter),
                                  std::pair("collectives.broadcast.gbps", collectives.broadcast)}) {
    if (rate.gbps == 0 && spec.gpus > 1) {
      return Problem{key, fmt::format("is 0, but must be greater than 0 with {} GPUs", spec.gpus)};
    }
  }
  return std::nullopt;
}

HardwareSpec load_hardware_spec(const std::filesystem::path& file) {
  return read_yaml<HardwareSpec>(file, kHardwareSchema, check_hardware);
}

std::string to_yaml(const HardwareSpec& spec) { return write_yaml(spec, kHardwareSchema); }

}  // namespace slidedp
