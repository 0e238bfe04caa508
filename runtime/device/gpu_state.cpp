#include "runtime/device/gpu_state.h"

#include <dlfcn.h>

#include <cstdlib>
#include <string>

namespace slidedp {
namespace {

// The library's C interface, as far as it is used; its header is no part of the CUDA packages.
using Handle = void*;
constexpr int kSuccess = 0, kClockSm = 1, kClockMemory = 2, kTemperatureGpu = 0;

class Nvml {
 public:
  Nvml() {
    library_ = ::dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL);
    const auto init = function<int()>("nvmlInit_v2");
    if (init == nullptr || init() != kSuccess) return;
    find_device();
  }

  std::optional<GpuState> state() const {
    if (device_ == nullptr) return std::nullopt;
    GpuState state;
    const auto clock = function<int(Handle, int, unsigned*)>("nvmlDeviceGetClockInfo");
    const auto power = function<int(Handle, unsigned*)>("nvmlDeviceGetPowerUsage");
    const auto limit = function<int(Handle, unsigned*)>("nvmlDeviceGetEnforcedPowerLimit");
    const auto temperature = function<int(Handle, int, unsigned*)>("nvmlDeviceGetTemperature");
    const auto reasons = function<int(Handle, unsigned long long*)>("nvmlDeviceGetCurrentClocksThrottleReasons");
    unsigned sm = 0, memory = 0, milliwatts = 0, most = 0, degrees = 0;
    unsigned long long bits = 0;
    if (clock == nullptr || clock(device_, kClockSm, &sm) != kSuccess) return std::nullopt;
    clock(device_, kClockMemory, &memory);
    if (power != nullptr) power(device_, &milliwatts);
    if (limit != nullptr) limit(device_, &most);
    if (temperature != nullptr) temperature(device_, kTemperatureGpu, &degrees);
    if (reasons != nullptr) reasons(device_, &bits);
    state.sm_clock_mhz = sm;
    state.memory_clock_mhz = memory;
    state.power_w = milliwatts / 1e3;
    state.power_limit_w = most / 1e3;
    state.temperature_c = degrees;
    state.slowdown_reasons = static_cast<double>(bits);
    return state;
  }

 private:
  template <typename Signature>
  Signature* function(const char* name) const {
    return library_ == nullptr ? nullptr : reinterpret_cast<Signature*>(::dlsym(library_, name));
  }

  // The library counts all GPUs; CUDA only those of CUDA_VISIBLE_DEVICES, which names them by number or UUID.
  void find_device() {
    const char* visible = std::getenv("CUDA_VISIBLE_DEVICES");
    std::string first = visible == nullptr ? "0" : visible;
    first = first.substr(0, first.find(','));
    if (first.starts_with("GPU-")) {
      const auto by_uuid = function<int(const char*, Handle*)>("nvmlDeviceGetHandleByUUID");
      if (by_uuid == nullptr || by_uuid(first.c_str(), &device_) != kSuccess) device_ = nullptr;
      return;
    }
    char* end = nullptr;
    const long index = std::strtol(first.c_str(), &end, 10);
    const auto by_index = function<int(unsigned, Handle*)>("nvmlDeviceGetHandleByIndex_v2");
    const bool number = end != first.c_str() && index >= 0;
    if (!number || by_index == nullptr || by_index(static_cast<unsigned>(index), &device_) != kSuccess) {
      device_ = nullptr;
    }
  }

  void* library_ = nullptr;
  Handle device_ = nullptr;
};

}  // namespace

std::optional<GpuState> gpu_state() {
  static const Nvml nvml;
  return nvml.state();
}

}  // namespace slidedp
