#include "runtime/log/run_log.h"

#include <SQLiteCpp/SQLiteCpp.h>

#include <array>
#include <chrono>
#include <ctime>
#include <functional>
#include <mutex>
#include <random>

#include "model/base/format.h"
#include "model/timeline/task_table.h"

namespace slidedp {
namespace {

constexpr int kSchemaVersion = 1;
// How long a write waits for another program's write to the same file.
constexpr int kBusyMilliseconds = 10'000;

constexpr const char* kCreate = R"(
CREATE TABLE runs (
  id                INTEGER PRIMARY KEY,
  uuid              TEXT    NOT NULL UNIQUE,
  started_at        TEXT    NOT NULL,
  ended_at          TEXT,
  program_version   TEXT    NOT NULL,
  command_line      TEXT    NOT NULL,
  model_fingerprint TEXT    NOT NULL,
  seed              INTEGER NOT NULL,
  status            TEXT    NOT NULL CHECK (status IN ('running', 'ok', 'failed', 'interrupted')),
  error             TEXT
);
CREATE TABLE steps (
  run_id           INTEGER NOT NULL REFERENCES runs (id),
  step             INTEGER NOT NULL,
  loss             REAL,
  gradient_norm    REAL,
  tokens           INTEGER NOT NULL,
  target_tokens    INTEGER NOT NULL,
  step_s           REAL    NOT NULL,
  tokens_per_s     REAL    NOT NULL,
  learning_rate    REAL    NOT NULL,
  clip_factor      REAL,
  skipped          INTEGER NOT NULL,
  predicted_step_s REAL,
  PRIMARY KEY (run_id, step)
) WITHOUT ROWID;
CREATE TABLE plan (
  run_id INTEGER PRIMARY KEY REFERENCES runs (id),
  yaml   TEXT    NOT NULL
);
CREATE TABLE machine (
  run_id INTEGER NOT NULL REFERENCES runs (id),
  key    TEXT    NOT NULL,
  value  TEXT    NOT NULL,
  PRIMARY KEY (run_id, key)
) WITHOUT ROWID;
)";

// A random (version 4) UUID.
std::string make_uuid() {
  std::random_device random;
  std::array<uint32_t, 4> words{};
  for (uint32_t& word : words) word = static_cast<uint32_t>(random());
  words[1] = (words[1] & 0xffff0fffU) | 0x00004000U;
  words[2] = (words[2] & 0x3fffffffU) | 0x80000000U;
  return fmt::format("{:08x}-{:04x}-{:04x}-{:04x}-{:04x}{:08x}", words[0], words[1] >> 16, words[1] & 0xffff,
                     words[2] >> 16, words[2] & 0xffff, words[3]);
}

// "2026-01-31T12:00:00.123Z"
std::string utc_now() {
  const auto now = std::chrono::system_clock::now();
  const auto milliseconds =
      std::chrono::duration_cast<std::chrono::milliseconds>(now.time_since_epoch()).count() % 1000;
  const std::time_t seconds = std::chrono::system_clock::to_time_t(now);
  std::tm utc{};
  gmtime_r(&seconds, &utc);
  std::array<char, 32> text{};
  std::strftime(text.data(), text.size(), "%Y-%m-%dT%H:%M:%S", &utc);
  return fmt::format("{}.{:03}Z", text.data(), milliseconds);
}

void bind_optional(SQLite::Statement& statement, const char* key, const std::optional<double>& value) {
  if (value) {
    statement.bind(key, *value);
  } else {
    statement.bind(key);
  }
}

}  // namespace

std::string_view name(RunStatus status) {
  constexpr std::array<std::string_view, 4> names{"running", "ok", "failed", "interrupted"};
  return names[static_cast<size_t>(status)];
}

// The open file. All access is through `locked`, which serialises callers and turns SQLite's exceptions into Errors.
class RunLog::Database {
 public:
  explicit Database(const std::filesystem::path& file) : file_(file.string()) {
    locked([&] {
      database_.emplace(file_, SQLite::OPEN_READWRITE | SQLite::OPEN_CREATE, kBusyMilliseconds);
      prepare();
    });
  }

  void locked(const std::function<void()>& work) {
    const std::lock_guard lock(mutex_);
    try {
      work();
    } catch (const SQLite::Exception& error) {
      failf("Cannot write the run log {}: {}.", file_, error.what());
    }
  }
  SQLite::Database& sqlite() { return *database_; }

  int64_t run_id = 0;

 private:
  // Creates the tables in an empty file; accepts a file of this version; refuses any other.
  void prepare() {
    const int tables = database_->execAndGet("SELECT count(*) FROM sqlite_master").getInt();
    const int version = database_->execAndGet("PRAGMA user_version").getInt();
    if (tables > 0 && version == 0) {
      failf("{} is a SQLite database but not a run log: name another file, or remove this one.", file_);
    }
    if (version != 0 && version != kSchemaVersion) {
      failf(
          "The run log {} has schema version {}, and this program writes version {}: name another file, or use the "
          "program that wrote it.",
          file_, version, kSchemaVersion);
    }
    database_->exec("PRAGMA journal_mode = WAL");
    // In WAL mode a crash of the program loses nothing; a power cut may lose the last rows, never the file.
    database_->exec("PRAGMA synchronous = NORMAL");
    database_->exec("PRAGMA foreign_keys = ON");
    if (version == kSchemaVersion) return;
    SQLite::Transaction transaction(*database_);
    database_->exec(kCreate);
    create_task_table(*database_);
    database_->exec(fmt::format("PRAGMA user_version = {}", kSchemaVersion));
    transaction.commit();
  }

  std::string file_;
  std::mutex mutex_;
  std::optional<SQLite::Database> database_;
};

RunLog::RunLog(const std::filesystem::path& file, const RunInfo& run) : database_(std::make_unique<Database>(file)) {
  database_->locked([&] {
    SQLite::Statement insert(database_->sqlite(),
                             "INSERT INTO runs (uuid, started_at, program_version, command_line, model_fingerprint, "
                             "seed, status) VALUES (:uuid, :started, :version, :command, :model, :seed, 'running')");
    insert.bind(":uuid", make_uuid());
    insert.bind(":started", utc_now());
    insert.bind(":version", run.program_version);
    insert.bind(":command", run.command_line);
    insert.bind(":model", run.model_fingerprint);
    insert.bind(":seed", static_cast<int64_t>(run.seed));
    insert.exec();
    database_->run_id = database_->sqlite().getLastInsertRowid();
  });
}

RunLog::~RunLog() = default;

int64_t RunLog::run_id() const { return database_->run_id; }

void RunLog::write_step(const StepRow& row) {
  database_->locked([&] {
    SQLite::Statement insert(
        database_->sqlite(),
        "INSERT INTO steps (run_id, step, loss, gradient_norm, tokens, target_tokens, step_s, tokens_per_s, "
        "learning_rate, clip_factor, skipped, predicted_step_s) VALUES (:run, :step, :loss, :norm, :tokens, :targets, "
        ":step_s, :rate, :lr, :clip, :skipped, :predicted)");
    insert.bind(":run", database_->run_id);
    insert.bind(":step", row.step);
    insert.bind(":loss", row.loss);  // SQLite stores a NaN as NULL
    bind_optional(insert, ":norm", row.gradient_norm);
    insert.bind(":tokens", row.tokens);
    insert.bind(":targets", row.target_tokens);
    insert.bind(":step_s", row.step_s);
    insert.bind(":rate", row.tokens_per_s);
    insert.bind(":lr", row.learning_rate);
    insert.bind(":clip", row.clip_factor);
    insert.bind(":skipped", row.skipped ? 1 : 0);
    bind_optional(insert, ":predicted", row.predicted_step_s);
    insert.exec();
  });
}

void RunLog::write_tasks(const StepGraph& graph, const Timeline& timeline) {
  database_->locked([&] { insert_tasks(database_->sqlite(), database_->run_id, graph, timeline); });
}

void RunLog::write_plan(const std::string& yaml) {
  database_->locked([&] {
    SQLite::Statement insert(database_->sqlite(), "INSERT OR REPLACE INTO plan (run_id, yaml) VALUES (?, ?)");
    insert.bind(1, database_->run_id);
    insert.bind(2, yaml);
    insert.exec();
  });
}

void RunLog::write_machine(const std::vector<MachineFact>& facts) {
  database_->locked([&] {
    SQLite::Transaction transaction(database_->sqlite());
    SQLite::Statement insert(database_->sqlite(),
                             "INSERT OR REPLACE INTO machine (run_id, key, value) VALUES (?, ?, ?)");
    for (const MachineFact& fact : facts) {
      insert.bind(1, database_->run_id);
      insert.bind(2, fact.key);
      insert.bind(3, fact.value);
      insert.exec();
      insert.reset();
    }
    transaction.commit();
  });
}

void RunLog::finish(RunStatus status, const std::string& error) {
  database_->locked([&] {
    SQLite::Statement update(database_->sqlite(),
                             "UPDATE runs SET status = :status, error = :error, ended_at = :ended WHERE id = :run");
    update.bind(":status", std::string(name(status)));
    if (error.empty()) {
      update.bind(":error");
    } else {
      update.bind(":error", error);
    }
    update.bind(":ended", utc_now());
    update.bind(":run", database_->run_id);
    update.exec();
  });
}

}  // namespace slidedp
