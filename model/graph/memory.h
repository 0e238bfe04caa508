// Memory of a plan: exactly the graph's buffers plus named constants.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "model/graph/step_graph.h"
#include "model/spec/hardware_spec.h"

namespace slidedp {

struct MemoryRow {
  std::string name;
  int64_t bytes = 0;
};

struct MemoryTable {
  std::vector<MemoryRow> device;  // of one rank; all ranks are alike
  std::vector<MemoryRow> host;
  int64_t device_bytes() const;
  int64_t host_bytes() const;
  // Of device_bytes(), what the device allocator hands out as buffers (without context and temporaries).
  int64_t device_buffer_bytes = 0;
  // Temporaries of the compute backend, upper bound, per rank.
  int64_t temporary_bytes = 0;
};

MemoryTable memory_table(const StepGraph& graph, const ModelSpec& model, const HardwareSpec& hardware);

}  // namespace slidedp
