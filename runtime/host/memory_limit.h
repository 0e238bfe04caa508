// What the system lets this process have of the host's memory.
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
// its use, plus the page cache of files that the kernel would drop first. Where a cgroup may have more than MemTotal
// the machine's memory grows with use, and the cgroup decides alone. `root` is prefixed to /proc and /sys (tests).
HostMemoryLimit available_host_memory(const std::filesystem::path& root);
// Of this machine; or what declare_host_memory() was told.
HostMemoryLimit available_host_memory();
// The user's word (--host-memory) wins over what the system reports; 0 takes it back. For the whole process.
void declare_host_memory(int64_t bytes);

// What a limit or setting of the system will cost, in one sentence; "" if nothing.
std::string locked_memory_note(int64_t bytes);
std::string huge_page_note(const std::filesystem::path& root = "/");

}  // namespace slidedp
