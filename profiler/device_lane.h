// Timing of asynchronous device work with the device's own events, as the executor times tasks.
#pragma once

#include <algorithm>
#include <functional>
#include <memory>
#include <span>
#include <string>

#include "runtime/device/device.h"

namespace slidedp {

// One stream of one device with events around the work of one repeat. The device must outlive it.
class DeviceLane {
 public:
  DeviceLane(Device& device, const std::string& name)
      : device_(&device),
        stream_(device.create_stream(name)),
        start_(device.create_event()),
        end_(device.create_event()) {}

  // Issues the work between two events; returns at once.
  void issue(const std::function<void(Device&, Stream&)>& work) {
    device_->record(*stream_, *start_);
    work(*device_, *stream_);
    device_->record(*stream_, *end_);
  }
  // Waits for it; rethrows the failure of asynchronous work.
  void finish() { device_->synchronize(*stream_); }
  // Waits as finish() does, but keeps a failure to itself: for destructors.
  void drain() noexcept {
    try {
      finish();
    } catch (...) {
      // The failure has been, or will be, thrown to whoever waits for the work's result.
    }
  }
  double start_s() const { return device_->timestamp(*start_); }
  double end_s() const { return device_->timestamp(*end_); }
  double seconds() const { return end_s() - start_s(); }
  Device& device() { return *device_; }
  Stream& stream() { return *stream_; }

 private:
  Device* device_;
  std::unique_ptr<Stream> stream_;
  std::unique_ptr<Event> start_, end_;
};

// Seconds of one piece of work alone on a lane.
inline double timed(DeviceLane& lane, const std::function<void(Device&, Stream&)>& work) {
  lane.issue(work);
  lane.finish();
  return lane.seconds();
}

// After issue() on all lanes: waits, and returns the seconds from the moment that the last lane had started until the
// last has ended: what a collective takes once all ranks have come.
inline double joint_seconds(std::span<DeviceLane> lanes) {
  double start = 0, end = 0;
  for (DeviceLane& lane : lanes) {
    lane.finish();
    start = std::max(start, lane.start_s());
    end = std::max(end, lane.end_s());
  }
  return end - start;
}

}  // namespace slidedp
