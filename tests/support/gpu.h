// For tests that need a GPU: they are skipped visibly where there is none, and fail there with SLIDEDP_REQUIRE_GPU=1.
#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <string_view>
#include <thread>

#include "runtime/device/cuda/gpus.h"

namespace slidedp::test {

inline int visible_gpus() { return look_at_gpus(0).visible; }

inline bool gpu_is_required() {
  const char* required = std::getenv("SLIDEDP_REQUIRE_GPU");
  return required != nullptr && std::string_view(required) == "1";
}

// Ends the program if it is not gone after two minutes: a hang becomes a failure.
class Watchdog {
 public:
  Watchdog() : thread_([this] { watch(); }) {}
  ~Watchdog() {
    {
      const std::lock_guard lock(mutex_);
      done_ = true;
    }
    wake_.notify_all();
    thread_.join();
  }

 private:
  void watch() {
    std::unique_lock lock(mutex_);
    if (wake_.wait_for(lock, std::chrono::minutes(2), [this] { return done_; })) return;
    const auto* test = ::testing::UnitTest::GetInstance()->current_test_info();
    std::fprintf(stderr, "%s.%s hangs\n", test->test_suite_name(), test->name());
    std::abort();
  }
  std::mutex mutex_;
  std::condition_variable wake_;
  bool done_ = false;
  std::thread thread_;  // last
};

// Base of fixtures; every test has a watchdog.
template <typename Base = ::testing::Test>
class NeedsGpu : public Base {
 protected:
  void SetUp() override {
    if (visible_gpus() > 0) return;
    if (gpu_is_required()) FAIL() << "SLIDEDP_REQUIRE_GPU=1, but this process sees no GPU";
    GTEST_SKIP() << "no GPU";
  }

 private:
  Watchdog watchdog_;
};

}  // namespace slidedp::test
