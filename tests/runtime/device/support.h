// Helpers of the device tests.
#pragma once

#include <chrono>
#include <cstdint>
#include <exception>
#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "runtime/device/cpu/cpu_device.h"

namespace slidedp::test {

// Work that waits until the test opens it. Opens itself at the end, so that a failed assertion does not hang: declare
// it after the streams that run its work.
class Gate {
 public:
  ~Gate() { open(); }
  void open() {
    std::lock_guard lock(mutex_);
    if (!opened_) promise_.set_value();
    opened_ = true;
  }
  std::function<void()> work() const {
    return [future = future_] { future.wait(); };
  }

 private:
  std::mutex mutex_;
  bool opened_ = false;
  std::promise<void> promise_;
  std::shared_future<void> future_ = promise_.get_future().share();
};

// Collects what a device's error handler gets.
class Errors {
 public:
  explicit Errors(Device& device) {
    device.set_error_handler([this](std::exception_ptr error) {
      std::lock_guard lock(mutex_);
      try {
        std::rethrow_exception(error);
      } catch (const std::exception& e) {
        messages_.emplace_back(e.what());
      }
    });
  }
  std::vector<std::string> messages() const {
    std::lock_guard lock(mutex_);
    return messages_;
  }

 private:
  mutable std::mutex mutex_;
  std::vector<std::string> messages_;
};

// Shakes the order of threads; no assertion depends on the length.
inline void random_delay(uint32_t seed) {
  std::minstd_rand random(seed * 2654435761u + 1);
  const auto microseconds = random() % 200;
  if (microseconds >= 50) std::this_thread::sleep_for(std::chrono::microseconds(microseconds));
}

}  // namespace slidedp::test
