#include "model/timeline/timeline.h"

#include <SQLiteCpp/SQLiteCpp.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <fstream>
#include <iterator>
#include <map>
#include <nlohmann/json.hpp>
#include <numeric>
#include <set>
#include <sstream>

#include "model/base/error.h"
#include "model/sim/simulator.h"
#include "model/timeline/comparison.h"
#include "model/timeline/task_table.h"
#include "tests/model/sim/graphs.h"

namespace slidedp {
namespace {

using ::testing::ElementsAre;
using testing::GraphMaker;
using ::testing::HasSubstr;

constexpr double kRounding = 1e-9;

// A folder of this test's own, removed at its end.
class TimelineFiles : public ::testing::Test {
 protected:
  TimelineFiles() { std::filesystem::create_directories(folder_); }
  ~TimelineFiles() override { std::filesystem::remove_all(folder_); }
  const std::filesystem::path folder_ =
      std::filesystem::temp_directory_path() / ("slidedp_timeline_" + std::to_string(::getpid()) + "_" +
                                                ::testing::UnitTest::GetInstance()->current_test_info()->name());
};

// One rank: copy -> compute -> d2h -> two updates side by side, the first needed by the next step's copy.
struct Example {
  Example() : maker(1, 2) {
    copy = maker.copy(TaskKind::h2d, 0, 2);
    compute = maker.compute(0, 3, {copy});
    other = maker.compute(0, 1);
    back = maker.copy(TaskKind::d2h, 0, 1, {compute});
    soon = maker.update(1, 0, {back}, 500);
    late = maker.update(2, 1, {back}, 500);
    skipped = maker.update(1, 2);
    maker.at(copy).previous_deps = {soon};
    maker.at(skipped).phases = phase_bit(Phase::first);
    maker.at(copy).chunk = 4;
    maker.at(compute).micro_batch = 2;
    graph = maker.finish();
    timeline.source = TimelineSource::measured;
    timeline.step = 7;
    timeline.step_s = 8;
    timeline.records = {{copy, 10, 12},     {compute, 12.5, 15.5}, {other, 15.5, 16.5}, {back, 15.5, 16.5},
                        {soon, 16.5, 17.5}, {late, 16.5, 18.5},    {skipped, 10, 10}};
  }
  GraphMaker maker;
  TaskId copy, compute, other, back, soon, late, skipped;
  StepGraph graph;
  Timeline timeline;
};

TEST(Totals, ChargeGapsToTheLastDependency) {
  const Example example;
  const auto totals = totals_by_kind(example.graph, example.timeline);
  const auto of = [&](TaskKind kind) { return totals[static_cast<size_t>(kind)]; };
  EXPECT_EQ(of(TaskKind::fwd).count, 2);
  EXPECT_NEAR(of(TaskKind::fwd).busy_s, 4, kRounding);
  EXPECT_EQ(of(TaskKind::update).count, 2);  // the skipped one took no time
  EXPECT_NEAR(of(TaskKind::update).busy_s, 3, kRounding);
  // The lane was last busy until 16.5 - 8 = 8.5; it waits for the copy until 12, then 0.5 s for itself.
  EXPECT_NEAR(of(TaskKind::h2d).exposed_s, 3.5, kRounding);
  EXPECT_NEAR(of(TaskKind::fwd).exposed_s, 0.5, kRounding);
  EXPECT_EQ(of(TaskKind::update).exposed_s, 0);
}

TEST(Totals, CountDependenciesOnThePreviousStepWhereTheyWere) {
  GraphMaker maker(1);
  const TaskId compute = maker.compute(0, 3);
  const TaskId update = maker.update(2, 0, {compute});
  maker.at(compute).previous_deps = {update};
  const Simulation s = simulate(maker.finish(), testing::round_machine());
  const auto totals = totals_by_kind(maker.finish(), s.timeline);
  EXPECT_NEAR(totals[static_cast<size_t>(TaskKind::update)].exposed_s, 2, kRounding);
  EXPECT_NEAR(totals[static_cast<size_t>(TaskKind::fwd)].exposed_s, 0, kRounding);
}

TEST(Totals, ExposedSecondsAddUpToTheIdleTimeOfTheComputeLanes) {
  std::mt19937 random(5);
  int checked = 0;
  for (int round = 0; round < 100; ++round) {
    const StepGraph graph = testing::random_graph(random);
    const Simulation s = simulate(graph, testing::random_machine(random));
    bool every_lane_works = s.settled;
    for (int rank = 0; rank < graph.ranks(); ++rank) {
      double busy = 0;
      for (TaskId task : graph.lanes[static_cast<size_t>(graph.lane_index({LaneKind::compute, rank}))]) {
        const TaskRecord& record = s.timeline.records[static_cast<size_t>(task)];
        busy += record.end_s - record.start_s;
      }
      every_lane_works = every_lane_works && busy > 0;
    }
    if (!every_lane_works) continue;  // a lane without work has no gaps: nothing waits
    ++checked;
    const auto totals = totals_by_kind(graph, s.timeline);
    const double exposed = std::accumulate(totals.begin(), totals.end(), 0.0,
                                           [](double sum, const KindTotals& t) { return sum + t.exposed_s; });
    // The steps repeat within 1e-3 of the step.
    EXPECT_NEAR(exposed, s.exposed.seconds, 1e-3 * s.step.seconds) << "round " << round;
  }
  EXPECT_GT(checked, 20);
}

TEST_F(TimelineFiles, TraceHoldsEveryTaskThatTookTime) {
  const Example example;
  Timeline predicted = example.timeline;
  predicted.source = TimelineSource::predicted;
  const std::filesystem::path file = folder_ / "trace.json";
  write_trace(example.graph, {predicted, example.timeline}, file);
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(folder_), {}), 1);  // nothing but the trace

  std::ifstream in(file);
  const nlohmann::json trace = nlohmann::json::parse(in);
  std::map<int, std::string> processes;
  std::map<std::pair<int, int>, std::string> threads;
  std::map<std::string, std::vector<nlohmann::json>> tasks;  // by process name
  for (const nlohmann::json& event : trace.at("traceEvents")) {
    const std::string name = event.at("name");
    if (name == "process_name") processes[event.at("pid")] = event.at("args").at("name");
    if (name == "thread_name") threads[{event.at("pid"), event.at("tid")}] = event.at("args").at("name");
  }
  for (const nlohmann::json& event : trace.at("traceEvents")) {
    if (event.at("ph") == "X") tasks[processes.at(event.at("pid"))].push_back(event);
  }
  for (const std::string source : {"predicted", "measured"}) {
    EXPECT_EQ(tasks["rank 0 (" + source + ")"].size(), 4u);
    std::set<std::string> workers;
    for (const nlohmann::json& event : tasks["host (" + source + ")"]) {
      workers.insert(threads.at({event.at("pid"), event.at("tid")}));
    }
    // The two updates overlap, so they lie on two workers; the skipped one is not there.
    EXPECT_THAT(workers, ElementsAre("update worker 0", "update worker 1"));
    EXPECT_EQ(tasks["host (" + source + ")"].size(), 2u);
  }
  const nlohmann::json compute = tasks["rank 0 (measured)"].at(1);
  EXPECT_EQ(compute.at("name"), example.graph.describe(example.compute));
  EXPECT_EQ(compute.at("cat"), "fwd");
  EXPECT_EQ((threads.at({compute.at("pid"), compute.at("tid")})), "compute");
  EXPECT_NEAR(compute.at("ts"), 2.5e6, 1e-3);  // microseconds since the first start
  EXPECT_NEAR(compute.at("dur"), 3e6, 1e-3);
  EXPECT_EQ(compute.at("args").at("step"), 7);
}

TEST_F(TimelineFiles, TraceRefusesAFolderThatIsNotThere) {
  const Example example;
  const std::filesystem::path file = folder_ / "missing" / "trace.json";
  try {
    write_trace(example.graph, {example.timeline}, file);
    FAIL() << "wrote into a missing folder";
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), HasSubstr(file.string()));
  }
}

TEST_F(TimelineFiles, TaskTableHoldsEveryColumn) {
  const Example example;
  Timeline predicted = example.timeline;
  predicted.source = TimelineSource::predicted;
  const std::filesystem::path file = folder_ / "tasks.db";
  write_tasks(file, 3, example.graph, {predicted, example.timeline});
  write_tasks(file, 4, example.graph, {example.timeline});
  write_tasks(file, 4, example.graph, {example.timeline});  // replaces

  SQLite::Database database(file.string());
  EXPECT_EQ(database.execAndGet("SELECT count(*) FROM tasks WHERE run_id = 3").getInt(), 12);
  EXPECT_EQ(database.execAndGet("SELECT count(*) FROM tasks WHERE run_id = 4").getInt(), 6);
  SQLite::Statement rows(database,
                         "SELECT * FROM tasks WHERE run_id = 3 AND source = 'measured' AND task IN (0, 1, 4)");
  std::vector<std::string> texts;
  while (rows.executeStep()) {
    std::ostringstream text;
    for (int column = 0; column < rows.getColumnCount(); ++column) {
      const std::string value = rows.isColumnNull(column) ? "NULL" : rows.getColumn(column).getString();
      text << (column > 0 ? " " : "") << rows.getColumnName(column) << "=" << value;
    }
    texts.push_back(text.str());
  }
  EXPECT_THAT(
      texts,
      ElementsAre("run_id=3 source=measured step=7 task=0 kind=h2d lane=h2d rank=0 unit=1 chunk=4 micro_batch=NULL "
                  "wave=NULL start_s=10.0 end_s=12.0 bytes=2000000000 flops=0.0 elements=0",
                  "run_id=3 source=measured step=7 task=1 kind=fwd lane=compute rank=0 unit=1 chunk=NULL micro_batch=2 "
                  "wave=NULL start_s=12.5 end_s=15.5 bytes=0 flops=3000000000.0 elements=0",
                  "run_id=3 source=measured step=7 task=4 kind=update lane=update rank=NULL unit=1 chunk=NULL "
                  "micro_batch=NULL wave=NULL start_s=16.5 end_s=17.5 bytes=500 flops=0.0 elements=1000000000"));
}

TEST_F(TimelineFiles, TaskTableNamesAFileThatIsNoDatabase) {
  const Example example;
  const std::filesystem::path file = folder_ / "text.db";
  std::ofstream(file) << "this is no database, and it is long enough for SQLite to look at its header first: "
                      << std::string(200, 'x');
  try {
    write_tasks(file, 1, example.graph, {example.timeline});
    FAIL() << "wrote into a text file";
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), HasSubstr(file.string()));
  }
}

TEST(Comparison, ShowsMeansByKind) {
  const Example example;
  Timeline predicted = example.timeline, slower = example.timeline;
  predicted.source = TimelineSource::predicted;
  predicted.step_s = 4.5;
  slower.records[static_cast<size_t>(example.back)].end_s += 1;  // d2h: 1 s and 2 s
  const std::vector<Timeline> expected{predicted}, found{example.timeline, slower};
  const std::string table = comparison_table({example.graph, expected}, {example.graph, found});
  std::map<std::string, std::vector<std::string>> rows;
  std::istringstream lines(table);
  for (std::string line; std::getline(lines, line);) {
    std::istringstream words(line);
    std::string kind;
    words >> kind;
    rows[kind] = {std::istream_iterator<std::string>(words), {}};
  }
  EXPECT_THAT(rows.at("d2h"), ElementsAre("1", "1.00", "s", "1.50", "s", "0.00", "s", "0.00", "s"));
  EXPECT_THAT(rows.at("fwd"), ElementsAre("2", "4.00", "s", "4.00", "s", "500.0", "ms", "500.0", "ms"));
  EXPECT_THAT(rows.at("h2d"), ElementsAre("1", "2.00", "s", "2.00", "s", "0.00", "s", "3.50", "s"));
  EXPECT_THAT(rows.at("sum"), ElementsAre("6", "10.00", "s", "10.50", "s", "500.0", "ms", "4.00", "s"));
  EXPECT_EQ(rows.count("all_gather"), 0u);
  EXPECT_THAT(table, HasSubstr("step time: predicted 4.50 s, measured 8.00 s"));
}

}  // namespace
}  // namespace slidedp
