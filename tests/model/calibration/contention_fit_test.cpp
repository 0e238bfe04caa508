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

std::vector<ContentionSample> samples_of(const HardwareSpec& truth, double noise, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<double> log_error(0, noise);
  std::vector<ContentionSample> samples;
  for (const Together& running : {Together{true, false, 14}, Together{false, true, 14}, Together{true, true, 14}}) {
    TogetherRates rates = predict_together(truth, running);
    for (double* rate : {&rates.h2d_gbps, &rates.d2h_gbps, &rates.adam_gbps}) *rate *= std::exp(log_error(random));
    samples.push_back({running, rates});
  }
  return samples;
}

TEST(Contention, PredictsTheLawByHand) {
  HardwareSpec spec = machine();
  spec.host.dram_gbps = 200;
  spec.pcie.h2d_loss = 0.3;
  spec.pcie.d2h_loss = 0.2;
  spec.host.stream_loss_h2d = 0.05;
  spec.host.stream_loss_d2h = 0.1;
  const TogetherRates alone = predict_together(spec, {true, false, 0});
  EXPECT_DOUBLE_EQ(alone.h2d_gbps, 55);
  EXPECT_EQ(alone.d2h_gbps, 0);
  const TogetherRates one_thread = predict_together(spec, {false, false, 1});
  EXPECT_DOUBLE_EQ(one_thread.adam_gbps, 0.4 * 26);
  const TogetherRates all = predict_together(spec, {true, true, 14});
  EXPECT_NEAR(all.h2d_gbps, 55 * 0.7, 1e-9);
  EXPECT_NEAR(all.d2h_gbps, 54 * 0.8, 1e-9);
  EXPECT_NEAR(all.adam_gbps, 117 * 0.85, 1e-9);
  // With half of what the cores can stream, half of the link's loss.
  spec.host.adam_elements_per_s = 117e9 / 26 / 2;
  EXPECT_NEAR(predict_together(spec, {true, false, 1}).h2d_gbps, 55 * 0.85, 1e-9);
}

TEST(Contention, RecoversTheLossesOfCleanSamples) {
  HardwareSpec truth = machine();
  truth.pcie.h2d_loss = 0.36;
  truth.pcie.d2h_loss = 0.31;
  truth.host.stream_loss_h2d = 0.04;
  truth.host.stream_loss_d2h = 0.11;
  const ContentionFit fit = fit_contention(samples_of(truth, 0, 1), machine());
  // The pull towards 0 is 1e-4 of a residual's weight.
  EXPECT_NEAR(fit.h2d_loss, 0.36, 1e-3);
  EXPECT_NEAR(fit.d2h_loss, 0.31, 1e-3);
  EXPECT_NEAR(fit.stream_loss_h2d, 0.04, 1e-3);
  EXPECT_NEAR(fit.stream_loss_d2h, 0.11, 1e-3);
  EXPECT_LT(fit.residual_rms_log, 1e-3);
}

TEST(Contention, RecoversTheLossesOfNoisySamples) {
  HardwareSpec truth = machine();
  truth.pcie.h2d_loss = 0.3;
  truth.pcie.d2h_loss = 0.25;
  truth.host.stream_loss_h2d = 0.08;
  truth.host.stream_loss_d2h = 0.12;
  for (unsigned seed = 1; seed <= 20; ++seed) {
    const ContentionFit fit = fit_contention(samples_of(truth, 0.01, seed), machine());
    // Each link loss rests on two rates and each stream loss on three: 1 % noise moves them by about 0.7 % and 1 % of
    // what is left. Four standard deviations of that.
    EXPECT_NEAR(fit.h2d_loss, 0.3, 0.03) << seed;
    EXPECT_NEAR(fit.d2h_loss, 0.25, 0.03) << seed;
    EXPECT_NEAR(fit.stream_loss_h2d, 0.08, 0.04) << seed;
    EXPECT_NEAR(fit.stream_loss_d2h, 0.12, 0.04) << seed;
  }
}

TEST(Contention, NoLossWhereNothingIsLostOrFelt) {
  const ContentionFit none = fit_contention(samples_of(machine(), 0, 1), machine());
  EXPECT_LT(none.h2d_loss, 1e-3);
  EXPECT_LT(none.d2h_loss, 1e-3);
  EXPECT_LT(none.stream_loss_h2d, 1e-3);
  EXPECT_LT(none.stream_loss_d2h, 1e-3);
  // Only one direction was measured: nothing is known of the other.
  HardwareSpec truth = machine();
  truth.pcie.h2d_loss = 0.4;
  const Together h2d{true, false, 14};
  const std::vector<ContentionSample> one{{h2d, predict_together(truth, h2d)}};
  const ContentionFit fit = fit_contention(one, machine());
  EXPECT_NEAR(fit.h2d_loss, 0.4, 1e-3);
  EXPECT_LT(fit.d2h_loss, 1e-3);
  EXPECT_LT(fit.stream_loss_d2h, 1e-3);
}

TEST(Contention, RefusesWhatCannotBeFitted) {
  EXPECT_THROW(fit_contention({}, machine()), Error);
  const std::vector<ContentionSample> stalled{{{true, false, 14}, {0, 0, 100}}};
  EXPECT_THROW(fit_contention(stalled, machine()), Error);
}

}  // namespace
}  // namespace slidedp
