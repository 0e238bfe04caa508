// Counts what ATen's CPU allocator hands out: the temporaries of all compute lanes of this process.
#pragma once

#include <cstdint>

namespace slidedp {

struct AllocatorUse {
  int64_t in_use = 0;  // bytes
  int64_t peak = 0;    // bytes, since the last reset
};

// Wraps ATen's default CPU allocator; memory handed out before is not counted. Idempotent, thread-safe.
void install_counting_allocator();
AllocatorUse counted_memory();
void reset_counted_peak();  // peak = in_use

}  // namespace slidedp
