#include "model/calibration/profile_store.h"

#include <SQLiteCpp/SQLiteCpp.h>
#include <unistd.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "model/base/format.h"

namespace slidedp {
namespace {

namespace fs = std::filesystem;

constexpr int kBusyTimeoutMs = 5000;

constexpr const char* kSchema = R"sql(
CREATE TABLE machine (
  id INTEGER PRIMARY KEY, host TEXT NOT NULL, processor TEXT NOT NULL, kernel TEXT NOT NULL, cores INTEGER NOT NULL,
  memory_bytes INTEGER NOT NULL, last_level_cache_bytes INTEGER NOT NULL, gpu TEXT NOT NULL,
  UNIQUE (host, processor, kernel, cores, memory_bytes, last_level_cache_bytes, gpu));
CREATE TABLE profile (
  id INTEGER PRIMARY KEY, machine_id INTEGER NOT NULL REFERENCES machine(id), started_at INTEGER NOT NULL,
  seconds REAL NOT NULL, backend TEXT NOT NULL, ranks INTEGER NOT NULL, model TEXT NOT NULL, quick INTEGER NOT NULL,
  rounds INTEGER NOT NULL, program_version TEXT NOT NULL, other_threads REAL NOT NULL);
CREATE TABLE probe (
  profile_id INTEGER NOT NULL REFERENCES profile(id), key TEXT NOT NULL, method TEXT NOT NULL, waived TEXT,
  seconds REAL NOT NULL, PRIMARY KEY (profile_id, key));
CREATE TABLE samples (
  profile_id INTEGER NOT NULL REFERENCES profile(id), machine_id INTEGER NOT NULL REFERENCES machine(id),
  probe TEXT NOT NULL, parameters TEXT NOT NULL, value_name TEXT NOT NULL, value REAL NOT NULL, unit TEXT NOT NULL,
  repeat_index INTEGER NOT NULL, taken_at INTEGER NOT NULL, round INTEGER NOT NULL);
CREATE INDEX samples_by_probe ON samples (profile_id, probe);
)sql";

// Version 2 was written by program version 0.1.0.
constexpr int kOldVersion = 2;
constexpr const char* kFromOldVersion = R"sql(
ALTER TABLE profile ADD COLUMN rounds INTEGER NOT NULL DEFAULT 1;
ALTER TABLE profile ADD COLUMN program_version TEXT NOT NULL DEFAULT '0.1.0';
ALTER TABLE profile ADD COLUMN other_threads REAL NOT NULL DEFAULT 0;
ALTER TABLE samples ADD COLUMN round INTEGER NOT NULL DEFAULT 0;
)sql";

[[noreturn]] void fail_sql(const fs::path& file, const SQLite::Exception& error) {
  failf("{}: the profile database cannot be used: {}. Choose another file for --db.", file.string(), error.what());
}

// The schema's version; 0 for a database without tables. Throws for one that this program does not know.
int schema_of(SQLite::Database& database, const fs::path& file) {
  const int version = database.execAndGet("PRAGMA user_version").getInt();
  const int tables = database.execAndGet("SELECT count(*) FROM sqlite_master").getInt();
  if (tables == 0) return 0;
  if ((version != kProfileStoreVersion && version != kOldVersion) || !database.tableExists("samples")) {
    failf("{}: is not a profile database of version {} (its version is {}); choose another file for --db.",
          file.string(), kProfileStoreVersion, version);
  }
  return version;
}

// In a transaction.
void make_schema(SQLite::Database& database, const fs::path& file) {
  const int version = schema_of(database, file);
  if (version == kProfileStoreVersion) return;
  database.exec(version == kOldVersion ? kFromOldVersion : kSchema);
  database.exec(fmt::format("PRAGMA user_version = {}", kProfileStoreVersion));
}

int64_t machine_id(SQLite::Database& database, const MachineIdentity& machine) {
  const auto bind = [&](SQLite::Statement& statement) {
    statement.bind(1, machine.host);
    statement.bind(2, machine.processor);
    statement.bind(3, machine.kernel);
    statement.bind(4, machine.cores);
    statement.bind(5, machine.memory_bytes);
    statement.bind(6, machine.last_level_cache);
    statement.bind(7, machine.gpu);
  };
  SQLite::Statement insert(database,
                           "INSERT OR IGNORE INTO machine (host, processor, kernel, cores, memory_bytes, "
                           "last_level_cache_bytes, gpu) VALUES (?, ?, ?, ?, ?, ?, ?)");
  bind(insert);
  insert.exec();
  SQLite::Statement select(database,
                           "SELECT id FROM machine WHERE host = ? AND processor = ? AND kernel = ? AND cores = ? AND "
                           "memory_bytes = ? AND last_level_cache_bytes = ? AND gpu = ?");
  bind(select);
  select.executeStep();
  return select.getColumn(0).getInt64();
}

int64_t insert_profile(SQLite::Database& database, const ProfileRun& run, int64_t machine) {
  SQLite::Statement insert(
      database,
      "INSERT INTO profile (machine_id, started_at, seconds, backend, ranks, model, quick, rounds, "
      "program_version, other_threads) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)");
  insert.bind(1, machine);
  insert.bind(2, run.started_unix_s);
  insert.bind(3, run.seconds);
  insert.bind(4, run.backend);
  insert.bind(5, run.ranks);
  insert.bind(6, run.model);
  insert.bind(7, run.quick ? 1 : 0);
  insert.bind(8, run.rounds);
  insert.bind(9, run.program_version);
  insert.bind(10, run.other_threads);
  insert.exec();
  return database.getLastInsertRowid();
}

void insert_probe(SQLite::Database& database, int64_t profile, const ProbeOutcome& outcome) {
  SQLite::Statement insert(database,
                           "INSERT INTO probe (profile_id, key, method, waived, seconds) VALUES (?, ?, ?, ?, ?)");
  insert.bind(1, profile);
  insert.bind(2, outcome.key);
  insert.bind(3, outcome.method);
  if (outcome.waived)
    insert.bind(4, *outcome.waived);
  else
    insert.bind(4);
  insert.bind(5, outcome.seconds);
  insert.exec();
}

void insert_samples(SQLite::Database& database, int64_t profile, int64_t machine, const ProbeOutcome& outcome) {
  SQLite::Statement insert(database,
                           "INSERT INTO samples (profile_id, machine_id, probe, parameters, value_name, value, unit, "
                           "repeat_index, taken_at, round) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)");
  insert.bind(1, profile);
  insert.bind(2, machine);
  insert.bind(3, outcome.key);
  insert.bind(9, outcome.finished_unix_s);
  for (const Measurement& measurement : outcome.measurements) {
    insert.bind(4, nlohmann::json(measurement.parameters).dump());
    insert.bind(5, measurement.value_name);
    insert.bind(7, measurement.unit);
    for (size_t i = 0; i < measurement.repeats.size(); ++i) {
      insert.bind(6, measurement.repeats[i]);
      insert.bind(8, static_cast<int>(i));
      insert.bind(10, measurement.round_of(i));
      insert.exec();
      insert.reset();  // keeps the bindings
    }
  }
}

// `rounds`: whether the database knows of rounds.
ProfileRun read_run(SQLite::Database& database, int64_t profile, bool rounds) {
  SQLite::Statement select(
      database, fmt::format("SELECT host, processor, kernel, cores, memory_bytes, last_level_cache_bytes, gpu, "
                            "started_at, seconds, backend, ranks, model, quick, {} FROM profile JOIN machine ON "
                            "machine.id = machine_id WHERE profile.id = ?",
                            rounds ? "rounds, program_version, other_threads" : "1, '0.1.0', 0"));
  select.bind(1, profile);
  select.executeStep();
  int column = 0;
  const auto next = [&] { return select.getColumn(column++); };
  ProfileRun run;
  run.machine.host = next().getString();
  run.machine.processor = next().getString();
  run.machine.kernel = next().getString();
  run.machine.cores = next().getInt();
  run.machine.memory_bytes = next().getInt64();
  run.machine.last_level_cache = next().getInt64();
  run.machine.gpu = next().getString();
  run.started_unix_s = next().getInt64();
  run.seconds = next().getDouble();
  run.backend = next().getString();
  run.ranks = next().getInt();
  run.model = next().getString();
  run.quick = next().getInt() != 0;
  run.rounds = next().getInt();
  run.program_version = next().getString();
  run.other_threads = next().getDouble();
  return run;
}

void read_outcomes(SQLite::Database& database, int64_t profile, ProfileRun& run) {
  SQLite::Statement select(database,
                           "SELECT key, method, waived, seconds FROM probe WHERE profile_id = ? ORDER BY rowid");
  select.bind(1, profile);
  while (select.executeStep()) {
    ProbeOutcome& outcome = run.outcomes.emplace_back();
    outcome.key = select.getColumn(0).getString();
    outcome.method = select.getColumn(1).getString();
    if (!select.getColumn(2).isNull()) outcome.waived = select.getColumn(2).getString();
    outcome.seconds = select.getColumn(3).getDouble();
  }
}

void read_samples(SQLite::Database& database, int64_t profile, bool rounds, ProbeOutcome& outcome) {
  SQLite::Statement select(database,
                           fmt::format("SELECT parameters, value_name, value, unit, repeat_index, taken_at, {} FROM "
                                       "samples WHERE profile_id = ? AND probe = ? ORDER BY rowid",
                                       rounds ? "round" : "0"));
  select.bind(1, profile);
  select.bind(2, outcome.key);
  while (select.executeStep()) {
    if (select.getColumn(4).getInt() == 0) {
      Measurement& measurement = outcome.measurements.emplace_back();
      measurement.parameters =
          nlohmann::json::parse(select.getColumn(0).getString()).get<std::map<std::string, double>>();
      measurement.value_name = select.getColumn(1).getString();
      measurement.unit = select.getColumn(3).getString();
    }
    Measurement& measurement = outcome.measurements.back();
    measurement.repeats.push_back(select.getColumn(2).getDouble());
    measurement.rounds.push_back(select.getColumn(6).getInt());
    outcome.finished_unix_s = select.getColumn(5).getInt64();
  }
  for (Measurement& measurement : outcome.measurements) {
    measurement.steady = relative_error(measurement.repeats) < kSteady;
  }
}

}  // namespace

void check_profile_store(const fs::path& file) {
  const fs::path folder = fs::absolute(file).parent_path();
  if (!fs::is_directory(folder)) {
    failf("--db {}: the folder {} does not exist; create it first.", file.string(), folder.string());
  }
  if (fs::is_directory(file)) failf("--db {}: is a folder; name a file.", file.string());
  if (!fs::exists(file)) {
    if (::access(folder.c_str(), W_OK) != 0) {
      failf("--db {}: the folder {} is not writable; choose another.", file.string(), folder.string());
    }
    return;
  }
  try {
    SQLite::Database database(file.string(), SQLite::OPEN_READWRITE, kBusyTimeoutMs);
    schema_of(database, file);
  } catch (const SQLite::Exception& error) {
    fail_sql(file, error);
  }
}

int64_t save_profile(const ProfileRun& run, const fs::path& file) {
  try {
    SQLite::Database database(file.string(), SQLite::OPEN_READWRITE | SQLite::OPEN_CREATE, kBusyTimeoutMs);
    SQLite::Transaction transaction(database, SQLite::TransactionBehavior::IMMEDIATE);
    make_schema(database, file);
    const int64_t machine = machine_id(database, run.machine);
    const int64_t profile = insert_profile(database, run, machine);
    for (const ProbeOutcome& outcome : run.outcomes) {
      insert_probe(database, profile, outcome);
      insert_samples(database, profile, machine, outcome);
    }
    transaction.commit();
    return profile;
  } catch (const SQLite::Exception& error) {
    fail_sql(file, error);
  }
}

std::vector<int64_t> stored_profiles(const fs::path& file) {
  try {
    SQLite::Database database(file.string(), SQLite::OPEN_READONLY, kBusyTimeoutMs);
    std::vector<int64_t> ids;
    if (schema_of(database, file) == 0) return ids;
    SQLite::Statement select(database, "SELECT id FROM profile ORDER BY id");
    while (select.executeStep()) ids.push_back(select.getColumn(0).getInt64());
    return ids;
  } catch (const SQLite::Exception& error) {
    fail_sql(file, error);
  }
}

ProfileRun load_profile(const fs::path& file, int64_t profile) {
  const std::vector<int64_t> ids = stored_profiles(file);
  if (std::find(ids.begin(), ids.end(), profile) == ids.end()) {
    failf("{}: holds no profile {}; there are {}.", file.string(), profile,
          ids.empty() ? "none" : fmt::format("{}", fmt::join(ids, ", ")));
  }
  try {
    SQLite::Database database(file.string(), SQLite::OPEN_READONLY, kBusyTimeoutMs);
    const bool rounds = schema_of(database, file) > kOldVersion;
    ProfileRun run = read_run(database, profile, rounds);
    read_outcomes(database, profile, run);
    for (ProbeOutcome& outcome : run.outcomes) read_samples(database, profile, rounds, outcome);
    return run;
  } catch (const SQLite::Exception& error) {
    fail_sql(file, error);
  } catch (const nlohmann::json::exception& error) {
    failf("{}: a sample's parameters are not a JSON object of numbers: {}.", file.string(), error.what());
  }
}

}  // namespace slidedp
