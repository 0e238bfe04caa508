// Runs of a known machine, and a profile that is wrong about it.
#include "model/calibration/recalibrate.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <random>

#include "model/base/error.h"
#include "model/sim/simulator.h"

namespace slidedp {
namespace {

using ::testing::HasSubstr;

ModelSpec small_model() {
  ModelSpec model;
  model.name = "small";
  model.hidden = 512;
  model.intermediate = 1536;
  model.layers = 4;
  model.heads = 8;
  model.kv_heads = 4;
  model.head_dim = 64;
  model.vocabulary = 8192;
  model.max_position = 4096;
  model.tied = true;
  return model;
}

// Every group of a one-GPU plan takes a time that counts.
HardwareSpec truth() {
  HardwareSpec spec;
  spec.name = "true machine";
  spec.measured = true;
  spec.device = {"a GPU", "cuda", int64_t{80} << 30, 0};
  spec.pcie = {{5e-6, 20}, {5e-6, 18}, 30, 20, 18};
  spec.contention = {{1.1, 0.4, 0.5}, {1, 0.2, 0.3}, {0.2, 0.3, 0.3}};
  spec.collectives = {{1e-6, 3}, {1e-6, 4}, {1e-6, 5}};
  spec.kernels = {{60e3, 1}, {55e3, 2}, {65e3, 4}, {100, 0.001}, 900, 8e-6};
  spec.host.cores = 8;
  spec.host.memory_bytes = int64_t{1} << 37;
  spec.host.dram_gbps = 100;
  spec.host.cpu_stream_gbps = 80;
  spec.host.adam_elements_per_s = 4e8;
  spec.host.norm_elements_per_s = 2e9;
  spec.host.source_gbps = 13;
  return spec;
}

TrainSpec train_spec() {
  TrainSpec train;
  train.seq = 1024;
  train.batch_rows = 8;
  train.steps = 20;
  train.max_grad_norm = 1;
  return train;
}

Plan plan_for(const ModelSpec& model) {
  Plan plan;
  plan.model = model.fingerprint();
  plan.backend = "cuda";
  plan.ranks = 1;
  plan.delivery = Delivery::replicated;
  plan.reduction = Reduction::cpu;
  plan.chunk_elements = 1 << 20;
  plan.activation.assign(static_cast<size_t>(model.layers), ActivationPolicy::recompute);
  plan.update = UpdatePolicy::deferred;
  plan.compute = DType::bf16;
  plan.accumulator = DType::fp32;
  plan.seq = 1024;
  plan.micro_batch_rows = 2;
  plan.micro_batches = 4;
  plan.head_chunk_tokens = 2048;
  plan.landing_slots = 0;
  plan.threads = {4, 1};
  return plan;
}

// A run of `steps` steps on the machine, whose groups and steps scatter by `noise` (log). `disturb`: a share of the
// steps takes twice as long.
LoggedRun run_on(const HardwareSpec& machine, const std::string& name, int steps, double noise, unsigned seed,
                 double disturb = 0) {
  LoggedRun run;
  run.name = name;
  run.started_at = "2026-01-31T12:00:00.000Z";
  run.program_version = "0.1.0";
  run.processor = "a processor";
  run.model = small_model();
  run.plan = {plan_for(run.model), train_spec(), machine, {}};
  const StepGraph graph = build_step_graph(run.model, run.plan.train, run.plan.plan);
  const Simulation simulation = simulate(graph, machine);
  const BusySeconds busy = busy_seconds(graph, simulation.timeline);
  std::mt19937 random(seed);
  std::normal_distribution<double> log_error(0, noise);
  for (int i = 0; i < steps; ++i) {
    const double factor = std::bernoulli_distribution(disturb)(random) ? 2 : 1;
    LoggedStep step{i + 2, simulation.step.seconds * factor * std::exp(log_error(random)), busy};
    for (double& seconds : step.busy_s) seconds *= factor * std::exp(log_error(random));
    run.steps.push_back(step);
  }
  return run;
}

// The profile before any run: some rates are off by up to a third.
HardwareSpec wrong_profile() {
  HardwareSpec spec = truth();
  spec.kernels.layer_fwd.peak_gflops *= 1.25;
  spec.kernels.layer_bwd.peak_gflops *= 1.2;
  spec.pcie.h2d.gbps *= 1.15;
  spec.pcie.root_h2d_gbps *= 1.15;
  spec.host.adam_elements_per_s *= 1.3;
  spec.host.norm_elements_per_s *= 0.75;
  return spec;
}

std::map<RateGroup, GroupCorrection> by_group(const Recalibration& result) {
  std::map<RateGroup, GroupCorrection> groups;
  for (const GroupCorrection& correction : result.groups) groups[correction.group] = correction;
  return groups;
}

TEST(Recalibrate, FindsWhatWasWrongAndJudgesItOnAnotherRun) {
  const std::vector<LoggedRun> runs{run_on(truth(), "a.db, run 1", 12, 0.01, 1),
                                    run_on(truth(), "b.db, run 1", 12, 0.01, 2)};
  const Recalibration result = recalibrate(runs, wrong_profile());
  EXPECT_EQ(result.held_out, "b.db, run 1");
  EXPECT_TRUE(result.refused.empty());
  const auto groups = by_group(result);
  // The prior, 25 %, against the simulator's own 2 %: a correction of 30 % is made to within 0.3 %, and the noise of
  // the medians is another 0.4 %. Four standard deviations.
  EXPECT_NEAR(groups.at(RateGroup::layer_forward).factor, 1 / 1.25, 0.02);
  EXPECT_NEAR(groups.at(RateGroup::layer_backward).factor, 1 / 1.2, 0.02);
  EXPECT_NEAR(groups.at(RateGroup::h2d).factor, 1 / 1.15, 0.02);
  EXPECT_NEAR(groups.at(RateGroup::norm).factor, 1 / 0.75, 0.03);
  EXPECT_NEAR(groups.at(RateGroup::head).factor, 1, 0.02);
  // Threads that go so much slower take so much less of the memory together: what they do at the end scales alike.
  const double update = groups.at(RateGroup::update).factor;
  EXPECT_LT(update, 0.95);
  EXPECT_DOUBLE_EQ(result.hardware.contention.streams.beside_streams * update,
                   truth().contention.streams.beside_streams);
  for (const auto& [group, correction] : groups) {
    EXPECT_LT(std::abs(correction.error_after), 0.03) << name(group);
    EXPECT_GT(correction.standard_error, 0) << name(group);
  }
  EXPECT_GT(std::abs(groups.at(RateGroup::layer_forward).error_before), 0.15);
  EXPECT_GT(std::abs(result.step_error_before), 0.08);
  EXPECT_LT(std::abs(result.step_error_after), 0.015);
  EXPECT_NEAR(result.hardware.kernels.layer_fwd.peak_gflops / truth().kernels.layer_fwd.peak_gflops, 1, 0.02);
  EXPECT_EQ(result.hardware.kernels.layer_fwd.half_gflop, truth().kernels.layer_fwd.half_gflop);
  EXPECT_EQ(result.hardware.collectives, truth().collectives) << "no run said anything of them";
  const Uncertainty& uncertainty = result.hardware.uncertainty;
  EXPECT_EQ(uncertainty.corrections.size(), result.groups.size());
  EXPECT_EQ(uncertainty.error_of("kernels.layer_fwd.peak_gflops")->probe, "runs");
  EXPECT_NE(uncertainty.error_of("pcie.root_h2d_gbps"), nullptr);
  EXPECT_EQ(uncertainty.error_of("kernels.layer_fwd.half_gflop"), nullptr);
  EXPECT_THAT(recalibration_table(result), HasSubstr("layer_forward"));
}

// A cap of the streams above that of the memory takes it along; contention, whose unit that is, stays as it was, and so
// do its relative errors.
TEST(Recalibrate, AFasterUpdateRaisesTheMemorysCapAndLeavesContention) {
  HardwareSpec slow = truth();
  slow.host.dram_gbps = slow.host.cpu_stream_gbps;
  slow.host.adam_elements_per_s /= 1.3;
  slow.uncertainty.measured_at = "2026-01-31T12:00:00.000Z";
  slow.uncertainty.standard_errors = {{"contention.h2d.beside_streams", 0.04, "host.contention"}};
  const std::vector<LoggedRun> runs{run_on(truth(), "a.db, run 1", 12, 0.01, 1)};
  const HardwareSpec after = recalibrate(runs, slow).hardware;
  ASSERT_GT(after.host.cpu_stream_gbps, slow.host.dram_gbps);
  EXPECT_EQ(after.host.dram_gbps, after.host.cpu_stream_gbps);
  EXPECT_DOUBLE_EQ(after.contention.h2d.beside_streams / after.host.dram_gbps,
                   slow.contention.h2d.beside_streams / slow.host.dram_gbps);
  const FieldError* error = after.uncertainty.error_of("contention.h2d.beside_streams");
  ASSERT_NE(error, nullptr);
  EXPECT_DOUBLE_EQ(error->value / after.contention.h2d.beside_streams, 0.04 / slow.contention.h2d.beside_streams);
}

TEST(Recalibrate, OneRunIsJudgedOnItsLaterHalf) {
  const std::vector<LoggedRun> runs{run_on(truth(), "a.db, run 1", 8, 0.005, 1)};
  const Recalibration result = recalibrate(runs, wrong_profile());
  EXPECT_EQ(result.held_out, "the later half of the steps");
  EXPECT_LT(std::abs(result.step_error_after), 0.015);
  // A profile that is right stays as it is.
  const Recalibration right = recalibrate(runs, truth());
  for (const GroupCorrection& correction : right.groups)
    EXPECT_NEAR(correction.factor, 1, 0.02) << name(correction.group);
}

TEST(Recalibrate, SingleBadStepsDoNotMatter) {
  const std::vector<LoggedRun> runs{run_on(truth(), "a.db, run 1", 16, 0.005, 5, 0.15)};
  const Recalibration result = recalibrate(runs, truth());
  for (const GroupCorrection& correction : result.groups)
    EXPECT_NEAR(correction.factor, 1, 0.02) << name(correction.group);
}

TEST(Recalibrate, DisturbedRunsAreRefusedWithTheReason) {
  const LoggedRun quiet = run_on(truth(), "quiet.db, run 1", 8, 0.01, 1);
  EXPECT_EQ(disturbance(quiet), "");
  const LoggedRun noisy = run_on(truth(), "noisy.db, run 1", 12, 0.2, 2);
  EXPECT_THAT(disturbance(noisy), HasSubstr("vary by"));
  LoggedRun stolen = quiet;
  stolen.name = "stolen.db, run 1";
  stolen.cpu_steal_share = 0.16;
  EXPECT_THAT(disturbance(stolen), HasSubstr("16 % of its CPU time"));
  LoggedRun brief = quiet;
  brief.steps.resize(3);
  EXPECT_THAT(disturbance(brief), HasSubstr("3 steps"));
  const Recalibration result = recalibrate(std::vector{noisy, quiet, stolen}, truth());
  EXPECT_EQ(result.refused.size(), 2u);
  EXPECT_THAT(recalibration_table(result), HasSubstr("not learnt from: noisy.db, run 1"));
  try {
    recalibrate(std::vector{noisy, stolen}, truth());
    FAIL() << "disturbed runs were learnt from";
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), HasSubstr("stolen.db, run 1: other guests"));
  }
}

}  // namespace
}  // namespace slidedp
