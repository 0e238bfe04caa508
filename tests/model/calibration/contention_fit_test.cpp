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
  // With half of what the cores can stream, half of the link's loss; or a quarter, when it comes late.
  spec.host.adam_elements_per_s = 117e9 / 26 / 2;
  EXPECT_NEAR(predict_together(spec, {true, false, 1}).h2d_gbps, 55 * 0.85, 1e-9);
  spec.host.loss_exponent = 2;
  EXPECT_NEAR(predict_together(spec, {true, false, 1}).h2d_gbps, 55 * (1 - 0.3 / 4), 1e-9);
  // Both directions share what is left of the link.
  spec.pcie.duplex_loss = 0.4;
  const TogetherRates both = predict_together(spec, {true, true, 2});
  EXPECT_NEAR(both.h2d_gbps + both.d2h_gbps, 98 * 0.6, 1e-9);
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

// Adam alone and beside every kind of copy, with several numbers of threads: the caps are fitted with the losses.
std::vector<ContentionSample> all_situations(const HardwareSpec& truth, double noise, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<double> log_error(0, noise);
  std::vector<ContentionSample> samples;
  for (const int threads : {0, 4, 9, 14}) {
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

HardwareSpec contended() {
  HardwareSpec truth = machine();
  truth.pcie.h2d_loss = 0.2;
  truth.pcie.d2h_loss = 0.15;
  truth.pcie.duplex_loss = 0.3;
  truth.host.stream_loss_h2d = 0.08;
  truth.host.stream_loss_d2h = 0.12;
  truth.host.loss_exponent = 2.5;
  truth.host.cpu_stream_gbps = 160;
  truth.host.adam_elements_per_s = 6e8;
  truth.host.dram_gbps = 400;  // never full
  return truth;
}

TEST(Contention, CapsAreFittedWithTheLosses) {
  const HardwareSpec truth = contended();
  // What was measured before, in other memory, was slower.
  HardwareSpec known = machine();
  known.host.cpu_stream_gbps = 126;
  known.host.adam_elements_per_s = 8e8;
  const ContentionFit clean = fit_contention(all_situations(truth, 0, 1), known);
  EXPECT_TRUE(clean.caps);
  EXPECT_LT(clean.residual_rms_log, 1e-3);
  EXPECT_NEAR(clean.cpu_stream_gbps, 160, 0.5);
  EXPECT_NEAR(clean.adam_elements_per_s, 6e8, 2e6);
  EXPECT_NEAR(clean.duplex_loss, 0.3, 5e-3);
  EXPECT_NEAR(clean.stream_loss_d2h, 0.12, 5e-3);
  EXPECT_NEAR(clean.loss_exponent, 2.5, 0.1);
  int recovered = 0, values = 0;
  for (unsigned seed = 1; seed <= 20; ++seed) {
    const ContentionFit fit = fit_contention(all_situations(truth, 0.02, seed), known);
    EXPECT_LT(fit.residual_rms_log, 0.03) << seed;  // 28 rates with 2 % noise, 9 values fitted
    const auto within = [&](double found, double real, double error) {
      ++values;
      recovered += std::abs(found - real) <= 3 * error ? 1 : 0;
    };
    within(fit.h2d_loss, 0.2, fit.standard_error.h2d_loss);
    within(fit.d2h_loss, 0.15, fit.standard_error.d2h_loss);
    within(fit.duplex_loss, 0.3, fit.standard_error.duplex_loss);
    within(fit.cpu_stream_gbps, 160, fit.standard_error.cpu_stream_gbps);
    within(fit.adam_elements_per_s, 6e8, fit.standard_error.adam_elements_per_s);
  }
  EXPECT_GE(recovered, 95 * values / 100) << "within three standard errors";
}

TEST(Contention, AControllerThatIsFullIsFound) {
  HardwareSpec truth = contended();
  truth.pcie.h2d_loss = truth.pcie.d2h_loss = truth.pcie.duplex_loss = 0;
  truth.host.stream_loss_h2d = truth.host.stream_loss_d2h = 0;
  truth.host.dram_gbps = 190;
  const ContentionFit fit = fit_contention(all_situations(truth, 0, 1), machine());
  EXPECT_NEAR(fit.dram_gbps, 190, 4);
  EXPECT_LT(fit.residual_rms_log, 0.01);
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
