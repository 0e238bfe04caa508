// Copies of one lane between registered rolling host memory and device memory.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "model/base/format.h"
#include "profiler/device_lane.h"
#include "profiler/progress_curve.h"
#include "profiler/rolling.h"

namespace slidedp {

// Registered rolling host memory of one lane. The device must outlive it.
class RegisteredBuffer {
 public:
  RegisteredBuffer(Device& device, int64_t bytes) : device_(&device), buffer_(bytes, "a copy probe's host buffer") {
    device.register_host(buffer_.data(), buffer_.bytes());
  }
  ~RegisteredBuffer() { device_->unregister_host(buffer_.data()); }
  RegisteredBuffer(const RegisteredBuffer&) = delete;
  RegisteredBuffer& operator=(const RegisteredBuffer&) = delete;
  void* next(int64_t bytes) { return buffer_.next(bytes); }

 private:
  Device* device_;
  RollingBuffer buffer_;
};

enum class Direction { h2d, d2h };

// Copies `bytes` at a time, the next range of the host memory each time. The device must outlive it.
class Copier {
 public:
  Copier(Device& device, Direction direction, int64_t host_bytes, int64_t most)
      : direction_(direction),
        host_(device, host_bytes),
        memory_(device.allocate(most, "a copy probe's device buffer")),
        lane_(device, direction == Direction::h2d ? "h2d" : "d2h") {}
  // What is on its way must not outlive the memory.
  ~Copier() { lane_.drain(); }
  Copier(const Copier&) = delete;
  Copier& operator=(const Copier&) = delete;

  void issue(int64_t bytes, int pieces) {
    piece_bytes_ = bytes;
    lane_.issue([&](Device& device, Stream& stream) {
      for (int i = 0; i < pieces; ++i) copy(device, stream, bytes);
    });
  }

  // As issue(), with an event after each piece, for curve().
  void issue_marked(int64_t bytes, int pieces) {
    piece_bytes_ = bytes;
    while (marks_.size() < static_cast<size_t>(pieces)) marks_.push_back(lane_.device().create_event());
    marks_.resize(static_cast<size_t>(pieces));
    lane_.issue([&](Device& device, Stream& stream) {
      for (const auto& mark : marks_) {
        copy(device, stream, bytes);
        device.record(stream, *mark);
      }
    });
  }
  // Bytes copied over time, once the lane has finished what issue_marked() issued.
  ProgressCurve curve() {
    ProgressCurve curve{{lane_.start_s(), 0}};
    double bytes = 0;
    for (const auto& mark : marks_) {
      curve.push_back({lane_.device().timestamp(*mark), bytes += static_cast<double>(piece_bytes_)});
    }
    return curve;
  }
  DeviceLane& lane() { return lane_; }

 private:
  void copy(Device& device, Stream& stream, int64_t bytes) {
    if (direction_ == Direction::h2d) {
      device.copy_to_device(stream, memory_.data(), host_.next(bytes), bytes);
    } else {
      device.copy_to_host(stream, host_.next(bytes), memory_.data(), bytes);
    }
  }

  Direction direction_;
  RegisteredBuffer host_;
  DeviceMemory memory_;
  DeviceLane lane_;
  std::vector<std::unique_ptr<Event>> marks_;
  int64_t piece_bytes_ = 0;
};

// The value that `attempt` gives. It gives none (an empty optional) where what started together did not run at the same
// time, since other programs held the cores: then once more. Throws Error that begins with `what` after some attempts.
template <typename Attempt>
auto first_overlap(const std::string& what, Attempt attempt) {
  constexpr int kTries = 20;
  for (int i = 0; i < kTries; ++i) {
    if (auto value = attempt()) return *value;
  }
  failf(
      "{} that started together did not run at the same time, {} times in a row; measure while nothing else uses this "
      "machine.",
      what, kTries);
}

}  // namespace slidedp
