// Host memory for probes that must miss the caches, as the training state does.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>

#include "runtime/host/arena.h"

namespace slidedp {

// One touched region that hands out its ranges round and round, so that by the time a range comes again everything else
// has passed through the caches. Not thread-safe.
class RollingBuffer {
 public:
  RollingBuffer(int64_t bytes, const std::string& what) : arena_(bytes, what) {
    // Any non-zero bytes: a page that was never written is not memory yet. 0x3c3c is a positive normal number of about
    // 0.01 both as bf16 and as fp32.
    std::memset(arena_.data(), 0x3c, static_cast<size_t>(bytes));
  }
  void* data() const { return arena_.data(); }
  int64_t bytes() const { return arena_.bytes(); }
  // The next range, at most bytes() long.
  void* next(int64_t bytes) {
    if (position_ + bytes > arena_.bytes()) position_ = 0;
    void* range = static_cast<std::byte*>(arena_.data()) + position_;
    position_ += bytes;
    return range;
  }

 private:
  Arena arena_;
  int64_t position_ = 0;
};

}  // namespace slidedp
