#include "model/spec/hardware_spec.h"

#include <algorithm>
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
  for (const auto& [key, copies] : {std::pair("contention.h2d.headroom", spec.contention.h2d),
                                    std::pair("contention.d2h.headroom", spec.contention.d2h)}) {
    if (copies.headroom < 1) return Problem{key, fmt::format("is {}, but must be at least 1", copies.headroom)};
  }
  return std::nullopt;
}

double HostSpec::update_elements_per_s(UpdatePart part) const {
  // Bytes an element with one bf16 source: Adam reads and writes hi, lo, m and v; the weights' pass only reads m and v,
  // the moments' pass does not touch hi and lo.
  constexpr double kWholeBytes = 26, kPassBytes = 18;
  if (part == UpdatePart::whole) return adam_elements_per_s;
  const double measured = part == UpdatePart::weights ? split_weights_elements_per_s : split_moments_elements_per_s;
  return measured > 0 ? measured : adam_elements_per_s * kWholeBytes / kPassBytes;
}

void correct_dram_cap(HardwareSpec& spec, double gbps) {
  // Before anything was measured nothing contends.
  const double factor = spec.host.dram_gbps > 0 ? gbps / spec.host.dram_gbps : 1;
  ContentionSpec& contention = spec.contention;
  for (CopyContention* copies : {&contention.h2d, &contention.d2h}) {
    copies->beside_streams *= factor;
    copies->beside_copies *= factor;
  }
  contention.streams.beside_streams *= factor;
  contention.streams.beside_h2d *= factor;
  contention.streams.beside_d2h *= factor;
  spec.host.dram_gbps = gbps;
}

const FieldError* Uncertainty::error_of(const std::string& field) const {
  const auto found = std::find_if(standard_errors.begin(), standard_errors.end(),
                                  [&](const FieldError& error) { return error.field == field; });
  return found == standard_errors.end() ? nullptr : &*found;
}

std::vector<NamedValue> named_values(const HardwareSpec& spec) {
  HardwareSpec copy = spec;  // the table's targets are not const
  AssignmentTable table("");
  fields(table, copy);
  std::vector<NamedValue> values;
  for (const AssignmentTable::Entry& entry : table.entries) {
    const auto number = [](auto* target) -> std::optional<double> {
      using Target = std::remove_pointer_t<decltype(target)>;
      if constexpr (std::is_arithmetic_v<Target> && !std::is_same_v<Target, bool>) return static_cast<double>(*target);
      return std::nullopt;
    };
    if (const auto value = std::visit(number, entry.target)) values.push_back({entry.path, *value});
  }
  return values;
}

HardwareSpec load_hardware_spec(const std::filesystem::path& file) {
  return read_yaml<HardwareSpec>(
      file, kHardwareSchema, check_hardware,
      {{kGpuSchema, "this file describes a GPU only: add its host with --host, such as those in configs/hardware/host"},
       {kHostSchema,
        "this file describes a host only: give it with --host, and a GPU's file, such as those in "
        "configs/hardware/gpu, with --hardware"}});
}

std::string to_yaml(const HardwareSpec& spec) { return write_yaml(spec, kHardwareSchema); }

}  // namespace slidedp
