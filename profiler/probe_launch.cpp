// What it costs to start work on a stream.
#include <semaphore>

#include "model/base/format.h"
#include "profiler/device_lane.h"
#include "profiler/kernel_bench.h"
#include "profiler/probe.h"
#include "runtime/device/backends.h"

namespace slidedp {
namespace {

constexpr int kHops = 100;
constexpr int64_t kCastElements = kBlockElements;  // as small as a kernel can be

class LaunchProbe final : public Probe {
 public:
  std::string key() const override { return "launch.latency"; }
  std::string method() const override {
    return "launches of a cast of 64 elements with an event each: in a row on one stream (in_row), and in a chain that "
           "alternates between two streams, each waiting for the other's event (hop); the hop is the launch latency of "
           "the profile, since tasks of a step wait for other lanes; events alone (event) and calls from an idle "
           "stream to the host (host_function) for the record";
  }

  std::vector<Measurement> run(const ProbeContext& context) const override {
    const ModelSpec measured = measured_model(context);
    Backend backend = kernel_backend(context, measured, kernel_shapes(context, measured).front());
    Device& device = *backend.devices.front();
    const DeviceMemory from = device.allocate(4 * kCastElements, "launch probe's elements");
    const DeviceMemory to = device.allocate(2 * kCastElements, "launch probe's elements");
    const std::function<void()> kernel = [&] {
      backend.compute.front()->cast(from.data(), DType::fp32, to.data(), DType::bf16, kCastElements);
    };
    DeviceLane one(device, "one"), two(device, "two");
    const std::unique_ptr<Event> event = device.create_event();
    const Harness harness = context.harness(4);
    std::vector<Measurement> result;
    result.push_back(harness.measure({"in_row", "s", {}, {}, true}, [&] {
      return timed(one,
                   [&](Device& on, Stream& stream) {
                     for (int i = 0; i < kHops; ++i) {
                       on.launch(stream, kernel);
                       on.record(stream, *event);
                     }
                   }) /
             kHops;
    }));
    result.push_back(harness.measure({"hop", "s", {}, {}, true}, [&] {
      return timed(one,
                   [&](Device& on, Stream& stream) {
                     for (int i = 0; i < kHops / 2; ++i) {
                       hop(on, stream, two.stream(), *event, kernel);
                       hop(on, two.stream(), stream, *event, kernel);
                     }
                   }) /
             kHops;
    }));
    result.push_back(harness.measure({"event", "s", {}, {}, true}, [&] {
      return timed(one,
                   [&](Device& on, Stream& stream) {
                     for (int i = 0; i < kHops; ++i) on.record(stream, *event);
                   }) /
             kHops;
    }));
    result.push_back(harness.measure({"host_function", "s", {}, {}, true}, [&] { return call_back(one); }));
    return result;
  }

 private:
  // From asking an idle stream to call until it has called, one after the other.
  static double call_back(DeviceLane& lane) {
    const double begin = steady_seconds();
    for (int i = 0; i < kHops; ++i) {
      std::binary_semaphore called(0);
      lane.device().notify(lane.stream(), [&called] { called.release(); });
      called.acquire();
    }
    return (steady_seconds() - begin) / kHops;
  }

  static void hop(Device& device, Stream& from, Stream& to, Event& event, const std::function<void()>& kernel) {
    device.launch(from, kernel);
    device.record(from, event);
    device.wait(to, event);
  }
};

}  // namespace

std::unique_ptr<Probe> make_launch_latency() { return std::make_unique<LaunchProbe>(); }

}  // namespace slidedp
