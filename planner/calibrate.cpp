#include "planner/calibrate.h"

#include <algorithm>
#include <iterator>

#include "model/base/atomic_file.h"
#include "model/base/format.h"
#include "model/calibration/database_kind.h"
#include "model/calibration/profile_store.h"
#include "model/calibration/recalibrate.h"

namespace slidedp {
namespace {

DatabaseKind kind_of(const std::vector<std::filesystem::path>& files) {
  const DatabaseKind kind = database_kind(files.front());
  for (const std::filesystem::path& file : files) {
    if (database_kind(file) != kind) {
      failf("--calibrate: {} and {} are databases of different kinds; give one profile database, or the logs of runs.",
            files.front().string(), file.string());
    }
  }
  return kind;
}

std::string notes_text(const ProfileRun& run) {
  std::string text;
  for (const std::string& note : run.spec.uncertainty.notes) text += "note: " + note + "\n";
  return text;
}

std::string from_profile(const CalibrateOptions& options) {
  const std::string file = options.databases.front().string();
  if (options.databases.size() > 1) fail("--calibrate: a profile is fitted from one profile database; give one.");
  if (!options.model.empty()) fail("--model: samples of a profile know the model that they were measured at.");
  const std::vector<int64_t> ids = stored_profiles(file);
  if (ids.empty()) failf("{}: holds no profile yet.", file);
  ProfileRun run = load_profile(file, options.profile.value_or(ids.back()));
  const HardwareSpec start = options.hardware.value_or(empty_profile(run.machine, run.backend, run.ranks));
  fit_profile(run, start);
  write_profile(run, options.out);
  return fmt::format("{}Profile {} of {} ({}, {}) fitted again and written to {}\n", notes_text(run),
                     options.profile.value_or(ids.back()), file, run.spec.name, utc_text(run.started_unix_s),
                     options.out.string());
}

std::string from_runs(const CalibrateOptions& options) {
  if (options.profile) fail("--profile: chooses from a profile database, but the files are logs of runs.");
  std::optional<ModelSpec> model;
  if (!options.model.empty()) model = load_model_spec(options.model);
  std::vector<LoggedRun> runs;
  for (const std::filesystem::path& file : options.databases) {
    std::vector<LoggedRun> more = load_runs(file, model);
    std::move(more.begin(), more.end(), std::back_inserter(runs));
  }
  const HardwareSpec hardware = options.hardware.value_or(runs.front().plan.hardware);
  const Recalibration result = recalibrate(runs, hardware);
  AtomicFile out(options.out);
  out.stream() << to_yaml(result.hardware);
  out.finish();
  out.commit();
  return recalibration_table(result) + fmt::format("Corrected profile written to {}\n", options.out.string());
}

}  // namespace

std::string calibrate(const CalibrateOptions& options) {
  for (const std::filesystem::path& input : options.databases) {
    std::error_code ignored;
    if (std::filesystem::equivalent(input, options.out, ignored)) {
      failf("--out {} is an input of this command; choose another name", options.out.string());
    }
  }
  return kind_of(options.databases) == DatabaseKind::profile ? from_profile(options) : from_runs(options);
}

}  // namespace slidedp
