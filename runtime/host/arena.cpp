#include "runtime/host/arena.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <fstream>
#include <limits>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <utility>

#include "model/base/format.h"
#include "model/base/types.h"

namespace slidedp {
namespace {

namespace fs = std::filesystem;

constexpr int64_t kPage = 4096;

// A file that holds one number. nullopt: no such file, or "max".
std::optional<int64_t> read_number(const fs::path& file) {
  std::ifstream in(file);
  std::string text;
  if (!(in >> text)) return std::nullopt;
  uint64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return static_cast<int64_t>(std::min<uint64_t>(value, std::numeric_limits<int64_t>::max()));
}

// Sum of the values of `keys` in a file of "key value" lines; 0 where absent.
int64_t sum_of_keys(const fs::path& file, std::initializer_list<std::string_view> keys) {
  std::ifstream in(file);
  int64_t sum = 0, value = 0;
  for (std::string key; in >> key >> value;) {
    if (std::find(keys.begin(), keys.end(), key) != keys.end()) sum += value;
  }
  return sum;
}

std::optional<int64_t> mem_available(const fs::path& root) {
  std::ifstream in(root / "proc/meminfo");
  for (std::string line; std::getline(in, line);) {
    std::istringstream fields(line);
    std::string key;
    int64_t kib = 0;
    if (fields >> key >> kib && key == "MemAvailable:") return kib * 1024;
  }
  return std::nullopt;
}

// Names of the files of one cgroup version.
struct CgroupFiles {
  const char* limit;
  const char* use;
  std::initializer_list<std::string_view> cache;  // keys of memory.stat: pages of files, dropped under pressure
};
const CgroupFiles kVersion1{
    "memory.limit_in_bytes", "memory.usage_in_bytes", {"total_inactive_file", "total_active_file"}};
const CgroupFiles kVersion2{"memory.max", "memory.current", {"inactive_file", "active_file"}};

// Lowers `limit` to what the cgroup at `group` (a path below `mount`) and its parents leave. A container often sees
// only its own cgroup, mounted as the root, while /proc/self/cgroup names the path outside: folders that do not exist
// are passed over on the way up.
void apply_cgroup(const fs::path& mount, const fs::path& group, const CgroupFiles& files, HostMemoryLimit& limit) {
  for (fs::path path = group.relative_path();; path = path.parent_path()) {
    const fs::path folder = path.empty() ? mount : mount / path;
    const auto bound = read_number(folder / files.limit);
    const auto use = read_number(folder / files.use);
    if (bound && use) {
      const int64_t cache = sum_of_keys(folder / "memory.stat", files.cache);
      const int64_t left = *bound - std::max<int64_t>(*use - cache, 0);
      if (left < limit.bytes) limit = {std::max<int64_t>(left, 0), "cgroup " + folder.string()};
    }
    if (path.empty()) break;
  }
}

void apply_cgroups(const fs::path& root, HostMemoryLimit& limit) {
  std::ifstream in(root / "proc/self/cgroup");
  for (std::string line; std::getline(in, line);) {  // "ID:CONTROLLERS:PATH"; version 2 has no controllers
    const auto first = line.find(':');
    const auto second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string controllers = fmt::format(",{},", line.substr(first + 1, second - first - 1));
    const fs::path group = line.substr(second + 1);
    if (controllers == ",,") {
      apply_cgroup(root / "sys/fs/cgroup", group, kVersion2, limit);
      apply_cgroup(root / "sys/fs/cgroup/unified", group, kVersion2, limit);  // both versions side by side
    } else if (controllers.find(",memory,") != std::string::npos) {
      apply_cgroup(root / "sys/fs/cgroup/memory", group, kVersion1, limit);
    }
  }
}

}  // namespace

HostMemoryLimit available_host_memory(const fs::path& root) {
  const auto available = mem_available(root);
  if (!available)
    failf("{} has no MemAvailable line: SlideDP needs Linux 3.14 or newer.", (root / "proc/meminfo").string());
  HostMemoryLimit limit{*available, "MemAvailable"};
  apply_cgroups(root, limit);
  return limit;
}

int64_t available_host_bytes() { return available_host_memory().bytes; }

Arena::Arena(int64_t bytes, const std::string& what) : bytes_(bytes) {
  if (bytes < 0) throw std::logic_error("Arena: negative size for " + what);
  if (bytes == 0) return;
  const HostMemoryLimit limit = available_host_memory();
  if (bytes > limit.bytes) {
    failf("{} needs {} of host memory, but only {} are available (limit: {}). Free memory or choose a smaller plan.",
          what, format_bytes(bytes), format_bytes(limit.bytes), limit.source);
  }
  void* data = mmap(nullptr, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (data == MAP_FAILED) {
    failf("{} needs {} of host memory, but the system refuses them: {}.", what, format_bytes(bytes),
          std::strerror(errno));
  }
  data_ = data;
}

Arena::Arena(Arena&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)),
      bytes_(std::exchange(other.bytes_, 0)),
      used_(std::exchange(other.used_, 0)) {}

Arena& Arena::operator=(Arena&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  std::swap(used_, other.used_);
  return *this;
}

Arena::~Arena() {
  if (data_ != nullptr) munmap(data_, static_cast<size_t>(bytes_));
}

int64_t Arena::footprint(int64_t bytes) { return round_up(bytes, kPage); }

void* Arena::take(int64_t bytes) {
  if (bytes < 0 || used_ + bytes > bytes_) {
    throw std::logic_error("Arena: " + std::to_string(bytes) + " bytes wanted at " + std::to_string(used_) + " of " +
                           std::to_string(bytes_));
  }
  void* range = static_cast<std::byte*>(data_) + used_;
  // The last range need not be padded: an arena of exactly that size has room for it.
  used_ = std::min(used_ + footprint(bytes), bytes_);
  return range;
}

}  // namespace slidedp
