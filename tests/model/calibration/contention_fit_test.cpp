#include "model/calibration/contention_fit.h"

#include <gtest/gtest.h>

#include <random>
#include <vector>

#include "model/base/error.h"

namespace slidedp {
namespace {

// Sixteen cores and one GPU: 14 threads of Adam want more than the cores can stream.
HardwareSpec machine() {
  HardwareSpec spec;
  spec.device.backend = "cuda";
  spec.pcie.h2d = {5e-6, 55};
  spec.pcie.d2h = {5e-6, 54};
  spec.pcie.duplex_gbps = 98;
  spec.pcie.root_h2d_gbps = 55;
  spec.pcie.root_d2h_gbps = 54;
  spec.host.cores = 16;
  spec.host.dram_gbps = 180;
  spec.host.cpu_stream_gbps = 117;
  spec.host.adam_elements_per_s = 4e8;
  return spec;
}

// The same under contention: devices' reads wait, their writes go first.
HardwareSpec contended() {
  HardwareSpec truth = machine();
  truth.host.cpu_stream_gbps = 128;
  truth.host.dram_gbps = 128;
  truth.host.adam_elements_per_s = 6e8;
  truth.host.h2d_cost = 0.7;
  truth.host.d2h_cost = 0.65;
  truth.host.h2d_weight = 1.3;
  truth.host.d2h_weight = 2.2;
  return truth;
}

std::vector<ContentionSample> samples_of(const HardwareSpec& truth, const std::vector<int>& teams, double noise,
                                         unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<double> log_error(0, noise);
  std::vector<ContentionSample> samples;
  for (const int threads : teams) {
    for (const auto& [h2d, d2h] : {std::pair(false, false), {true, false}, {false, true}, {true, true}}) {
      if (threads == 0 && !h2d && !d2h) continue;
      const Together running{h2d, d2h, threads};
      TogetherRates rates = predict_together(truth, running);
      for (double* rate : {&rates.h2d_gbps, &rates.d2h_gbps, &rates.adam_gbps}) *rate *= std::exp(log_error(random));
      samples.push_back({running, rates});
    }
  }
  return samples;
}

TEST(Contention, PredictsTheLawByHand) {
  HardwareSpec spec = machine();
  spec.host.dram_gbps = 117;
  const TogetherRates alone = predict_together(spec, {true, false, 0});
  EXPECT_DOUBLE_EQ(alone.h2d_gbps, 55);
  EXPECT_EQ(alone.d2h_gbps, 0);
  const TogetherRates one_thread = predict_together(spec, {false, false, 1});
  EXPECT_DOUBLE_EQ(one_thread.adam_gbps, 0.4 * 26);
  const TogetherRates both = predict_together(spec, {true, true, 0});
  EXPECT_NEAR(both.h2d_gbps + both.d2h_gbps, 98, 1e-9) << "what the duplex link gives";
  // Three threads want 31.2, at half a byte for a byte the copy wants 27.5: no contention.
  spec.host.h2d_cost = 0.5;
  EXPECT_DOUBLE_EQ(predict_together(spec, {true, false, 3}).h2d_gbps, 55);
  // Fourteen want 145.6. At level x the controller gives them 145.6 x, and the copy 0.8 x of its 27.5.
  spec.host.h2d_weight = 0.8;
  const double level = 117 / (145.6 + 0.8 * 27.5);
  const TogetherRates full = predict_together(spec, {true, false, 14});
  EXPECT_NEAR(full.h2d_gbps, 55 * 0.8 * level, 1e-9);
  EXPECT_NEAR(full.adam_gbps, 145.6 * level, 1e-9);
  // Writes of so great a weight are not slowed: the others share the rest.
  spec.host.d2h_weight = 10;
  const TogetherRates all = predict_together(spec, {true, true, 14});
  EXPECT_NEAR(all.d2h_gbps, 54, 1e-9);
  EXPECT_NEAR(all.adam_gbps, 145.6 * (117 - 54) / (145.6 + 0.8 * 27.5), 1e-9);
}

TEST(Contention, LossesOfMachinesOfWhichOnlyTheyAreKnown) {
  HardwareSpec spec = machine();
  spec.host.dram_gbps = 200;
  spec.pcie.h2d_loss = 0.3;
  spec.pcie.d2h_loss = 0.2;
  spec.host.stream_loss_h2d = 0.05;
  spec.host.stream_loss_d2h = 0.1;
  const TogetherRates all = predict_together(spec, {true, true, 14});
  EXPECT_NEAR(all.h2d_gbps, 55 * 0.7, 1e-9);
  EXPECT_NEAR(all.d2h_gbps, 54 * 0.8, 1e-9);
  EXPECT_NEAR(all.adam_gbps, 117 * 0.85, 1e-9);
  // A fitted law takes their place.
  const std::vector<ContentionSample> samples = samples_of(contended(), {0, 5, 10, 14}, 0, 1);
  const HardwareSpec fitted = with_contention(spec, fit_contention(samples, spec));
  EXPECT_EQ(fitted.pcie.h2d_loss, 0);
  EXPECT_EQ(fitted.host.stream_loss_d2h, 0);
}

TEST(Contention, RecoversTheLawOfCleanSamples) {
  // What was measured before, in other memory, was slower.
  HardwareSpec known = machine();
  known.host.adam_elements_per_s = 8e8;
  const ContentionFit fit = fit_contention(samples_of(contended(), {0, 5, 10, 14}, 0, 1), known);
  EXPECT_TRUE(fit.caps);
  // The pull of what is taken for granted is 1e-3 of a residual's weight, that of a thread's rate 0.05.
  EXPECT_LT(fit.residual_rms_log, 2e-3);
  EXPECT_NEAR(fit.cpu_stream_gbps, 128, 0.5);
  EXPECT_NEAR(fit.dram_gbps, 128, 0.5);
  EXPECT_NEAR(fit.adam_elements_per_s, 6e8, 3e6);
  EXPECT_NEAR(fit.h2d_cost, 0.7, 0.01);
  EXPECT_NEAR(fit.d2h_cost, 0.65, 0.01);
  EXPECT_NEAR(fit.h2d_weight, 1.3, 0.02);
  EXPECT_NEAR(fit.d2h_weight, 2.2, 0.05);
}

TEST(Contention, RecoversTheLawOfNoisySamples) {
  const HostSpec truth = contended().host;
  int recovered = 0, values = 0;
  for (unsigned seed = 1; seed <= 30; ++seed) {
    const ContentionFit fit = fit_contention(samples_of(contended(), {0, 5, 10, 14}, 0.02, seed), machine());
    EXPECT_LT(fit.residual_rms_log, 0.03) << seed;  // 28 rates with 2 % noise, 7 values fitted
    const auto within = [&](double found, double real, double error) {
      ++values;
      recovered += std::abs(found - real) <= 3 * error ? 1 : 0;
    };
    const ContentionLaw& error = fit.standard_error;
    within(fit.cpu_stream_gbps, truth.cpu_stream_gbps, error.cpu_stream_gbps);
    within(fit.adam_elements_per_s, truth.adam_elements_per_s, error.adam_elements_per_s);
    within(fit.h2d_cost, truth.h2d_cost, error.h2d_cost);
    within(fit.d2h_cost, truth.d2h_cost, error.d2h_cost);
    within(fit.h2d_weight, truth.h2d_weight, error.h2d_weight);
    within(fit.d2h_weight, truth.d2h_weight, error.d2h_weight);
  }
  EXPECT_GE(recovered, 95 * values / 100) << "within three standard errors";
}

// Measured beside an H200 (14 threads of Adam, 16 cores), medians of five.
TEST(Contention, DescribesAMachine) {
  HardwareSpec known = machine();
  known.pcie.h2d = {5e-6, 55.3};
  known.pcie.d2h = {3e-6, 55.2};
  known.pcie.duplex_gbps = 101.2;
  known.host.adam_elements_per_s = 7.7e8;
  const std::vector<ContentionSample> samples{{{false, false, 14}, {0, 0, 127.9}},
                                              {{true, false, 14}, {35.6, 0, 103.9}},
                                              {{false, true, 14}, {0, 53.7, 90.7}},
                                              {{true, true, 14}, {27.6, 46.7, 76.1}}};
  EXPECT_LT(fit_contention(samples, known).residual_rms_log, 0.02);
}

TEST(Contention, NothingIsSaidOfWhatIsNotFelt) {
  // Copies alone, which do not fill the controller.
  HardwareSpec truth = machine();
  const ContentionFit none = fit_contention(samples_of(truth, {0}, 0, 1), machine());
  EXPECT_NEAR(none.h2d_weight, 1, 1e-6);
  EXPECT_NEAR(none.d2h_cost, 1, 1e-6);
  EXPECT_LT(none.residual_rms_log, 1e-6);
  // Only one direction was measured, and Adam alone was not: caps stay as they are known, and the other direction's
  // values at 1.
  truth = contended();
  truth.host.cpu_stream_gbps = truth.host.dram_gbps = 117;
  truth.host.adam_elements_per_s = 4e8;
  HardwareSpec known = machine();
  known.host.dram_gbps = 117;
  const Together h2d{true, false, 14};
  const std::vector<ContentionSample> one{{h2d, predict_together(truth, h2d)}};
  const ContentionFit fit = fit_contention(one, known);
  EXPECT_FALSE(fit.caps);
  EXPECT_EQ(fit.cpu_stream_gbps, 117);
  EXPECT_EQ(fit.dram_gbps, 117);
  EXPECT_NEAR(fit.h2d_cost, 0.7, 0.02);
  EXPECT_NEAR(fit.h2d_weight, 1.3, 0.02);
  EXPECT_NEAR(fit.d2h_cost, 1, 1e-6);
  EXPECT_NEAR(fit.d2h_weight, 1, 1e-6);
}

TEST(Contention, RefusesWhatCannotBeFitted) {
  EXPECT_THROW(fit_contention({}, machine()), Error);
  const std::vector<ContentionSample> stalled{{{true, false, 14}, {0, 0, 100}}};
  EXPECT_THROW(fit_contention(stalled, machine()), Error);
}

}  // namespace
}  // namespace slidedp
