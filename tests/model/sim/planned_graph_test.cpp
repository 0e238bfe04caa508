// The simulator on graphs that the builder makes.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <filesystem>

#include "model/sim/engine.h"
#include "model/sim/simulator.h"
#include "model/sim/task_cost.h"
#include "tests/model/sim/graphs.h"
#include "tests/support/random_problem.h"

namespace slidedp {
namespace {

using testing::RandomProblem;

// A machine on which any kind of work can be the slowest: the rates of random_machine() are of one order, so they are
// scaled to what each kind of this graph's work needs.
HardwareSpec matching_machine(const StepGraph& graph, std::mt19937& random) {
  HardwareSpec machine = testing::random_machine(random);
  machine.device.backend = graph.plan.backend;
  double flops = 0, link_bytes = 0, elements = 0;
  for (const Task& task : graph.tasks) {
    flops = std::max(flops, task.work.flops);
    link_bytes = std::max(link_bytes, static_cast<double>(task.work.link_bytes));
    if (task.lane.kind == LaneKind::update) elements = std::max(elements, static_cast<double>(task.work.elements));
  }
  // The largest task of a kind takes about a second alone.
  const double links = link_bytes / 1e9;
  for (double* rate : {&machine.pcie.h2d.gbps, &machine.pcie.d2h.gbps, &machine.pcie.duplex_gbps,
                       &machine.pcie.root_h2d_gbps, &machine.pcie.root_d2h_gbps, &machine.collectives.all_gather.gbps,
                       &machine.collectives.reduce_scatter.gbps, &machine.host.dram_gbps, &machine.host.cpu_stream_gbps,
                       &machine.host.source_gbps, &machine.kernels.elementwise_gbps}) {
    *rate *= links;
  }
  KernelSpec& kernels = machine.kernels;
  for (KernelRate* rate : {&kernels.layer_fwd, &kernels.layer_bwd, &kernels.head, &kernels.embedding}) {
    rate->peak_gflops *= flops / 1e9;
  }
  machine.host.adam_elements_per_s = machine.host.norm_elements_per_s = elements;
  return machine;
}

TEST(PlannedGraphs, SettleAboveTheBound) {
  std::mt19937 random(4);
  int settled = 0, seen = 0;
  for (uint32_t seed = 0; seed < 300; ++seed) {
    SCOPED_TRACE(seed);
    const RandomProblem problem(seed);
    const StepGraph graph = build_step_graph(problem.model, problem.train, problem.plan);
    if (graph.tasks.size() > 3000) continue;
    ++seen;
    const HardwareSpec machine = matching_machine(graph, random);
    const Simulation simulation = simulate(graph, machine);
    settled += simulation.settled ? 1 : 0;
    // 1e-3: simulate's stopping rule (random_graph_test.cpp).
    EXPECT_LE(bound(graph, machine).step.seconds, simulation.step.seconds * (1 + 1e-3));
    EXPECT_LE(simulation.exposed.seconds, simulation.step.seconds);
    for (const ResourceUse& use : simulation.uses) EXPECT_LE(use.share, 1 + 1e-3) << use.name;

    double alone = 0;  // all tasks one after another
    for (const TaskRecord& record : simulation.timeline.records) alone += record.end_s - record.start_s;
    EXPECT_LE(simulation.step.seconds, alone * (1 + 1e-3));
    if (HasFailure()) return;
  }
  EXPECT_GE(seen, 200);
  EXPECT_GE(settled, seen * 95 / 100) << "of " << seen;
}

// One rank stands for all: exactly where they do the same, else nearly.
TEST(PlannedGraphs, OneRankStandsForAll) {
  std::mt19937 random(7);
  int alike = 0, equal = 0, different = 0;
  double differences = 0;
  for (uint32_t seed = 0; seed < 400; ++seed) {
    SCOPED_TRACE(seed);
    const RandomProblem problem(seed);
    if (problem.plan.ranks == 1) continue;
    const StepGraph whole = build_step_graph(problem.model, problem.train, problem.plan);
    if (whole.tasks.size() > 3000) continue;
    const StepGraph rank = build_rank_graph(problem.model, problem.train, problem.plan);
    EXPECT_LT(rank.tasks.size(), whole.tasks.size());
    const HardwareSpec machine = matching_machine(whole, random);
    const Simulation a = simulate(whole, machine), b = simulate(rank, machine);
    const double ratio = b.step.seconds / a.step.seconds;
    if (!ranks_alike(whole)) {
      ++different;
      EXPECT_NEAR(ratio, 1, 0.35);  // units of one or two chunks, of which the last is hardly filled
      differences += std::abs(std::log(ratio));
      continue;
    }
    ++alike;
    // N equal numbers added against N times the number: rounding, which may break a tie otherwise and then moves tasks.
    EXPECT_NEAR(ratio, 1, 1e-3);
    const double exposed_difference_s = std::abs(b.exposed.seconds - a.exposed.seconds);
    if (std::abs(ratio - 1) < 1e-9 && exposed_difference_s < 1e-9 * a.step.seconds) ++equal;
    const double least = bound(whole, machine).step.seconds;
    EXPECT_NEAR(bound(rank, machine).step.seconds, least, 1e-9 * least);
    if (HasFailure()) return;
  }
  EXPECT_GE(alike, 30);
  EXPECT_GE(equal, alike * 9 / 10);
  EXPECT_GE(different, 30);
  EXPECT_LE(differences / different, 0.05);  // a few per cent even of such small units
}

// Mean duration of the steps 8 to 15.
double long_run(const StepGraph& graph, const HardwareSpec& machine) {
  const CostModel model(graph, machine);
  std::vector<TaskCost> costs;
  for (const Task& task : graph.tasks) costs.push_back(model.cost(task));
  StepEngine engine(graph, costs, model.resources());
  std::vector<double> ends;
  for (int s = 0; s < 16; ++s) ends.push_back(engine.next_step().end_s);
  return (ends[15] - ends[7]) / 8;
}

TEST(PlannedGraphs, TheReportedStepIsWhatALongRunShows) {
  std::mt19937 random(6);
  int seen = 0;
  for (uint32_t seed = 0; seed < 200; ++seed) {
    const RandomProblem problem(seed);
    const StepGraph graph = build_step_graph(problem.model, problem.train, problem.plan);
    if (graph.tasks.size() > 1000) continue;
    ++seen;
    const HardwareSpec machine = matching_machine(graph, random);
    const double mean = long_run(graph, machine);
    EXPECT_NEAR(simulate(graph, machine).step.seconds, mean, 1e-3 * mean) << "seed " << seed;  // the stopping rule
  }
  EXPECT_GE(seen, 100);
}

// Qwen3-4B at 8 x 4096 tokens on an H200, one micro-batch.
Plan large_plan(const ModelSpec& model) {
  Plan plan;
  plan.model = model.fingerprint();
  plan.backend = "cuda";
  plan.compute = plan.accumulator = DType::bf16;
  plan.chunk_elements = 8 << 20;
  plan.activation.assign(static_cast<size_t>(model.layers), ActivationPolicy::keep);
  plan.seq = 4096;
  plan.micro_batch_rows = 8;
  plan.head_chunk_tokens = 1024;
  plan.threads.update = 14;
  return plan;
}

// Without touched rows the whole matrix is landed and updated at the end of the step, and delivered before the next one
// can start. With them only 6 % of it is, so the step is shorter by what the other rows' update takes at least, which
// is then hidden. Deferred updates wait for the norm, and end with the layers' anyway; but the next step starts
// earlier.
TEST(PlannedGraphs, TouchedRowsTakeTheOthersOffTheStepsEnd) {
  const std::filesystem::path configs = std::filesystem::path(SLIDEDP_SOURCE_DIR) / "configs";
  const ModelSpec model = load_model_spec(configs / "model" / "Qwen3-4B.json");
  const HardwareSpec machine = load_hardware_spec(configs / "hardware" / "h200.yaml");
  TrainSpec train;
  train.touched_vocabulary_share = 0.06;
  Plan plan = large_plan(model);
  const auto step_s = [&](VocabularyRows rows) {
    plan.vocabulary_rows = rows;
    return simulate(build_step_graph(model, train, plan), machine).step.seconds;
  };
  const double untouched = 0.94 * static_cast<double>(model.vocabulary * model.hidden);
  const double update_s = untouched * 26 / (machine.host.cpu_stream_gbps * 1e9);
  const double saved = step_s(VocabularyRows::all) - step_s(VocabularyRows::touched);
  EXPECT_GT(saved, update_s);
  EXPECT_LT(saved, 2 * update_s);  // landing, delivery and few workers for the last chunks come on top
  for (const UpdatePolicy update : {UpdatePolicy::deferred, UpdatePolicy::split}) {
    plan.update = update;
    EXPECT_LT(step_s(VocabularyRows::touched), step_s(VocabularyRows::all)) << name(update);
  }
}

TEST(PlannedGraphs, TheReportedStepOfALargeModelIsWhatALongRunShows) {
  const std::filesystem::path configs = std::filesystem::path(SLIDEDP_SOURCE_DIR) / "configs";
  const ModelSpec model = load_model_spec(configs / "model" / "Qwen3-4B.json");
  const HardwareSpec machine = load_hardware_spec(configs / "hardware" / "h200.yaml");
  const Plan plan = large_plan(model);
  TrainSpec train;
  train.seq = plan.seq;
  train.batch_rows = plan.batch_rows();
  train.steps = 1;
  validate_plan(plan, model, train);
  const StepGraph graph = build_step_graph(model, train, plan);
  const double mean = long_run(graph, machine);
  EXPECT_NEAR(simulate(graph, machine).step.seconds, mean, 1e-3 * mean);
}

// Seconds that one rank's backward of the plan's layers takes alone, recomputation included.
double backward_s(const StepGraph& graph, const HardwareSpec& machine) {
  const CostModel model(graph, machine);
  double seconds = 0;
  for (const Task& task : graph.tasks) {
    const bool layer = task.unit >= 1 && task.unit <= graph.layout.layers;
    if (task.rank == 0 && layer && (task.kind == TaskKind::bwd || task.kind == TaskKind::recompute)) {
      seconds += model.cost(task).alone_s();
    }
  }
  return seconds;
}

// What selective forms again costs time, but less than the whole forward.
TEST(PlannedGraphs, SelectiveTakesLongerThanKeepAndLessThanRecompute) {
  const std::filesystem::path configs = std::filesystem::path(SLIDEDP_SOURCE_DIR) / "configs";
  for (const auto& [config, hardware, backend] :
       {std::tuple("Qwen3-4B.json", "h200.yaml", "cuda"), std::tuple("SmolLM2-135M.json", "cpu-2rank.yaml", "cpu")}) {
    const ModelSpec model = load_model_spec(configs / "model" / config);
    const HardwareSpec machine = load_hardware_spec(configs / "hardware" / hardware);
    Plan plan;
    plan.model = model.fingerprint();
    plan.backend = backend;
    plan.compute = plan.backend == "cpu" ? DType::fp32 : DType::bf16;
    plan.chunk_elements = 8 << 20;
    plan.seq = 512;
    plan.head_chunk_tokens = 256;
    TrainSpec train;
    train.seq = plan.seq;
    train.batch_rows = plan.batch_rows();
    train.steps = 1;
    std::vector<double> seconds;
    for (const ActivationPolicy policy :
         {ActivationPolicy::keep, ActivationPolicy::selective, ActivationPolicy::recompute}) {
      plan.activation.assign(static_cast<size_t>(model.layers), policy);
      validate_plan(plan, model, train);
      seconds.push_back(backward_s(build_step_graph(model, train, plan), machine));
    }
    EXPECT_GT(seconds[1], 1.001 * seconds[0]) << config;
    EXPECT_LT(seconds[1], seconds[2]) << config;
  }
}

// On the catalogue's H200 the inputs of a 4B model's layers go to the host and back while the layers compute. On a link
// too slow for that the step takes what the link needs.
TEST(PlannedGraphs, OffloadTakesNoTimeUntilTheLinkLimits) {
  const std::filesystem::path configs = std::filesystem::path(SLIDEDP_SOURCE_DIR) / "configs";
  const ModelSpec model = load_model_spec(configs / "model" / "Qwen3-4B.json");
  HardwareSpec machine = load_hardware_spec(configs / "hardware" / "h200.yaml");
  Plan plan;
  plan.model = model.fingerprint();
  plan.backend = "cuda";
  plan.compute = DType::bf16;
  plan.chunk_elements = 32 << 20;
  plan.seq = 4096;
  plan.micro_batch_rows = 8;
  plan.micro_batches = 2;
  plan.head_chunk_tokens = 1024;
  plan.threads.update = 14;
  TrainSpec train;
  train.seq = plan.seq;
  train.batch_rows = plan.batch_rows();
  train.steps = 1;
  const auto simulated = [&](ActivationPolicy policy) {
    plan.activation.assign(static_cast<size_t>(model.layers), policy);
    validate_plan(plan, model, train);
    return simulate(build_step_graph(model, train, plan), machine);
  };
  const double recompute_s = simulated(ActivationPolicy::recompute).step.seconds;
  // Beyond what the copies make others wait for: a few of them at the turn, of 3 ms each.
  EXPECT_NEAR(simulated(ActivationPolicy::offload).step.seconds, recompute_s, 0.01 * recompute_s);

  machine.pcie.d2h.gbps = 2;
  const Simulation slow = simulated(ActivationPolicy::offload);
  const double parameters = static_cast<double>(make_layout(model).elements);
  const double inputs = 36.0 * 2 * 32768 * 2560 * 2, gradients = 2 * parameters;
  EXPECT_GE(slow.step.seconds * (1 + 1e-3), (inputs + gradients) / 2e9);  // the stopping rule
  EXPECT_EQ(slow.bottleneck, "rank 0 d2h link");
  EXPECT_GT(slow.step.seconds, 1.5 * simulated(ActivationPolicy::recompute).step.seconds);
}

TEST(PlannedGraphs, AFasterMachineWithoutContentionIsNeverSlower) {
  std::mt19937 random(5);
  for (uint32_t seed = 0; seed < 60; ++seed) {
    SCOPED_TRACE(seed);
    RandomProblem problem(seed);
    problem.plan.threads.update = 1000;  // no pool decisions, no Graham anomalies
    const StepGraph graph = build_step_graph(problem.model, problem.train, problem.plan);
    HardwareSpec machine = matching_machine(graph, random);
    machine.device.backend = "cuda";
    machine.pcie.duplex_gbps = machine.pcie.root_h2d_gbps = machine.pcie.root_d2h_gbps = 1e9;
    machine.host.dram_gbps = machine.host.cpu_stream_gbps = 1e9;
    machine.host.cores = 1000;
    const double before = simulate(graph, machine).step.seconds;
    machine.pcie.h2d.gbps *= 1.3;
    machine.kernels.layer_bwd.peak_gflops *= 1.2;
    machine.host.adam_elements_per_s *= 1.5;
    EXPECT_LE(simulate(graph, machine).step.seconds, before * (1 + 1e-3));
  }
}

}  // namespace
}  // namespace slidedp
