// Every raw sample of every profiling run, in SQLite. Runs are appended.
//
// Tables (schema version in PRAGMA user_version):
//   machine  id, host, processor, kernel, cores, memory_bytes, last_level_cache_bytes, gpu
//   profile  id, machine_id, started_at (Unix s), seconds, backend, ranks, model, quick
//   probe    profile_id, key, method, waived (reason or NULL), seconds
//   samples  profile_id, machine_id, probe, parameters (JSON object name -> number), value_name, value, unit,
//            repeat_index, taken_at (Unix s, when the probe ended)
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "model/calibration/profile_record.h"

namespace slidedp {

inline constexpr int kProfileStoreVersion = 2;

struct StoredSample {
  int64_t profile = 0;
  std::string probe;
  std::map<std::string, double> parameters;
  std::string value_name;
  double value = 0;
  std::string unit;
  int repeat = 0;
};

// Throws Error if save() could not work: missing folder, no permission, not a database, another schema version. Creates
// nothing.
void check_profile_store(const std::filesystem::path& file);

// Appends the run in one transaction and returns its id (profile.id). Throws Error that names the file.
int64_t save_profile(const ProfileRun& run, const std::filesystem::path& file);

// Samples of one run, in the order of measurement.
std::vector<StoredSample> load_samples(const std::filesystem::path& file, int64_t profile);

}  // namespace slidedp
