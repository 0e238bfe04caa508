#include "model/base/format.h"

#include <array>
#include <charconv>
#include <cmath>
#include <limits>

namespace slidedp {

std::string format_bytes(int64_t bytes) {
  constexpr std::array<const char*, 5> units{"B", "KiB", "MiB", "GiB", "TiB"};
  double value = static_cast<double>(bytes);
  size_t unit = 0;
  while (std::abs(value) >= 1024 && unit + 1 < units.size()) {
    value /= 1024;
    ++unit;
  }
  return unit == 0 ? fmt::format("{} B", bytes) : fmt::format("{:.1f} {}", value, units[unit]);
}

std::string format_seconds(double seconds) {
  const double magnitude = std::abs(seconds);
  if (magnitude >= 1 || magnitude == 0) return fmt::format("{:.2f} s", seconds);
  if (magnitude >= 1e-3) return fmt::format("{:.1f} ms", seconds * 1e3);
  return fmt::format("{:.0f} us", seconds * 1e6);
}

int64_t parse_bytes(std::string_view text, std::string_view what) {
  struct Unit {
    std::string_view suffix;
    double factor;
  };
  constexpr double ki = 1024;
  constexpr std::array<Unit, 10> units{{{"KiB", ki},
                                        {"MiB", ki * ki},
                                        {"GiB", ki * ki * ki},
                                        {"TiB", ki * ki * ki * ki},
                                        {"kB", 1e3},
                                        {"KB", 1e3},
                                        {"MB", 1e6},
                                        {"GB", 1e9},
                                        {"TB", 1e12},
                                        {"B", 1}}};
  double number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  std::string_view suffix(end, static_cast<size_t>(text.data() + text.size() - end));
  while (!suffix.empty() && suffix.front() == ' ') suffix.remove_prefix(1);
  double factor = suffix.empty() ? 1 : 0;
  for (const Unit& unit : units) {
    if (suffix == unit.suffix) factor = unit.factor;
  }
  const double bytes = number * factor;
  if (error != std::errc{} || factor == 0 || !(bytes >= 0) ||
      bytes > static_cast<double>(std::numeric_limits<int64_t>::max() / 2)) {
    failf("{}: \"{}\" is not a size in bytes; write for example 22GiB, 512MiB or 4096", what, text);
  }
  return std::llround(bytes);
}

}  // namespace slidedp
