// Exactly sized host memory, allocated once.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>

#include "runtime/host/memory_limit.h"
#include "runtime/host/numa.h"

namespace slidedp {

// Move-only owner of one zeroed region (mmap), aligned to a huge page and backed by huge pages where the system gives
// them. Sub-ranges are handed out in order, 4096-byte aligned. Pages are committed at first touch (touch() below, or
// the thread that uses them first); until then the kernel still counts them as available, and whoever makes several
// arenas compares their sum with available_host_memory().
class Arena {
 public:
  Arena() = default;
  // Throws Error with the numbers (wanted, available, by which limit) before anything is touched.
  Arena(int64_t bytes, const std::string& what);
  // On one memory node, if it has room.
  Arena(int64_t bytes, const std::string& what, const NumaNode& node);
  Arena(Arena&&) noexcept;
  Arena& operator=(Arena&&) noexcept;
  ~Arena();
  void* take(int64_t bytes);  // throws std::logic_error past the end
  void* data() const { return data_; }
  int64_t bytes() const { return bytes_; }
  const NumaNode& node() const { return node_; }
  // What `take` will consume for a range of this size.
  static int64_t footprint(int64_t bytes);

 private:
  void* data_ = nullptr;
  int64_t bytes_ = 0, used_ = 0;
  NumaNode node_;
};

// Commits all pages of the arenas with `threads` threads in all, each running on the cores of the arena's node: many
// threads fault memory in several times faster than one. `progress` gets the bytes done and the bytes in all, about
// once a second, on the calling thread. Throws Error if the system runs out of memory meanwhile.
using TouchProgress = std::function<void(int64_t done, int64_t total)>;
void touch(std::span<const Arena* const> arenas, int threads, const TouchProgress& progress);

}  // namespace slidedp
