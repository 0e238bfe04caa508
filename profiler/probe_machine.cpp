// Facts that are read, not timed: cores and memory.
#include <algorithm>

#include "model/base/format.h"
#include "profiler/kernel_bench.h"
#include "profiler/probe.h"
#include "runtime/device/backends.h"
#include "runtime/device/gpu_state.h"

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

class DeviceStateProbe final : public Probe {
 public:
  std::string key() const override { return "device.state"; }
  std::string method() const override {
    return "reads the first GPU's clocks, power, temperature and reasons to slow down from the management library, "
           "once a round, directly after layers have run; for the record";
  }
  std::optional<std::string> waived(const ProbeContext& context) const override {
    if (context.on_host()) return "CPU ranks have no clock of their own";
    if (!gpu_state()) return "NVIDIA's management library (libnvidia-ml.so.1) is not there or says nothing";
    return std::nullopt;
  }
  std::vector<Measurement> run(const ProbeContext&) const override {
    const GpuState state = gpu_state().value_or(GpuState{});
    const auto value = [](const char* name, const char* unit, double v) {
      return Measurement{name, unit, {}, {v}, true};
    };
    return {value("sm_clock", "MHz", state.sm_clock_mhz),
            value("memory_clock", "MHz", state.memory_clock_mhz),
            value("power", "W", state.power_w),
            value("power_limit", "W", state.power_limit_w),
            value("temperature", "C", state.temperature_c),
            value("slowdown_reasons", "1", state.slowdown_reasons)};
  }
};

}  // namespace

std::unique_ptr<Probe> make_device_state() { return std::make_unique<DeviceStateProbe>(); }
std::unique_ptr<Probe> make_machine() { return std::make_unique<MachineProbe>(); }
std::unique_ptr<Probe> make_device_context() { return std::make_unique<DeviceContextProbe>(); }

}  // namespace slidedp
