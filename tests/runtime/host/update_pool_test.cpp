#include "runtime/host/update_pool.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <future>
#include <latch>
#include <memory>
#include <stdexcept>
#include <string>

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
