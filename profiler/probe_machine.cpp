// Facts that are read, not timed: cores and memory.
#include <algorithm>

#include "model/base/format.h"
#include "profiler/kernel_bench.h"
#include "profiler/probe.h"
#include "runtime/device/backends.h"

namespace slidedp {
namespace {

Measurement fact(const char* name, const char* unit, int64_t value) {
  return {name, unit, {}, {static_cast<double>(value)}, true};
}

class MachineProbe final : public Probe {
 public:
  std::string key() const override { return "machine"; }
  std::string method() const override {
    return "reads the usable cores (affinity), the memory (physical or cgroup limit) and the GPU's memory; gives each "
           "CPU rank a share of the host's as device memory, the rest counts as host memory";
  }

  std::vector<Measurement> run(const ProbeContext& context) const override {
    const int64_t device = context.rank_memory_bytes();
    const int64_t host = context.memory_bytes - (context.on_host() ? context.ranks * device : 0);
    return {fact("cores", "1", context.cores), fact("host memory", "B", host), fact("device memory", "B", device)};
  }
};

class DeviceContextProbe final : public Probe {
 public:
  std::string key() const override { return "device.context"; }
  std::string method() const override {
    return "runs every kernel once, frees all buffers and reads what is missing of the GPU's memory: the driver's "
           "context, kernels and libraries of this process (with what other processes hold, which no plan may use "
           "either)";
  }
  std::optional<std::string> waived(const ProbeContext& context) const override {
    if (context.on_host()) return "CPU ranks have no driver context";
    const ModelSpec measured = measured_model(context);
    const int64_t bytes = bench_bytes(context, measured, kernel_shapes(context, measured).front());
    if (bytes <= context.device_available_bytes) return std::nullopt;
    return fmt::format("needs {} of the GPU's memory, but only {} is free", format_bytes(bytes),
                       format_bytes(context.device_available_bytes));
  }

  std::vector<Measurement> run(const ProbeContext& context) const override {
    use_every_kernel(context);
    const DeviceFacts facts = device_facts(context.backend);
    return {fact("context", "B", facts.total_bytes - facts.free_bytes)};
  }

 private:
  static void use_every_kernel(const ProbeContext& context) {
    const ModelSpec measured = measured_model(context);
    KernelBench bench(context, measured, kernel_shapes(context, measured).front());
    bench.embedding_forward();
    bench.layer();
    bench.head();
    bench.embedding_backward(true);
  }
};

}  // namespace

std::unique_ptr<Probe> make_machine() { return std::make_unique<MachineProbe>(); }
std::unique_ptr<Probe> make_device_context() { return std::make_unique<DeviceContextProbe>(); }

}  // namespace slidedp
