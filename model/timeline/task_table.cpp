#include "model/timeline/task_table.h"

#include <SQLiteCpp/SQLiteCpp.h>

#include <string>

#include "model/base/format.h"

namespace slidedp {
namespace {

constexpr const char* kCreate = R"(
CREATE TABLE IF NOT EXISTS tasks (
  run_id      INTEGER NOT NULL,
  source      TEXT    NOT NULL CHECK (source IN ('predicted', 'measured')),
  step        INTEGER NOT NULL,
  task        INTEGER NOT NULL,
  kind        TEXT    NOT NULL,
  lane        TEXT    NOT NULL,
  rank        INTEGER,
  unit        INTEGER,
  chunk       INTEGER,
  micro_batch INTEGER,
  wave        INTEGER,
  start_s     REAL    NOT NULL,
  end_s       REAL    NOT NULL,
  bytes       INTEGER NOT NULL,
  flops       REAL    NOT NULL,
  elements    INTEGER NOT NULL,
  PRIMARY KEY (run_id, source, step, task)
) WITHOUT ROWID
)";

constexpr const char* kInsert = R"(
INSERT OR REPLACE INTO tasks (run_id, source, step, task, kind, lane, rank, unit, chunk, micro_batch, wave, start_s,
                              end_s, bytes, flops, elements)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
)";

int64_t bytes_of(const Work& work) {
  if (work.link_bytes > 0) return work.link_bytes;
  const int64_t host = work.host_read_bytes + work.host_write_bytes;
  return host > 0 ? host : work.device_bytes;
}

void bind_index(SQLite::Statement& statement, int position, int value) {
  if (value >= 0) {
    statement.bind(position, value);
  } else {
    statement.bind(position);  // NULL
  }
}

void insert_record(SQLite::Statement& insert, int64_t run_id, const Timeline& timeline, const TaskRecord& record,
                   const Task& task) {
  int position = 0;
  insert.bind(++position, run_id);
  insert.bind(++position, std::string(name(timeline.source)));
  insert.bind(++position, timeline.step);
  insert.bind(++position, record.task);
  insert.bind(++position, std::string(name(task.kind)));
  insert.bind(++position, std::string(name(task.lane.kind)));
  for (int index : {task.rank, task.unit, task.chunk, task.micro_batch, task.wave}) {
    bind_index(insert, ++position, index);
  }
  insert.bind(++position, record.start_s);
  insert.bind(++position, record.end_s);
  insert.bind(++position, bytes_of(task.work));
  insert.bind(++position, task.work.flops);
  insert.bind(++position, task.work.elements);
  insert.exec();
  insert.reset();
}

}  // namespace

void create_task_table(SQLite::Database& database) { database.exec(kCreate); }

void insert_tasks(SQLite::Database& database, int64_t run_id, const StepGraph& graph, const Timeline& timeline) {
  SQLite::Transaction transaction(database);
  SQLite::Statement insert(database, kInsert);
  for (const TaskRecord& record : timeline.records) {
    if (record.end_s <= record.start_s) continue;
    insert_record(insert, run_id, timeline, record, graph.tasks[static_cast<size_t>(record.task)]);
  }
  transaction.commit();
}

void write_tasks(const std::filesystem::path& file, int64_t run_id, const StepGraph& graph,
                 const std::vector<Timeline>& timelines) {
  try {
    SQLite::Database database(file.string(), SQLite::OPEN_READWRITE | SQLite::OPEN_CREATE);
    create_task_table(database);
    for (const Timeline& timeline : timelines) insert_tasks(database, run_id, graph, timeline);
  } catch (const SQLite::Exception& error) {
    failf("Cannot write task records to the database {}: {}.", file.string(), error.what());
  }
}

}  // namespace slidedp
