// One clock for everything that this process measures: tasks on devices and on the host share its origin.
#pragma once

#include <chrono>

namespace slidedp {

// Seconds since the first call in this process, steady.
inline double process_seconds() {
  static const auto origin = std::chrono::steady_clock::now();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - origin).count();
}

}  // namespace slidedp
