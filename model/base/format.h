// fmt-based helpers. Never include this where torch headers are seen (torch carries another fmt).
#pragma once

#include <fmt/format.h>

#include <cstdint>
#include <string>
#include <string_view>

#include "model/base/error.h"

namespace slidedp {

template <typename... Args>
[[noreturn]] void failf(fmt::format_string<Args...> pattern, Args&&... args) {
  throw Error(fmt::format(pattern, std::forward<Args>(args)...));
}

// "22.0 GiB", "4.5 MiB", "17 B".
std::string format_bytes(int64_t bytes);
// "1.61 s", "12.3 ms", "45 us".
std::string format_seconds(double seconds);
// Reads "22GiB", "512 MiB", "100GB", "4096" (bytes; binary and decimal units). Throws Error that names `what`.
int64_t parse_bytes(std::string_view text, std::string_view what);

}  // namespace slidedp
