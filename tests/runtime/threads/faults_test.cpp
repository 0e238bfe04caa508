// Tasks that throw in every lane and in the pool, cancellation and destruction at random moments, all under random
// delays: nobody hangs, and exactly one error comes out.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <set>

#include "model/base/error.h"
#include "tests/support/disturbance.h"
#include "tests/support/plain_compute.h"
#include "tests/support/tiny_run.h"

namespace slidedp::testing {
namespace {

using ::testing::AnyOf;
using ::testing::HasSubstr;

constexpr int kSteps = 3;

std::string error_of(const std::function<void()>& run) {
  try {
    run();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "no error";
}

struct NamedPlan {
  std::string name;
  Plan plan;
};

class Faults : public ::testing::Test {
 protected:
  // Each value of ranks, routes, update policies and waves, and every kind of task, at least twice.
  std::vector<NamedPlan> plans() const {
    using enum Delivery;
    using enum Reduction;
    using enum UpdatePolicy;
    std::vector<NamedPlan> plans;
    const auto add = [&](int ranks, int micro_batches, int waves, Delivery delivery, Reduction reduction,
                         UpdatePolicy update, ActivationPolicy activation, int landing_slots, DType wire) {
      Plan plan = small_.plan(ranks, micro_batches, waves);
      plan.delivery = delivery;
      plan.reduction = reduction;
      plan.update = update;
      plan.activation.assign(plan.activation.size(), activation);
      plan.landing_slots = landing_slots;
      plan.wire = wire;
      plan.chunk_elements = 700;
      plan.threads.update = 2;
      plans.push_back({std::to_string(ranks) + " ranks, " + std::to_string(waves) + " waves, " +
                           std::string(slidedp::name(delivery)) + " x " + std::string(slidedp::name(reduction)) + ", " +
                           std::string(slidedp::name(update)),
                       plan});
    };
    using enum ActivationPolicy;
    add(1, 2, 1, replicated, cpu, eager, keep, 2, DType::bf16);
    add(1, 1, 2, replicated, cpu, deferred, recompute, 0, DType::fp32);
    add(2, 2, 1, sharded, gpu, split, selective, 0, DType::bf16);
    add(2, 1, 2, broadcast, cpu, split, recompute, 1, DType::bf16);
    add(2, 1, 1, broadcast, gpu, eager, recompute, 0, DType::bf16);
    add(4, 1, 2, sharded, gpu, eager, selective, 2, DType::bf16);
    add(4, 2, 1, sharded, cpu, deferred, keep, 0, DType::bf16);
    add(4, 1, 2, broadcast, gpu, deferred, recompute, 3, DType::fp32);
    add(2, 2, 1, replicated, gpu, eager, offload, 0, DType::bf16);
    add(2, 1, 2, sharded, gpu, split, offload, 0, DType::bf16);
    plans.back().plan.vocabulary_rows = VocabularyRows::touched;
    plans.back().plan.model = wide_.plan().model;
    plans.back().name += ", touched rows";
    return plans;
  }

  // As what a disturbance counts it.
  static TaskKind counted(TaskKind kind) {
    if (kind == TaskKind::act_h2d) return TaskKind::h2d;
    return kind == TaskKind::act_d2h ? TaskKind::d2h : kind;
  }

  // How many tasks of each kind one steady step of the plan runs; on one rank, where ranks have them.
  std::map<TaskKind, int> kinds(const Plan& plan) const {
    std::map<TaskKind, int> counts;
    for (const Task& task : build_step_graph(training(plan).model(), training(plan).train(), plan).tasks) {
      if (task.rank <= 0 && (task.phases & phase_bit(Phase::steady)) != 0) ++counts[counted(task.kind)];
    }
    return counts;
  }

  std::string run(const Plan& plan, Disturbance& disturbance) const {
    return error_of([&] {
      training(plan).run(
          plan, training(plan).train(), kSteps, [&](Backend& backend) { disturbance.wrap(backend); },
          disturbance.pool_hook());
    });
  }

  const TinyTraining& training(const Plan& plan) const {
    return plan.vocabulary_rows == VocabularyRows::touched ? wide_ : small_;
  }

  TinyTraining small_{plain_model(true, kSmallHidden), {make_plain_backend}};
  TinyTraining wide_{plain_model(true), {make_plain_backend}};
  std::mt19937 random_{3};
};

TEST_F(Faults, MemoryThatCannotBePinnedIsANoteAndChangesNothing) {
  const Plan plan = plans().front().plan;
  Disturbance refusing(1);
  refusing.refuse_registration = true;
  const RunResult expected = small_.run(plan, small_.train(), kSteps);
  const RunResult result = small_.run(plan, small_.train(), kSteps, [&](Backend& backend) { refusing.wrap(backend); });
  EXPECT_TRUE(expected.notes.empty());
  ASSERT_FALSE(result.notes.empty());
  EXPECT_THAT(result.notes.front(), AllOf(HasSubstr("refuses to pin"), HasSubstr("goes on")));
  EXPECT_TRUE(result.state == expected.state);
}

TEST_F(Faults, InEveryKindOfTaskAreOneErrorAndNoHang) {
  std::set<TaskKind> seen;
  uint32_t seed = 0;
  for (const auto& [name, plan] : plans()) {
    for (const auto& [kind, count] : kinds(plan)) {
      seen.insert(kind);
      // In the first step, and in some later one: the first step of a deferred update has no update.
      for (const int call : {1, 1 + static_cast<int>(random_() % static_cast<uint32_t>(2 * count))}) {
        const bool in_pool = kind == TaskKind::norm || kind == TaskKind::update || kind == TaskKind::host_accumulate;
        const int rank = in_pool ? Fault::kAnyRank : static_cast<int>(random_() % static_cast<uint32_t>(plan.ranks));
        const std::string what = name + ", " + std::string(slidedp::name(kind)) + ", call " + std::to_string(call) +
                                 " on rank " + std::to_string(rank);
        SCOPED_TRACE(what);
        const Watchdog watchdog(what);
        Disturbance disturbance(++seed, {{kind, call, rank}});
        EXPECT_THAT(run(plan, disturbance), HasSubstr(Disturbance::message(kind)));
      }
    }
  }
  EXPECT_THAT(seen, ::testing::IsSupersetOf({TaskKind::h2d, TaskKind::all_gather, TaskKind::broadcast, TaskKind::fwd,
                                             TaskKind::head, TaskKind::recompute, TaskKind::bwd, TaskKind::cast,
                                             TaskKind::reduce_scatter, TaskKind::d2h, TaskKind::host_accumulate,
                                             TaskKind::norm, TaskKind::update}));
}

// Every lane of every rank and the pool fail in the same moment: one of these errors comes out.
TEST_F(Faults, EverywhereAtOnceAreOneError) {
  uint32_t seed = 1000;
  for (const auto& [name, plan] : plans()) {
    for (int turn = 0; turn < 4; ++turn) {
      SCOPED_TRACE(name);
      const Watchdog watchdog(name);
      std::vector<Fault> faults;
      for (const auto& [kind, count] : kinds(plan)) {
        const int call = turn == 0 ? 1 : 1 + static_cast<int>(random_() % static_cast<uint32_t>(count));
        for (int rank = 0; rank < plan.ranks; ++rank) faults.push_back({kind, call, rank});
        faults.push_back({kind, call, Fault::kAnyRank});
      }
      Disturbance disturbance(++seed, faults);
      EXPECT_THAT(run(plan, disturbance), HasSubstr("injected fault in "));
    }
  }
}

// Two steps under way, watched from outside.
class UnderWay {
 public:
  UnderWay(const TinyTraining& training, const Plan& plan, Disturbance& disturbance)
      : graph_(build_step_graph(training.model(), training.train(), plan)),
        data_(training.data(), training.model(), plan.seq),
        state_(graph_.layout),
        backend_(make_plain_backend(training.model(), graph_.layout, plan)) {
    disturbance.wrap(backend_);
    executor_.emplace(graph_, backend_, state_, ExecutorOptions{.before_pool_task = disturbance.pool_hook()});
    for (int64_t step = 0; step < 2; ++step) {
      StepInput input;
      input.step = step;
      input.adam = training.train().adam;
      input.target_tokens = data_.target_tokens(step, training.train().batch_rows);
      for (int rank = 0; rank < plan.ranks; ++rank) {
        input.batches.push_back(data_.fill(step, plan, rank, executor_->batch(rank)));
      }
      executor_->submit(std::move(input));
    }
  }
  Executor& executor() { return *executor_; }
  void destroy() { executor_.reset(); }

 private:
  StepGraph graph_;
  PackedDataset data_;
  HostState state_;
  Backend backend_;
  std::optional<Executor> executor_;
};

// Returns when so many pieces of work have begun, or a fault has been injected.
void wait_for(const Disturbance& disturbance, int64_t operations) {
  while (disturbance.operations() < operations && !disturbance.thrown()) std::this_thread::yield();
}

// Pieces of work in two steps of the plan.
int64_t operations(const TinyTraining& training, const Plan& plan) {
  Disturbance disturbance(0);
  UnderWay under_way(training, plan, disturbance);
  while (under_way.executor().in_flight() > 0) under_way.executor().collect(std::chrono::seconds(1));
  return disturbance.operations();
}

TEST_F(Faults, CancellationAtRandomMomentsIsTheOneErrorThatComesOut) {
  uint32_t seed = 2000;
  for (const auto& [name, plan] : plans()) {
    const Watchdog watchdog(name);
    SCOPED_TRACE(name);
    const int64_t all = operations(training(plan), plan);
    EXPECT_GT(all, 100);
    for (int turn = 0; turn < 6; ++turn) {
      Disturbance disturbance(++seed);
      UnderWay under_way(training(plan), plan, disturbance);
      wait_for(disturbance, std::uniform_int_distribution<int64_t>(0, all)(random_));
      under_way.executor().cancel("enough");
      for (int again = 0; again < 2; ++again) {
        EXPECT_EQ(error_of([&] { under_way.executor().collect(std::chrono::seconds(60)); }), "enough");
      }
      if (turn % 2 == 0) under_way.destroy();  // else it goes with its backend and state
    }
  }
}

// Whichever comes first is what every later call says.
TEST_F(Faults, AFaultAndACancellationAreOneError) {
  uint32_t seed = 3000;
  for (const auto& [name, plan] : plans()) {
    const Watchdog watchdog(name);
    SCOPED_TRACE(name);
    const int64_t all = operations(training(plan), plan);
    for (int turn = 0; turn < 4; ++turn) {
      const int call = 1 + static_cast<int>(random_() % 4);
      Disturbance disturbance(++seed, {{TaskKind::bwd, call, 0}, {TaskKind::d2h, 3 * call, plan.ranks - 1}});
      UnderWay under_way(training(plan), plan, disturbance);
      wait_for(disturbance, std::uniform_int_distribution<int64_t>(0, all / 4)(random_));
      under_way.executor().cancel("enough");
      const auto collect = [&] { under_way.executor().collect(std::chrono::seconds(60)); };
      const std::string first = error_of(collect);
      EXPECT_THAT(first, AnyOf(HasSubstr("injected fault in "), ::testing::Eq("enough")));
      EXPECT_EQ(error_of(collect), first);
    }
  }
}

TEST_F(Faults, DestructionAtRandomMomentsWaitsForWhatRuns) {
  uint32_t seed = 4000;
  for (const auto& [name, plan] : plans()) {
    const Watchdog watchdog(name);
    const int64_t all = operations(training(plan), plan);
    for (int turn = 0; turn < 6; ++turn) {
      Disturbance disturbance(++seed);
      UnderWay under_way(training(plan), plan, disturbance);
      wait_for(disturbance, std::uniform_int_distribution<int64_t>(0, all)(random_));
      under_way.destroy();
      const int64_t begun = disturbance.operations();
      std::this_thread::yield();
      EXPECT_EQ(disturbance.operations(), begun) << name;  // nothing starts any more
    }
  }
}

}  // namespace
}  // namespace slidedp::testing
