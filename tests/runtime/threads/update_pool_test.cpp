#include "runtime/host/update_pool.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sched.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <future>
#include <latch>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>

#include "runtime/host/worker_cores.h"

namespace slidedp {
namespace {

void no_error(std::exception_ptr) { ADD_FAILURE() << "a task failed"; }

// Keeps one worker busy until opened.
class Gate {
 public:
  explicit Gate(UpdatePool& pool) {
    pool.submit(-1, 0, [latches = latches_](int) {
      latches->entered.count_down();
      latches->open.wait();
    });
    latches_->entered.wait();
  }
  void open() { latches_->open.count_down(); }

 private:
  struct Latches {
    std::latch entered{1}, open{1};
  };
  // Shared: the worker may still be leaving wait() when the gate goes out of scope.
  std::shared_ptr<Latches> latches_ = std::make_shared<Latches>();
};

TEST(UpdatePool, RunsWhatIsNeededFirst) {
  UpdatePool pool(1, no_error);
  Gate gate(pool);
  std::vector<std::string> order;
  std::latch done(6);
  const auto submit = [&](int64_t step, int32_t need, const char* name) {
    pool.submit(step, need, [&order, &done, name](int worker) {
      EXPECT_EQ(worker, 0);
      order.emplace_back(name);
      done.count_down();
    });
  };
  submit(2, 0, "step 2");
  submit(1, 7, "need 7, first");
  submit(1, 7, "need 7, second");
  submit(1, 3, "need 3");
  submit(0, 9, "step 0");
  submit(1, -1, "need -1");
  gate.open();
  done.wait();
  EXPECT_THAT(order, testing::ElementsAre("step 0", "need -1", "need 3", "need 7, first", "need 7, second", "step 2"));
}

TEST(UpdatePool, ByArrivalNothingOvertakes) {
  UpdatePool pool(1, no_error, {}, UpdateOrder::arrival);
  Gate gate(pool);
  std::vector<int> order;
  std::latch done(4);
  const auto submit = [&](int64_t step, int32_t need, int name) {
    pool.submit(step, need, [&order, &done, name](int) {
      order.push_back(name);
      done.count_down();
    });
  };
  submit(2, 0, 1);
  submit(1, 7, 2);
  submit(1, 3, 3);
  submit(0, 9, 4);
  gate.open();
  done.wait();
  EXPECT_THAT(order, testing::ElementsAre(1, 2, 3, 4));
}

// Cores that the worker of a pool sees, and the kernel with it.
std::vector<int> cores_of_workers(UpdatePool& pool) {
  std::vector<int> core(static_cast<size_t>(pool.workers()));
  std::latch all_running(pool.workers());
  std::latch done(pool.workers());
  for (int i = 0; i < pool.workers(); ++i) {
    pool.submit(0, 0, [&](int worker) {
      all_running.arrive_and_wait();  // one task a worker
      const std::vector<int> allowed = allowed_cores();
      core[static_cast<size_t>(worker)] = allowed.size() == 1 ? allowed[0] : -1;
      done.count_down();
    });
  }
  done.wait();
  return core;
}

TEST(UpdatePool, WorkersAreTiedToTheirCores) {
  std::vector<int> cores = allowed_cores();
  std::reverse(cores.begin(), cores.end());
  std::vector<WorkerPlace> places;
  for (const int core : cores) places.push_back({core, 0});
  UpdatePool tied(static_cast<int>(cores.size()), no_error, places);
  EXPECT_EQ(cores_of_workers(tied), cores);
  EXPECT_THROW(UpdatePool(2, no_error, {{cores[0], 0}}), std::logic_error);
}

TEST(UpdatePool, AWorkerWhoseCoreIsNotThereRunsElsewhere) {
  UpdatePool pool(1, no_error, {{CPU_SETSIZE - 1, 0}});
  std::latch done(1);
  pool.submit(0, 0, [&](int) { done.count_down(); });
  done.wait();
}

// Two nodes on the cores that there are: node 1's worker prefers its own tasks, and takes the other's before it idles.
TEST(UpdatePool, WorkersTakeTheirNodesTasksFirst) {
  const int core = allowed_cores().front();
  UpdatePool pool(2, no_error, {{core, 0}, {core, 1}});
  std::latch both(2), early(1), others(5), done(6);
  std::array<std::latch, 2> open{std::latch(1), std::latch(1)};  // by worker
  std::array<std::vector<std::string>, 2> ran;
  for (const int node : {0, 1}) {
    pool.submit(
        -1, 0,
        [&](int worker) {
          both.count_down();
          open[static_cast<size_t>(worker)].wait();
        },
        node);
  }
  both.wait();  // both workers are busy
  const auto submit = [&](int32_t need, int node, const std::string& name) {
    pool.submit(
        0, need,
        [&, name](int worker) {
          ran[static_cast<size_t>(worker)].push_back(name);
          // Its worker stays with it until the other has done all the rest.
          if (name == "0 early") {
            early.count_down();
            others.wait();
          } else {
            others.count_down();
          }
          done.count_down();
        },
        node);
  };
  submit(2, 0, "0 late");
  submit(1, 0, "0 early");
  submit(9, 1, "1 latest");
  submit(8, 1, "1 late");
  submit(7, 1, "1 early");
  submit(6, 7, "0 for a node without workers");
  open[0].count_down();
  early.wait();
  open[1].count_down();
  done.wait();
  EXPECT_THAT(ran[0], testing::ElementsAre("0 early"));
  EXPECT_THAT(ran[1], testing::ElementsAre("1 early", "1 late", "1 latest", "0 late", "0 for a node without workers"));
}

TEST(WorkerPlaces, AreTheLastOfEachNodeAndLeaveTheOthersTheirs) {
  const std::vector<NumaNode> one{{0, {0, 1, 2, 3}}}, odd{{0, {4, 6, 9}}}, two{{0, {0, 1, 4, 5}}, {1, {2, 3, 6, 7}}};
  const auto places = [](std::vector<WorkerPlace> list) { return list; };
  EXPECT_EQ(worker_places(one, 2, 1), places({{2, 0}, {3, 0}}));
  EXPECT_EQ(worker_places(one, 2, 2), places({{2, 0}, {3, 0}}));
  EXPECT_EQ(worker_places(odd, 1, 2), places({{9, 0}}));
  EXPECT_EQ(worker_places(two, 4, 2), places({{4, 0}, {5, 0}, {6, 1}, {7, 1}}));
  EXPECT_EQ(worker_places(two, 3, 2), places({{5, 0}, {6, 1}, {7, 1}}));
  EXPECT_EQ(worker_places(two, 8, 0).size(), 8u);
  EXPECT_TRUE(worker_places(one, 3, 2).empty());
  EXPECT_TRUE(worker_places({{0, {0, 1}}}, 2, 1).empty());
  EXPECT_TRUE(worker_places({{0, {}}}, 1, 1).empty());
}

// Random tasks that submit what depends on them, with random delays, until one throws, somebody aborts, or all have
// run. (ThreadSanitizer looks at this one.)
struct RandomTasks {
  RandomTasks(uint32_t seed, int count) : waiting(static_cast<size_t>(count)), runs(static_cast<size_t>(count)) {
    std::mt19937 random(seed);
    for (int task = 0; task < count; ++task) {
      auto& from = successors.emplace_back();
      delay_us.push_back(static_cast<int>(random() % 8 == 0 ? random() % 200 : 0));
      need.push_back(static_cast<int32_t>(random() % 20));
      for (int next = task + 1; next < count && next < task + 12; ++next) {
        if (random() % 4 != 0) continue;
        from.push_back(next);
        ++waiting[static_cast<size_t>(next)];
      }
    }
  }
  std::vector<std::vector<int>> successors;
  std::vector<int> delay_us;
  std::vector<int32_t> need;
  std::vector<std::atomic<int>> waiting, runs;
  std::atomic<int> finished = 0;
};

void submit_random(UpdatePool& pool, RandomTasks& tasks, int task, int thrower) {
  pool.submit(0, tasks.need[static_cast<size_t>(task)], [&pool, &tasks, task, thrower](int) {
    const auto index = static_cast<size_t>(task);
    std::this_thread::sleep_for(std::chrono::microseconds(tasks.delay_us[index]));
    ++tasks.runs[index];
    if (task == thrower) throw std::runtime_error("task " + std::to_string(task));
    for (const int next : tasks.successors[index]) {
      if (--tasks.waiting[static_cast<size_t>(next)] == 0) submit_random(pool, tasks, next, thrower);
    }
    ++tasks.finished;
  });
}

TEST(UpdatePool, RandomGraphsEndWhateverHappens) {
  constexpr int kTasks = 150;
  for (uint32_t seed = 0; seed < 60; ++seed) {
    const bool complete = seed % 3 == 0, throws = seed % 3 == 1, aborted = seed % 3 == 2;
    RandomTasks tasks(seed, kTasks);
    std::vector<int> roots;
    for (int task = 0; task < kTasks; ++task) {
      if (tasks.waiting[static_cast<size_t>(task)] == 0) roots.push_back(task);
    }
    const int thrower = throws ? static_cast<int>(seed * 7 % kTasks) : -1;
    std::atomic<int> errors = 0;
    {
      UpdatePool pool(
          1 + static_cast<int>(seed % 4), [&](std::exception_ptr) { ++errors; }, {},
          seed % 2 == 0 ? UpdateOrder::need : UpdateOrder::arrival);
      for (const int root : roots) submit_random(pool, tasks, root, thrower);
      if (aborted) {
        while (tasks.finished < static_cast<int>(seed)) std::this_thread::yield();
        pool.abort();
      }
      while (complete && tasks.finished < kTasks) std::this_thread::yield();
      while (throws && errors == 0) std::this_thread::yield();
    }
    EXPECT_EQ(errors, throws ? 1 : 0) << "seed " << seed;
    for (const auto& runs : tasks.runs) ASSERT_LE(runs, 1) << "seed " << seed;
    EXPECT_TRUE(aborted || (tasks.finished == kTasks) == complete) << "seed " << seed;
  }
}

TEST(UpdatePool, EveryTaskRunsOnce) {
  constexpr int kSubmitters = 4, kTasks = 2000, kWorkers = 3;
  std::vector<std::atomic<int>> runs(kSubmitters * kTasks);
  std::latch done(kSubmitters * kTasks);
  UpdatePool pool(kWorkers, no_error);
  EXPECT_EQ(pool.workers(), kWorkers);
  std::vector<std::jthread> submitters;
  for (int s = 0; s < kSubmitters; ++s) {
    submitters.emplace_back([&, s] {
      for (int i = 0; i < kTasks; ++i) {
        pool.submit(i % 5, i % 11, [&, index = static_cast<size_t>(s * kTasks + i)](int worker) {
          EXPECT_TRUE(worker >= 0 && worker < kWorkers);
          ++runs[index];
          done.count_down();
        });
      }
    });
  }
  done.wait();
  for (const auto& count : runs) ASSERT_EQ(count, 1);
}

TEST(UpdatePool, FirstErrorIsReportedOnceAndDropsTheRest) {
  std::promise<std::string> reported;
  std::atomic<int> errors = 0, late = 0;
  UpdatePool* self = nullptr;
  UpdatePool pool(1, [&](std::exception_ptr error) {
    ++errors;
    self->abort();  // the pool must not hold its lock here
    try {
      std::rethrow_exception(error);
    } catch (const std::runtime_error& what) {
      reported.set_value(what.what());
    }
  });
  self = &pool;
  Gate gate(pool);
  pool.submit(0, 0, [](int) { throw std::runtime_error("the first"); });
  for (int i = 1; i < 100; ++i) pool.submit(0, i, [&](int) { ++late; });
  gate.open();
  EXPECT_EQ(reported.get_future().get(), "the first");
  const auto captured = std::make_shared<int>(0);
  pool.submit(0, 0, [&late, captured](int) { ++late; });
  EXPECT_EQ(captured.use_count(), 1) << "dropped at once";
  EXPECT_EQ(errors, 1);
  EXPECT_EQ(late, 0);
}

TEST(UpdatePool, ErrorsOfTasksThatRunAtOnceAreReportedOnce) {
  constexpr int kWorkers = 4;
  std::atomic<int> errors = 0;
  {
    std::latch all_running(kWorkers);
    UpdatePool pool(kWorkers, [&](std::exception_ptr) { ++errors; });
    for (int i = 0; i < kWorkers; ++i) {
      pool.submit(0, 0, [&](int) {
        all_running.arrive_and_wait();
        throw std::runtime_error("one of several");
      });
    }
    all_running.wait();
  }
  EXPECT_EQ(errors, 1);
}

TEST(UpdatePool, AbortDropsWhatIsQueuedAndFreesIt) {
  std::atomic<int> ran = 0;
  const auto captured = std::make_shared<int>(0);
  {
    UpdatePool pool(1, no_error);
    Gate gate(pool);
    for (int i = 0; i < 10; ++i) pool.submit(0, i, [&ran, captured](int) { ++ran; });
    pool.abort();
    EXPECT_EQ(captured.use_count(), 1);
    pool.submit(0, 0, [&ran, captured](int) { ++ran; });
    EXPECT_EQ(captured.use_count(), 1) << "what comes after abort() is dropped at once";
    gate.open();
  }
  EXPECT_EQ(ran, 0);
}

TEST(UpdatePool, DestructorWaitsForTheRunningTaskOnly) {
  std::atomic<bool> finished = false;
  std::atomic<int> queued = 0;
  std::latch running(1), release(1);
  std::jthread helper;
  {
    UpdatePool pool(1, no_error);
    pool.submit(0, 0, [&](int) {
      running.count_down();
      release.wait();
      finished = true;
    });
    running.wait();
    for (int i = 0; i < 10; ++i) pool.submit(1, i, [&queued](int) { ++queued; });
    const auto in_queue = std::make_shared<int>(0);
    const std::weak_ptr<int> dropped = in_queue;
    pool.submit(2, 0, [in_queue](int) {});
    // Releases the running task only once the destructor has dropped the queue.
    helper = std::jthread([dropped, &release] {
      while (!dropped.expired()) std::this_thread::yield();
      release.count_down();
    });
    // `in_queue` dies before the pool, so the queue's copy is the last one.
  }
  EXPECT_TRUE(finished);
  EXPECT_EQ(queued, 0);
}

TEST(UpdatePool, NeedsAWorker) { EXPECT_THROW(UpdatePool(0, no_error), std::logic_error); }

}  // namespace
}  // namespace slidedp
