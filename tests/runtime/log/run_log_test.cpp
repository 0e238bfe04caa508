#include "runtime/log/run_log.h"

#include <SQLiteCpp/SQLiteCpp.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmath>
#include <fstream>
#include <limits>
#include <thread>

#include "model/base/error.h"

namespace slidedp {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::MatchesRegex;

class RunLogFile : public ::testing::Test {
 protected:
  RunLogFile() { std::filesystem::create_directories(folder_); }
  ~RunLogFile() override { std::filesystem::remove_all(folder_); }

  // One value of the file, read by a connection of its own; "NULL" for NULL.
  std::string value(const std::string& query) const {
    SQLite::Database database(file_.string());
    SQLite::Statement statement(database, query);
    if (!statement.executeStep()) return "no row";
    return statement.isColumnNull(0) ? "NULL" : statement.getColumn(0).getString();
  }
  // The message of the Error that opening the file for a run gives; "" if it opens.
  std::string refusal() const {
    try {
      const RunLog log(file_, {});
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  }

  const std::filesystem::path folder_ =
      std::filesystem::temp_directory_path() / ("slidedp_run_log_" + std::to_string(::getpid()) + "_" +
                                                ::testing::UnitTest::GetInstance()->current_test_info()->name());
  const std::filesystem::path file_ = folder_ / "run.db";
};

TEST_F(RunLogFile, HoldsARunFromStartToEnd) {
  {
    RunLog log(file_, {"0.1.0", "slidedp-run --steps 2", "llama-30x576", 42});
    EXPECT_EQ(value("SELECT status FROM runs"), "running");
    EXPECT_EQ(value("SELECT ended_at FROM runs"), "NULL");
    log.finish(RunStatus::failed, "The disk is full.");
  }
  EXPECT_EQ(value("SELECT program_version FROM runs"), "0.1.0");
  EXPECT_EQ(value("SELECT command_line FROM runs"), "slidedp-run --steps 2");
  EXPECT_EQ(value("SELECT model_fingerprint FROM runs"), "llama-30x576");
  EXPECT_EQ(value("SELECT seed FROM runs"), "42");
  EXPECT_EQ(value("SELECT status FROM runs"), "failed");
  EXPECT_EQ(value("SELECT error FROM runs"), "The disk is full.");
  EXPECT_EQ(value("SELECT ended_at >= started_at FROM runs"), "1");
  EXPECT_THAT(value("SELECT started_at FROM runs"),
              MatchesRegex("[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}\\.[0-9]{3}Z"));
  EXPECT_THAT(value("SELECT uuid FROM runs"),
              MatchesRegex("[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}"));
  EXPECT_EQ(value("PRAGMA user_version"), "1");
  EXPECT_EQ(value("PRAGMA journal_mode"), "wal");
}

TEST_F(RunLogFile, HoldsSteps) {
  RunLog log(file_, {});
  log.write_step({.step = 0,
                  .loss = 2.5,
                  .gradient_norm = 1.25,
                  .tokens = 512,
                  .target_tokens = 100,
                  .step_s = 0.5,
                  .tokens_per_s = 1024,
                  .learning_rate = 1e-4,
                  .clip_factor = 0.75,
                  .skipped = false,
                  .predicted_step_s = 0.625});
  log.write_step({.step = 1, .loss = std::nan(""), .gradient_norm = std::nullopt, .skipped = true});
  const auto row = [&](int step) {
    return value(
        "SELECT ifnull(loss, 'NULL') || ' ' || ifnull(gradient_norm, 'NULL') || ' ' || tokens || ' ' || target_tokens "
        "|| ' ' || step_s || ' ' || tokens_per_s || ' ' || learning_rate || ' ' || clip_factor || ' ' || skipped || ' "
        "' "
        "|| ifnull(predicted_step_s, 'NULL') FROM steps WHERE run_id = " +
        std::to_string(log.run_id()) + " AND step = " + std::to_string(step));
  };
  EXPECT_EQ(row(0), "2.5 1.25 512 100 0.5 1024.0 0.0001 0.75 0 0.625");
  EXPECT_EQ(row(1), "NULL NULL 0 0 0.0 0.0 0.0 1.0 1 NULL");
  EXPECT_THROW(log.write_step({.step = 1}), Error);  // a step happens once
}

TEST_F(RunLogFile, HoldsTasksPlanAndMachine) {
  StepGraph graph;
  graph.plan.ranks = 1;
  Task task;
  task.kind = TaskKind::d2h;
  task.lane = {LaneKind::d2h, 0};
  task.rank = 0;
  task.work.link_bytes = 77;
  graph.tasks = {task};
  RunLog log(file_, {});
  Timeline timeline{TimelineSource::predicted, 5, 1.0, {{0, 0.25, 0.75}}};
  log.write_tasks(graph, timeline);
  timeline.source = TimelineSource::measured;
  log.write_tasks(graph, timeline);
  EXPECT_EQ(value("SELECT group_concat(source || kind || step || '/' || bytes) FROM tasks"),
            "measuredd2h5/77,predictedd2h5/77");

  log.write_plan("schema: slidedp.plan/1\n");
  EXPECT_EQ(value("SELECT yaml FROM plan"), "schema: slidedp.plan/1\n");
  log.write_machine({{"cpu", "old"}, {"torch", "2.11.0"}});
  log.write_machine({{"cpu", "new"}});
  EXPECT_EQ(value("SELECT group_concat(key || '=' || value) FROM machine"), "cpu=new,torch=2.11.0");
}

TEST_F(RunLogFile, TakesSeveralRuns) {
  int64_t first = 0;
  {
    RunLog log(file_, {.seed = std::numeric_limits<uint64_t>::max()});
    first = log.run_id();
    log.finish(RunStatus::ok);
  }
  RunLog log(file_, {});
  EXPECT_NE(log.run_id(), first);
  EXPECT_EQ(value("SELECT count(DISTINCT uuid) FROM runs"), "2");
  EXPECT_EQ(value("SELECT group_concat(status) FROM (SELECT status FROM runs ORDER BY id)"), "ok,running");
  EXPECT_EQ(value("SELECT seed FROM runs ORDER BY id"), "-1");  // the same 64 bits
  EXPECT_EQ(value("SELECT error FROM runs ORDER BY id"), "NULL");
}

TEST_F(RunLogFile, ARunThatDiesLeavesAReadableFile) {
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    RunLog log(file_, {});
    log.write_step({.step = 0, .loss = 3});
    _exit(0);  // no destructor runs, as in a crash
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  ASSERT_EQ(status, 0);
  EXPECT_EQ(value("SELECT status FROM runs"), "running");
  EXPECT_EQ(value("SELECT loss FROM steps"), "3.0");
  EXPECT_EQ(refusal(), "");  // and the next run goes on in it
  EXPECT_EQ(value("SELECT count(*) FROM runs"), "2");
}

TEST_F(RunLogFile, RefusesAnotherSchemaVersion) {
  { const RunLog log(file_, {}); }
  SQLite::Database(file_.string(), SQLite::OPEN_READWRITE).exec("PRAGMA user_version = 2");
  EXPECT_THAT(refusal(), AllOf(HasSubstr(file_.string()), HasSubstr("schema version 2")));
  EXPECT_EQ(value("SELECT count(*) FROM runs"), "1");
}

TEST_F(RunLogFile, RefusesAnotherDatabaseAndLeavesItAlone) {
  SQLite::Database(file_.string(), SQLite::OPEN_READWRITE | SQLite::OPEN_CREATE).exec("CREATE TABLE mine (x)");
  EXPECT_THAT(refusal(), AllOf(HasSubstr(file_.string()), HasSubstr("not a run log")));
  EXPECT_EQ(value("SELECT group_concat(name) FROM sqlite_master"), "mine");
  EXPECT_EQ(value("PRAGMA journal_mode"), "delete");
}

TEST_F(RunLogFile, RefusesAFileThatIsNoDatabase) {
  std::ofstream(file_) << std::string(2000, 'x');
  EXPECT_THAT(refusal(), HasSubstr(file_.string()));
}

TEST_F(RunLogFile, NamesAFolderThatIsNotThere) {
  std::filesystem::remove_all(folder_);
  EXPECT_THAT(refusal(), HasSubstr(file_.string()));
}

TEST_F(RunLogFile, TakesWritesFromSeveralThreads) {
  RunLog log(file_, {});
  constexpr int kThreads = 4, kSteps = 50;
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&log, t] {
      for (int s = 0; s < kSteps; ++s) {
        log.write_step({.step = t * kSteps + s});
        log.write_machine({{"thread", std::to_string(t)}});
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(value("SELECT count(*) FROM steps"), std::to_string(kThreads * kSteps));
}

TEST(MachineFacts, TellWhatTheSystemSays) {
  std::vector<std::string> keys;
  for (const MachineFact& fact : machine_facts()) {
    keys.push_back(fact.key);
    EXPECT_FALSE(fact.value.empty()) << fact.key;
    if (fact.key == "cores") {
      EXPECT_GE(std::stoi(fact.value), 1);
    }
    if (fact.key == "memory_bytes") {
      EXPECT_EQ(std::stoll(fact.value) / 4096, sysconf(_SC_PHYS_PAGES) * sysconf(_SC_PAGESIZE) / 4096);
    }
    if (fact.key == "kernel") {
      EXPECT_THAT(fact.value, HasSubstr("Linux"));
    }
  }
  EXPECT_THAT(keys, ::testing::IsSupersetOf({"cores", "memory_bytes", "kernel"}));
}

}  // namespace
}  // namespace slidedp
