// Every raw sample of every profiling run, in SQLite. Runs are appended.
//
// Tables (schema version in PRAGMA user_version):
//   machine  id, host, processor, kernel, cores, memory_bytes, last_level_cache_bytes, gpu
//   profile  id, machine_id, started_at (Unix s), seconds, backend, ranks, model, quick, rounds, program_version,
//            other_threads (of other programs that ran at the start)
//   probe    profile_id, key, method, waived (reason or NULL), seconds
//   samples  profile_id, machine_id, probe, parameters (JSON object name -> number), value_name, value, unit,
//            repeat_index, taken_at (Unix s, when the probe ended), round
// Version 2 had no rounds (all samples are of round 0), program_version or other_threads; it is read, and adding a run
// to it makes it version 3.
#pragma once

#include <cstdint>
#include <filesystem>
#include <vector>

#include "model/calibration/profile_record.h"

namespace slidedp {

inline constexpr int kProfileStoreVersion = 3;

// Throws Error if save() could not work: missing folder, no permission, not a database, another schema version. Creates
// nothing.
void check_profile_store(const std::filesystem::path& file);

// Appends the run in one transaction and returns its id (profile.id). Throws Error that names the file.
int64_t save_profile(const ProfileRun& run, const std::filesystem::path& file);

// Ids of the runs in it, oldest first.
std::vector<int64_t> stored_profiles(const std::filesystem::path& file);

// One run as it was saved, not fitted yet. Throws Error that names the ids there are if it has none with this id.
ProfileRun load_profile(const std::filesystem::path& file, int64_t profile);

}  // namespace slidedp
