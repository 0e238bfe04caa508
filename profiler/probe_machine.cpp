// Facts that are read, not timed: cores and memory.
#include <algorithm>

#include "model/base/format.h"
#include "profiler/probe.h"

namespace slidedp {
namespace {

// On the CPU backend the ranks' device memory comes out of the host's own. Without another wish, half of it is shared
// among the ranks.
int64_t device_share(const ProbeContext& context) {
  if (context.device_memory_bytes > 0) return context.device_memory_bytes;
  constexpr int64_t kGrain = int64_t{64} << 20;
  return std::max(context.memory_bytes / 2 / context.ranks / kGrain, int64_t{1}) * kGrain;
}

class MachineProbe final : public Probe {
 public:
  std::string key() const override { return "machine"; }
  std::string method() const override {
    return "reads the usable cores (affinity), the memory (physical or cgroup limit), and gives each CPU rank a share "
           "of "
           "it as device memory; the rest counts as host memory";
  }

  std::vector<Measurement> run(const ProbeContext& context) const override {
    const auto fact = [](const char* name, const char* unit, int64_t value) {
      return Measurement{name, unit, {}, {static_cast<double>(value)}, true};
    };
    const int64_t device = device_share(context);
    const int64_t host = context.memory_bytes - context.ranks * device;
    if (host <= 0) {
      failf("--device-memory: {} ranks with {} each take all of this host's {}; choose a smaller size.", context.ranks,
            format_bytes(device), format_bytes(context.memory_bytes));
    }
    return {fact("cores", "1", context.cores), fact("host memory", "B", host), fact("device memory", "B", device)};
  }

  std::vector<Finding> fill(const ProbeContext& context, std::span<const Measurement> measured,
                            HardwareSpec& spec) const override {
    const auto value = [&](const char* name) { return static_cast<int64_t>(find(measured, name).repeats.front()); };
    spec.gpus = context.ranks;
    spec.host.cores = static_cast<int>(value("cores"));
    spec.host.memory_bytes = value("host memory");
    spec.device.memory_bytes = value("device memory");
    spec.device.context_bytes = 0;  // CPU ranks have no driver context
    return {finding("host.cores", spec.host.cores, "", 0),
            finding("host.memory_bytes", static_cast<double>(spec.host.memory_bytes), "B", 0),
            finding("device.memory_bytes", static_cast<double>(spec.device.memory_bytes), "B", 0)};
  }
};

}  // namespace

std::unique_ptr<Probe> make_machine() { return std::make_unique<MachineProbe>(); }

}  // namespace slidedp
