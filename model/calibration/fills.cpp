#include "model/calibration/fills.h"

#include <algorithm>
#include <map>

#include "model/calibration/fill_probes.h"

namespace slidedp {
namespace {

const std::map<std::string, Fill>& all_fills() {
  static const std::map<std::string, Fill> fills{
      {"machine", fill_machine},
      {"host.dram", fill_host_dram},
      {"host.adam", fill_host_adam},
      {"host.split", fill_host_split},
      {"host.norm", fill_host_norm},
      {"host.sources", fill_host_sources},
      {"copy.h2d", fill_copy_h2d},
      {"copy.d2h", fill_copy_d2h},
      {"copy.duplex", fill_copy_duplex},
      {"copy.root", fill_copy_root},
      {"host.contention", fill_host_contention},
      {"collective.all_gather", fill_all_gather},
      {"collective.reduce_scatter", fill_reduce_scatter},
      {"collective.broadcast", fill_broadcast},
      {"kernel.layer", fill_kernel_layer},
      {"kernel.head", fill_kernel_head},
      {"kernel.embedding", fill_kernel_embedding},
      {"kernel.cast", fill_kernel_cast},
      {"launch.latency", fill_launch_latency},
      {"device.context", fill_device_context},
  };
  return fills;
}

}  // namespace

std::vector<Finding> fill_fields(const std::string& key, const FillFacts& facts, std::span<const Measurement> measured,
                                 HardwareSpec& spec) {
  const auto fill = all_fills().find(key);
  return fill == all_fills().end() ? std::vector<Finding>{} : fill->second(facts, measured, spec);
}

int collective_ranks(int ranks) { return std::max(ranks, 2); }

}  // namespace slidedp
