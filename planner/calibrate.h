// slidedp-plan --calibrate: a hardware profile from what is stored of earlier measurements or runs.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "model/spec/hardware_spec.h"

namespace slidedp {

struct CalibrateOptions {
  std::vector<std::filesystem::path> databases;  // one profile database, or the logs of runs
  std::optional<int64_t> profile;                // of a profile database; the latest if not said
  std::optional<HardwareSpec> hardware;          // to correct, or for what the stored profile did not measure
  std::filesystem::path model;                   // for logs that do not hold their model's config
  std::filesystem::path out;
};

// Writes the profile and returns a report for people. The kind of database is taken from the files themselves. Throws
// Error, and then nothing is written.
std::string calibrate(const CalibrateOptions& options);

}  // namespace slidedp
