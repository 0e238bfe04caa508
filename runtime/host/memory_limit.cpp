#include "runtime/host/memory_limit.h"

#include <sys/resource.h>

#include <algorithm>
#include <atomic>
#include <charconv>
#include <fstream>
#include <limits>
#include <optional>
#include <sstream>

#include "model/base/format.h"

namespace slidedp {
namespace {

namespace fs = std::filesystem;

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

std::optional<int64_t> meminfo(const fs::path& root, std::string_view wanted) {
  std::ifstream in(root / "proc/meminfo");
  for (std::string line; std::getline(in, line);) {
    std::istringstream fields(line);
    std::string key;
    int64_t kib = 0;
    if (fields >> key >> kib && key == wanted) return kib * 1024;
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

// What a cgroup leaves of its limit, and that limit.
struct CgroupRoom {
  HostMemoryLimit left;
  int64_t bound = 0;
};

// Version 1 writes "no limit" as the largest number of whole pages.
constexpr int64_t kNoLimit = int64_t{1} << 60;

// Lowers `room` to what the cgroup at `group` (a path below `mount`) and its parents leave. A container often sees only
// its own cgroup, mounted as the root, while /proc/self/cgroup names the path outside: folders that do not exist are
// passed over on the way up.
void apply_cgroup(const fs::path& mount, const fs::path& group, const CgroupFiles& files,
                  std::optional<CgroupRoom>& room) {
  for (fs::path path = group.relative_path();; path = path.parent_path()) {
    const fs::path folder = path.empty() ? mount : mount / path;
    const auto bound = read_number(folder / files.limit);
    const auto use = read_number(folder / files.use);
    if (bound && use && *bound < kNoLimit) {
      const int64_t cache = sum_of_keys(folder / "memory.stat", files.cache);
      const int64_t left = std::max<int64_t>(*bound - std::max<int64_t>(*use - cache, 0), 0);
      if (!room || left < room->left.bytes) room = CgroupRoom{{left, "cgroup " + folder.string()}, *bound};
    }
    if (path.empty()) break;
  }
}

std::optional<CgroupRoom> cgroup_room(const fs::path& root) {
  std::ifstream in(root / "proc/self/cgroup");
  std::optional<CgroupRoom> room;
  for (std::string line; std::getline(in, line);) {  // "ID:CONTROLLERS:PATH"; version 2 has no controllers
    const auto first = line.find(':');
    const auto second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string controllers = fmt::format(",{},", line.substr(first + 1, second - first - 1));
    const fs::path group = line.substr(second + 1);
    if (controllers == ",,") {
      apply_cgroup(root / "sys/fs/cgroup", group, kVersion2, room);
      apply_cgroup(root / "sys/fs/cgroup/unified", group, kVersion2, room);  // both versions side by side
    } else if (controllers.find(",memory,") != std::string::npos) {
      apply_cgroup(root / "sys/fs/cgroup/memory", group, kVersion1, room);
    }
  }
  return room;
}

std::atomic<int64_t> declared_bytes = 0;

}  // namespace

HostMemoryLimit available_host_memory(const fs::path& root) {
  const auto available = meminfo(root, "MemAvailable:");
  if (!available)
    failf("{} has no MemAvailable line: SlideDP needs Linux 3.14 or newer.", (root / "proc/meminfo").string());
  const HostMemoryLimit system{*available, "MemAvailable"};
  const auto room = cgroup_room(root);
  if (!room) return system;
  const bool grows = room->bound > meminfo(root, "MemTotal:").value_or(0);
  return grows || room->left.bytes < system.bytes ? room->left : system;
}

HostMemoryLimit available_host_memory() {
  if (const int64_t declared = declared_bytes; declared > 0) return {declared, "--host-memory"};
  return available_host_memory("/");
}

void declare_host_memory(int64_t bytes) { declared_bytes = bytes; }

std::string locked_memory_note(int64_t bytes) {
  rlimit limit{};
  if (getrlimit(RLIMIT_MEMLOCK, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return "";
  if (static_cast<int64_t>(limit.rlim_cur) >= bytes) return "";
  return fmt::format(
      "this process may lock {} of memory (RLIMIT_MEMLOCK), less than the {} of the training state; where the driver "
      "obeys that limit, copies to the GPU are not pinned and run at about a quarter of the link's rate. Raise it with "
      "ulimit -l unlimited",
      format_bytes(static_cast<int64_t>(limit.rlim_cur)), format_bytes(bytes));
}

std::string huge_page_note(const fs::path& root) {
  std::ifstream in(root / "sys/kernel/mm/transparent_hugepage/enabled");
  std::string modes;
  std::getline(in, modes);
  if (modes.find("[always]") != std::string::npos || modes.find("[madvise]") != std::string::npos) return "";
  return "this system gives no transparent huge pages, so allocating the training state takes several times as long "
         "and Adam loses a few percent to address translation; allow them with: echo madvise > "
         "/sys/kernel/mm/transparent_hugepage/enabled";
}

}  // namespace slidedp
