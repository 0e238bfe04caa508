#include "model/calibration/database_kind.h"

#include <SQLiteCpp/SQLiteCpp.h>

#include "model/base/format.h"

namespace slidedp {

DatabaseKind database_kind(const std::filesystem::path& file) {
  std::error_code ignored;
  if (!std::filesystem::is_regular_file(file, ignored)) failf("{}: there is no such file.", file.string());
  try {
    SQLite::Database database(file.string(), SQLite::OPEN_READONLY);
    if (database.tableExists("samples") && database.tableExists("probe")) return DatabaseKind::profile;
    if (database.tableExists("runs") && database.tableExists("tasks")) return DatabaseKind::run;
  } catch (const SQLite::Exception& error) {
    failf("{}: cannot be read as a database: {}.", file.string(), error.what());
  }
  failf("{}: is neither a profile database (slidedp-profile --db) nor a run's log (run.db of slidedp-run).",
        file.string());
}

}  // namespace slidedp
