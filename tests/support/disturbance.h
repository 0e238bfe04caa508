// Random delays and faults in every lane and in the pool, through the interfaces that an executor gets. The same seed
// makes the same delays; what they do to the order of threads differs from run to run.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "runtime/device/backends.h"
#include "runtime/exec/executor.h"

namespace slidedp::testing {

// The n-th task of this kind (1 is the first) throws, on one rank or on whichever comes to it. All copies to a device
// count as h2d, all copies from one as d2h.
struct Fault {
  TaskKind kind{};
  int call = 1;
  int rank = kAnyRank;
  static constexpr int kAnyRank = -1;
};

// Must outlive the backends and executors that it disturbs.
class Disturbance {
 public:
  explicit Disturbance(uint32_t seed, std::vector<Fault> faults = {}) : seed_(seed), faults_(std::move(faults)) {}
  // Replaces the backend's parts by ones that pass everything on, disturbed.
  void wrap(Backend& backend);
  PoolHook pool_hook() {
    return [this](const Task& task) { pass(task.kind, Fault::kAnyRank); };
  }
  // Before a task's work, on the thread that does it: counts, delays, perhaps throws "injected fault in KIND".
  void pass(TaskKind kind, int rank);
  int64_t operations() const { return operations_.load(std::memory_order_relaxed); }
  bool thrown() const { return thrown_.load(std::memory_order_relaxed); }  // whether a fault has been injected
  // The devices then refuse to register host memory.
  bool refuse_registration = false;
  static std::string message(TaskKind kind) { return "injected fault in " + std::string(name(kind)); }

 private:
  const uint32_t seed_;
  std::atomic<int64_t> operations_ = 0;
  std::atomic<bool> thrown_ = false;
  std::mutex mutex_;
  std::vector<Fault> faults_;  // `call` counts down
};

// Ends the process with a message if it still lives after `limit`: a hang shows where it is, and never as a timeout of
// the whole suite. The limit is far above what the slowest machine needs.
class Watchdog {
 public:
  explicit Watchdog(std::string what, std::chrono::seconds limit = std::chrono::minutes(5));
  ~Watchdog();
  Watchdog(const Watchdog&) = delete;
  Watchdog& operator=(const Watchdog&) = delete;

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool done_ = false;
  std::thread thread_;
};

}  // namespace slidedp::testing
