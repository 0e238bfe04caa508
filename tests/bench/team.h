// Threads on cores of their own, each with memory that it alone touches.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "runtime/host/arena.h"

namespace slidedp::bench {

class Team {
 public:
  // One thread on each of `cores`; `bytes` of memory shared equally among them, in huge pages where the system gives
  // them.
  Team(const std::vector<int>& cores, int64_t bytes);
  ~Team();
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  int threads() const { return static_cast<int>(threads_.size()); }
  int64_t part_bytes() const { return part_bytes_; }
  std::byte* part(int thread) const {
    return static_cast<std::byte*>(memory_.data()) + thread * part_bytes_;
  }  // page aligned
  // Every thread writes its part anew: 0x3c in every byte, a positive normal number both as bf16 and as fp32.
  void fill();
  // Runs work(thread) on all; seconds from the first start to the last end.
  double run(const std::function<void(int)>& work);

 private:
  struct Control;
  void loop(int thread);

  Arena memory_;
  int64_t part_bytes_ = 0;
  std::unique_ptr<Control> control_;
  std::vector<std::jthread> threads_;
};

}  // namespace slidedp::bench
