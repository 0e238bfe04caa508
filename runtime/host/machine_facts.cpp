#include "runtime/host/machine_facts.h"

#include <sys/utsname.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <fstream>
#include <string_view>

#include "runtime/host/worker_cores.h"

namespace slidedp {
namespace {

// The text after "KEY ... : " in the first line that begins with KEY, without surrounding blanks; "" if there is none.
std::string first_value(const char* file, std::string_view key) {
  std::ifstream in(file);
  for (std::string line; std::getline(in, line);) {
    if (!line.starts_with(key)) continue;
    const size_t colon = line.find(':');
    if (colon == std::string::npos) continue;
    const size_t begin = line.find_first_not_of(" \t", colon + 1);
    if (begin == std::string::npos) continue;
    return line.substr(begin, line.find_last_not_of(" \t") + 1 - begin);
  }
  return "";
}

}  // namespace

int usable_cores() {
  if (const auto allowed = allowed_cores(); !allowed.empty()) return static_cast<int>(allowed.size());
  return static_cast<int>(std::max(sysconf(_SC_NPROCESSORS_ONLN), 1L));
}

std::vector<MachineFact> machine_facts() {
  std::vector<MachineFact> facts;
  if (const std::string cpu = first_value("/proc/cpuinfo", "model name"); !cpu.empty()) facts.push_back({"cpu", cpu});
  facts.push_back({"cores", std::to_string(usable_cores())});
  // "16318412 kB"
  if (const std::string memory = first_value("/proc/meminfo", "MemTotal"); !memory.empty()) {
    facts.push_back({"memory_bytes", std::to_string(std::stoll(memory) * int64_t{1024})});
  }
  utsname system{};
  if (uname(&system) == 0) {
    facts.push_back({"kernel", std::string(system.sysname) + " " + system.release + " " + system.machine});
  }
  return facts;
}

CpuTime cpu_time() {
  // "cpu user nice system idle iowait irq softirq steal ...", in clock ticks; see proc(5).
  std::ifstream stat("/proc/stat");
  std::string label;
  std::array<double, 8> ticks{};
  stat >> label;
  for (double& value : ticks) stat >> value;
  if (!stat || label != "cpu") return {};
  const auto per_second = static_cast<double>(sysconf(_SC_CLK_TCK));
  return {(ticks[0] + ticks[1] + ticks[2] + ticks[5] + ticks[6]) / per_second, ticks[7] / per_second};
}

}  // namespace slidedp
