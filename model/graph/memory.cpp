#include "model/graph/memory.h"

#include <array>
#include <numeric>

#include "model/cost/activations.h"

namespace slidedp {
namespace {

int64_t sum(const std::vector<MemoryRow>& rows) {
  return std::accumulate(rows.begin(), rows.end(), int64_t{0},
                         [](int64_t total, const MemoryRow& row) { return total + row.bytes; });
}

}  // namespace

int64_t MemoryTable::device_bytes() const { return sum(device); }
int64_t MemoryTable::host_bytes() const { return sum(host); }

MemoryTable memory_table(const StepGraph& graph, const ModelSpec& model, const HardwareSpec& hardware) {
  constexpr size_t kinds = static_cast<size_t>(BufferKind::loss) + 1;
  std::array<int64_t, kinds> host{}, device{};
  for (const Buffer& buffer : graph.buffers) {
    const auto kind = static_cast<size_t>(buffer.kind);
    if (buffer.on_host()) {
      host[kind] += buffer.bytes;
    } else if (buffer.rank == 0) {
      device[kind] += buffer.bytes;
    }
  }
  MemoryTable table;
  for (size_t kind = 0; kind < kinds; ++kind) {
    const std::string row(name(static_cast<BufferKind>(kind)));
    if (host[kind] > 0) table.host.push_back({row, host[kind]});
    if (device[kind] > 0) table.device.push_back({row, device[kind]});
    table.device_buffer_bytes += device[kind];
  }
  table.temporary_bytes = temporary_bytes(model, graph.plan);
  table.device.push_back({"temporaries", table.temporary_bytes});
  if (hardware.device.context_bytes > 0) table.device.push_back({"context", hardware.device.context_bytes});
  return table;
}

}  // namespace slidedp
