// The fills of all probes, see fills.h. Internal to model/calibration.
#pragma once

#include <span>
#include <vector>

#include "model/calibration/fills.h"

namespace slidedp {

using Found = std::vector<Finding>;
using Measured = std::span<const Measurement>;

Found fill_machine(const FillFacts&, Measured, HardwareSpec&);
Found fill_host_dram(const FillFacts&, Measured, HardwareSpec&);
Found fill_host_adam(const FillFacts&, Measured, HardwareSpec&);
Found fill_host_split(const FillFacts&, Measured, HardwareSpec&);
Found fill_host_norm(const FillFacts&, Measured, HardwareSpec&);
Found fill_host_sources(const FillFacts&, Measured, HardwareSpec&);
Found fill_host_contention(const FillFacts&, Measured, HardwareSpec&);
Found fill_copy_h2d(const FillFacts&, Measured, HardwareSpec&);
Found fill_copy_d2h(const FillFacts&, Measured, HardwareSpec&);
Found fill_copy_duplex(const FillFacts&, Measured, HardwareSpec&);
Found fill_copy_root(const FillFacts&, Measured, HardwareSpec&);
Found fill_all_gather(const FillFacts&, Measured, HardwareSpec&);
Found fill_reduce_scatter(const FillFacts&, Measured, HardwareSpec&);
Found fill_broadcast(const FillFacts&, Measured, HardwareSpec&);
Found fill_kernel_layer(const FillFacts&, Measured, HardwareSpec&);
Found fill_kernel_head(const FillFacts&, Measured, HardwareSpec&);
Found fill_kernel_embedding(const FillFacts&, Measured, HardwareSpec&);
Found fill_kernel_cast(const FillFacts&, Measured, HardwareSpec&);
Found fill_launch_latency(const FillFacts&, Measured, HardwareSpec&);
Found fill_device_context(const FillFacts&, Measured, HardwareSpec&);

}  // namespace slidedp
