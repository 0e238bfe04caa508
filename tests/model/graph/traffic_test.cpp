// Host DRAM bytes that the graph's tasks claim, against closed forms: bytes per parameter and step of every route, rank
// count, wave count and update policy.
#include <gtest/gtest.h>

#include <cstdlib>
#include <map>

#include "model/graph/step_graph.h"
#include "tests/support/expected_traffic.h"
#include "tests/support/random_problem.h"

namespace slidedp::testing {
namespace {

// What the tasks of one unit (-1: of all) move. Step data (batch, losses) belongs to no parameter and is left out.
Traffic counted(const StepGraph& graph, int unit) {
  Traffic traffic;
  for (const Task& task : graph.tasks) {
    if (task.chunk < 0 || (unit >= 0 && task.unit != unit)) continue;
    const int64_t read = task.work.host_read_bytes, written = task.work.host_write_bytes;
    switch (task.kind) {
      case TaskKind::h2d:
        traffic.delivery += read + written;
        break;
      case TaskKind::d2h:
        traffic.landing += read + written;
        break;
      case TaskKind::host_accumulate:
        traffic.accumulate += read + written;
        break;
      case TaskKind::norm:
        traffic.norm += read + written;
        break;
      case TaskKind::update:
        traffic.update += read + written;
        break;
      default:
        EXPECT_EQ(read + written, 0) << name(task.kind);
    }
  }
  return traffic;
}

// `rounding` bytes apart at most where the host works on some rows.
void expect_near(const Traffic& counted, const Traffic& expected, int64_t rounding, const std::string& what) {
  EXPECT_EQ(counted.delivery, expected.delivery) << what;
  EXPECT_EQ(counted.landing, expected.landing) << what;
  EXPECT_LE(std::abs(counted.accumulate - expected.accumulate), rounding) << what;
  EXPECT_LE(std::abs(counted.norm - expected.norm), rounding) << what;
  EXPECT_LE(std::abs(counted.update - expected.update), rounding) << what;
}

// The touched elements of every task are rounded down, by less than one; of each, no more than state and sources move,
// twice with split updates. All is exact without touched rows.
int64_t rounding(const StepGraph& graph) {
  if (graph.touched.capacity == 0) return 0;
  const auto tasks = static_cast<int64_t>(graph.chunks.front().size() + graph.touched.chunks.size());
  return 2 * tasks * (32 + 2 * graph.sources_per_group() * size_of(graph.plan.wire));
}

TEST(Traffic, OfOffloadedActivationsIsEveryTokenOnceEachWay) {
  int offloading = 0;
  for (uint32_t seed = 0; seed < 300; ++seed) {
    const RandomProblem problem(seed);
    const StepGraph graph = build_step_graph(problem.model, problem.train, problem.plan);
    int64_t up = 0, down = 0;
    for (const Task& task : graph.tasks) {
      if (task.kind == TaskKind::act_d2h) up += task.work.link_bytes;
      if (task.kind == TaskKind::act_h2d) down += task.work.link_bytes;
    }
    const int64_t expected = offloaded_bytes(problem.model, problem.plan);
    offloading += expected > 0;
    ASSERT_EQ(up, expected) << "seed " << seed;
    ASSERT_EQ(down, expected) << "seed " << seed;
  }
  EXPECT_GT(offloading, 100);
}

TEST(Traffic, FollowsTheClosedFormOnRandomPlans) {
  std::map<std::tuple<Delivery, Reduction, UpdatePolicy, bool, VocabularyRows>, int> seen;
  for (uint32_t seed = 0; seed < 800; ++seed) {
    const RandomProblem problem(seed);
    const Plan& plan = problem.plan;
    validate_plan(plan, problem.model, problem.train);
    const StepGraph graph = build_step_graph(problem.model, problem.train, plan);
    const int64_t touched = plan.waves * graph.touched.expected * problem.model.hidden;
    const Traffic expected = step_traffic(graph.layout, plan, touched);
    expect_near(counted(graph, -1), expected, rounding(graph), "seed " + std::to_string(seed));
    if (HasFailure()) return;
    ++seen[{plan.delivery, plan.reduction, plan.update, plan.waves > 1, plan.vocabulary_rows}];
  }
  EXPECT_EQ(seen.size(), 3U * 2 * 3 * 2 * 2);
}

// What a task claims is what its accesses cover on the host. The norm's partial sums, 1/8 byte a parameter that is
// still in the cache, and its few scalars are claimed by nobody but the task that combines them.
TEST(Traffic, IsTheBytesOfTheAccesses) {
  for (uint32_t seed = 0; seed < 200; ++seed) {
    const RandomProblem problem(seed);
    const StepGraph graph = build_step_graph(problem.model, problem.train, problem.plan);
    for (TaskId id = 0; id < static_cast<TaskId>(graph.tasks.size()); ++id) {
      const Task& task = graph.tasks[static_cast<size_t>(id)];
      if (task.rows != Rows::all || task.find(Role::lookup) != nullptr)
        continue;  // ranges cover more than is worked on
      int64_t read = 0, written = 0;
      for (const Access& access : task.accesses) {
        if (!graph.buffers[static_cast<size_t>(access.buffer)].on_host() || access.role == Role::scalars) continue;
        if (access.role == Role::partials && task.chunk >= 0) continue;
        if (access.mode != AccessMode::write) read += access.end - access.begin;
        if (access.mode != AccessMode::read) written += access.end - access.begin;
      }
      ASSERT_EQ(task.work.host_read_bytes, read) << "seed " << seed << ": " << graph.describe(id);
      ASSERT_EQ(task.work.host_write_bytes, written) << "seed " << seed << ": " << graph.describe(id);
    }
  }
}

struct Row {
  const char* what;
  Delivery delivery;
  Reduction reduction;
  int ranks;
  UpdatePolicy update;
  DType wire;
  int waves;
  int64_t bytes;  // per parameter and step
};

// A layer that leaves its slot at every turn: two deliveries a wave. Numbers, not formulas.
TEST(Traffic, OfALayerInBytesPerParameter) {
  using enum Delivery;
  using enum UpdatePolicy;
  constexpr auto cpu = Reduction::cpu, gpu = Reduction::gpu;
  constexpr auto bf16 = DType::bf16, fp32 = DType::fp32;
  const std::vector<Row> rows{
      // 4 read + 2 landed + 26 Adam, whatever the number of ranks
      {"one rank", replicated, cpu, 1, eager, bf16, 1, 32},
      {"sharded, gpu", sharded, gpu, 2, eager, bf16, 1, 32},
      {"sharded, gpu", sharded, gpu, 8, eager, bf16, 1, 32},
      {"broadcast, gpu", broadcast, gpu, 2, eager, bf16, 1, 32},
      {"broadcast, gpu", broadcast, gpu, 8, eager, bf16, 1, 32},
      // 4 N read
      {"replicated, gpu", replicated, gpu, 2, eager, bf16, 1, 36},
      {"replicated, gpu", replicated, gpu, 8, eager, bf16, 1, 60},
      // 2 N landed, 24 + 2 N Adam
      {"sharded, cpu", sharded, cpu, 2, eager, bf16, 1, 36},
      {"sharded, cpu", sharded, cpu, 8, eager, bf16, 1, 60},
      {"broadcast, cpu", broadcast, cpu, 4, eager, bf16, 1, 44},
      {"replicated, cpu", replicated, cpu, 4, eager, bf16, 1, 56},
      // the sources once more for the norm; 18 + 18 Adam
      {"deferred", sharded, gpu, 4, deferred, bf16, 1, 34},
      {"deferred, cpu", sharded, cpu, 4, deferred, bf16, 1, 52},
      {"split", sharded, gpu, 4, split, bf16, 1, 44},
      {"split, cpu", sharded, cpu, 4, split, bf16, 1, 68},
      // 2 bytes more for each time that a source is written or read
      {"fp32 wire", sharded, gpu, 4, eager, fp32, 1, 36},
      {"fp32 wire, deferred", sharded, gpu, 4, deferred, fp32, 1, 40},
      {"fp32 wire, split", sharded, gpu, 4, split, fp32, 1, 52},
      // eager: each further wave adds 4 read + 2 landed + 2 read + 8 accumulated; Adam reads the last one itself
      {"two waves", sharded, gpu, 4, eager, bf16, 2, 48},
      {"three waves", sharded, gpu, 4, eager, bf16, 3, 64},
      // deferred: the first wave is written (4), every further one added (8), then Adam reads 4
      {"two waves, deferred", sharded, gpu, 4, deferred, bf16, 2, 56},
      {"three waves, deferred", sharded, gpu, 4, deferred, bf16, 3, 72},
      // split: 20 + 20 Adam
      {"two waves, split", sharded, gpu, 4, split, bf16, 2, 68},
      {"three waves, split", sharded, gpu, 4, split, bf16, 3, 84},
      {"two waves, replicated, cpu", replicated, cpu, 2, eager, bf16, 2, 2 * (8 + 4 + 4) + 8 + 24},
  };
  for (const Row& row : rows) {
    RandomProblem problem(1);
    problem.model.layers = 4;
    Plan& plan = problem.plan;
    plan.model = problem.model.fingerprint();
    plan.activation.assign(4, ActivationPolicy::keep);
    plan.delivery = row.delivery;
    plan.reduction = row.reduction;
    plan.ranks = row.ranks;
    plan.update = row.update;
    plan.wire = row.wire;
    plan.waves = row.waves;
    plan.layer_slots = 1;
    plan.landing_slots = 0;
    problem.train.batch_rows = plan.batch_rows();
    problem.train.max_grad_norm = 0;
    validate_plan(plan, problem.model, problem.train);
    const StepGraph graph = build_step_graph(problem.model, problem.train, plan);
    const int64_t elements = graph.layout.units[2].elements;
    EXPECT_EQ(counted(graph, 2).total(), row.bytes * elements) << row.what << ", " << row.ranks << " ranks";
  }
}

}  // namespace
}  // namespace slidedp::testing
