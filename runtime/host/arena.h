// Exactly sized host memory, allocated once.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>

namespace slidedp {

struct HostMemoryLimit {
  int64_t bytes = 0;   // what this process may still allocate
  std::string source;  // which limit binds, e.g. "MemAvailable" or "cgroup /sys/fs/cgroup/user.slice"
};

// The smallest of MemAvailable and what each cgroup (v1, v2) from this process's up to the root leaves: its limit minus
// its use, plus the page cache of files that the kernel would drop first. `root` is prefixed to /proc and /sys (tests).
HostMemoryLimit available_host_memory(const std::filesystem::path& root = "/");
// The same, in bytes.
int64_t available_host_bytes();

// Move-only owner of one zeroed region (mmap), page aligned. Sub-ranges are handed out in order, 4096-byte aligned.
// Pages are committed at first touch, so that the thread that uses them decides their NUMA node; until then the kernel
// still counts them as available, and whoever makes several arenas compares their sum with available_host_bytes().
class Arena {
 public:
  Arena() = default;
  // Throws Error with the numbers (wanted, available, by which limit) before anything is touched.
  Arena(int64_t bytes, const std::string& what);
  Arena(Arena&&) noexcept;
  Arena& operator=(Arena&&) noexcept;
  ~Arena();
  void* take(int64_t bytes);  // throws std::logic_error past the end
  void* data() const { return data_; }
  int64_t bytes() const { return bytes_; }
  // What `take` will consume for a range of this size.
  static int64_t footprint(int64_t bytes);

 private:
  void* data_ = nullptr;
  int64_t bytes_ = 0, used_ = 0;
};

}  // namespace slidedp
