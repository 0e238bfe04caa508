// Which of the project's databases a file is.
#pragma once

#include <cstdint>
#include <filesystem>

namespace slidedp {

enum class DatabaseKind : uint8_t { profile, run };  // of slidedp-profile, of slidedp-run

// Looks at the tables. Throws Error that names the file if it is neither, or no database at all.
DatabaseKind database_kind(const std::filesystem::path& file);

}  // namespace slidedp
