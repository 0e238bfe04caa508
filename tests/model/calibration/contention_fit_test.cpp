#include "model/calibration/contention_fit.h"

#include <gtest/gtest.h>

#include <random>
#include <vector>

#include "model/base/error.h"

namespace slidedp {
namespace {

// Sixteen cores and one GPU, nothing contends.
HardwareSpec machine() {
  HardwareSpec spec;
  spec.device.backend = "cuda";
  spec.pcie.h2d = {5e-6, 55};
  spec.pcie.d2h = {5e-6, 54};
  spec.pcie.duplex_gbps = 98;
  spec.pcie.root_h2d_gbps = 55;
  spec.pcie.root_d2h_gbps = 54;
  spec.host.cores = 16;
  spec.host.dram_gbps = 400;
  spec.host.cpu_stream_gbps = 300;
  spec.host.adam_elements_per_s = 7e8;
  return spec;
}

HardwareSpec contended() {
  HardwareSpec truth = machine();
  truth.host.adam_elements_per_s = 7.7e8;
  truth.contention = {{1.2, 1.28, 2.92}, {1.1, 1, 1.6}, {0.88, 0.56, 1.12}};
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
  const TogetherRates alone = predict_together(spec, {true, false, 0});
  EXPECT_DOUBLE_EQ(alone.h2d_gbps, 55);
  EXPECT_EQ(alone.d2h_gbps, 0);
  EXPECT_DOUBLE_EQ(predict_together(spec, {false, false, 1}).adam_gbps, 0.7 * 26);
  const TogetherRates both = predict_together(spec, {true, true, 0});
  EXPECT_NEAR(both.h2d_gbps + both.d2h_gbps, 98, 1e-9) << "what the duplex link gives";
  // Fourteen threads want 254.8 GB/s and take 254.8 / 1.5096 of it.
  spec.contention.streams = {0.8, 0.4, 1.2};
  spec.contention.h2d = {1.25, 1.6, 2};
  const double wanted = 14 * 0.7 * 26, taken = wanted / (1 + 0.002 * wanted);
  EXPECT_DOUBLE_EQ(predict_together(spec, {false, false, 14}).adam_gbps, taken);
  const TogetherRates down = predict_together(spec, {true, false, 14});
  EXPECT_DOUBLE_EQ(down.adam_gbps, taken / (1 + 0.1 * 0.55));
  EXPECT_DOUBLE_EQ(down.h2d_gbps, 55 * 1.25 / (1 + 0.004 * taken));
  EXPECT_DOUBLE_EQ(predict_together(spec, {true, false, 1}).h2d_gbps, 55) << "within its headroom";
  const TogetherRates all = predict_together(spec, {true, true, 14});
  EXPECT_DOUBLE_EQ(all.adam_gbps, taken / (1 + 0.1 * 0.55) / (1 + 0.3 * 0.54));
  EXPECT_DOUBLE_EQ(all.h2d_gbps, 55 * 1.25 / (1 + 0.004 * taken) / (1 + 0.5 * 0.54));
  EXPECT_DOUBLE_EQ(all.d2h_gbps, 54);
  // Caps hold besides, unless they are taken away.
  spec.host.cpu_stream_gbps = 10;
  EXPECT_LE(predict_together(spec, {false, false, 1}).adam_gbps, 10);
  EXPECT_DOUBLE_EQ(predict_uncapped(spec, {false, false, 1}).adam_gbps, 0.7 * 26 / (1 + 0.002 * 0.7 * 26));
  spec.host.cpu_stream_gbps = 100;
  EXPECT_DOUBLE_EQ(predict_together(spec, {false, false, 14}).adam_gbps, 100);
  EXPECT_DOUBLE_EQ(predict_uncapped(spec, {false, false, 14}).adam_gbps, taken);
}

void expect_near(const ContentionLaw& law, const HardwareSpec& truth, double relative) {
  const auto near = [&](double found, double real) { EXPECT_NEAR(found, real, relative * real); };
  near(law.adam_elements_per_s, truth.host.adam_elements_per_s);
  const ContentionSpec &found = law.contention, &real = truth.contention;
  near(found.h2d.headroom, real.h2d.headroom);
  near(found.h2d.beside_streams, real.h2d.beside_streams);
  near(found.h2d.beside_copies, real.h2d.beside_copies);
  near(found.d2h.headroom, real.d2h.headroom);
  near(found.d2h.beside_streams, real.d2h.beside_streams);
  near(found.d2h.beside_copies, real.d2h.beside_copies);
  near(found.streams.beside_streams, real.streams.beside_streams);
  near(found.streams.beside_h2d, real.streams.beside_h2d);
  near(found.streams.beside_d2h, real.streams.beside_d2h);
}

TEST(Contention, RecoversTheLawOfCleanSamples) {
  const ContentionFit fit = fit_contention(samples_of(contended(), {0, 5, 10, 14}, 0, 1), machine());
  // The pull of what is taken for granted is 1e-3 of a residual's weight, that of a thread's rate 0.05: its rate was
  // known 9 % too low, of which the pull keeps a part, and the values that multiply it follow.
  EXPECT_LT(fit.residual_rms_log, 2e-3);
  expect_near(fit, contended(), 0.05);
  EXPECT_EQ(with_contention(machine(), fit).contention, fit.contention);
}

// Of samples of an H200 (results/h200-profile): medians of nine, 16 cores.
TEST(Contention, DescribesAMachine) {
  HardwareSpec known = machine();
  known.pcie.h2d = {5e-6, 55.2};
  known.pcie.d2h = {4e-6, 55.4};
  known.pcie.duplex_gbps = 101;
  known.pcie.root_h2d_gbps = 55.2;
  known.pcie.root_d2h_gbps = 55.1;
  known.host.adam_elements_per_s = 7.24e8;
  const std::vector<ContentionSample> samples{
      {{true, false, 0}, {54.0, 0, 0}},        {{false, true, 0}, {0, 54.9, 0}},
      {{true, true, 0}, {46.2, 50.0, 0}},      {{false, false, 5}, {0, 0, 81.8}},
      {{true, false, 5}, {53.1, 0, 73.8}},     {{false, true, 5}, {0, 54.0, 71.5}},
      {{true, true, 5}, {38.2, 48.7, 65.0}},   {{false, false, 10}, {0, 0, 139.2}},
      {{true, false, 10}, {45.5, 0, 130.1}},   {{false, true, 10}, {0, 51.6, 116.6}},
      {{true, true, 10}, {33.1, 47.2, 113.3}}, {{false, false, 14}, {0, 0, 171.8}},
      {{true, false, 14}, {42.2, 0, 155.1}},   {{false, true, 14}, {0, 47.9, 145.7}},
      {{true, true, 14}, {29.8, 44.6, 137.5}}};
  EXPECT_LT(fit_contention(samples, known).residual_rms_log, 0.025) << "repeats scatter by about 2 %";
}

TEST(Contention, NothingIsSaidOfWhatIsNotFelt) {
  const ContentionFit none = fit_contention(samples_of(machine(), {0}, 0, 1), machine());
  EXPECT_LT(none.residual_rms_log, 1e-6);
  EXPECT_EQ(none.adam_elements_per_s, machine().host.adam_elements_per_s);
  EXPECT_NEAR(none.contention.streams.beside_h2d, 0, 1e-3) << "a pull of 1e-3 ends within the solver's tolerance";
  // Only one direction was measured: the other one's values stay as if nothing contended, with errors that say so.
  const std::vector<ContentionSample> all = samples_of(contended(), {0, 5, 10, 14}, 0, 1);
  std::vector<ContentionSample> down;
  std::copy_if(all.begin(), all.end(), std::back_inserter(down),
               [](const ContentionSample& sample) { return !sample.running.d2h; });
  const ContentionFit fit = fit_contention(down, machine());
  EXPECT_NEAR(fit.contention.h2d.beside_streams, 1.28, 0.08);
  EXPECT_NEAR(fit.contention.streams.beside_h2d, 0.56, 0.04);
  EXPECT_NEAR(fit.contention.streams.beside_d2h, 0, 1e-6);
  EXPECT_NEAR(fit.contention.d2h.headroom, 1, 1e-6);
  EXPECT_GT(fit.standard_error.contention.streams.beside_d2h, 10 * fit.standard_error.contention.streams.beside_h2d);
}

TEST(Contention, RefusesWhatCannotBeFitted) {
  EXPECT_THROW(fit_contention({}, machine()), Error);
  const std::vector<ContentionSample> stalled{{{true, false, 14}, {0, 0, 100}}};
  EXPECT_THROW(fit_contention(stalled, machine()), Error);
}

}  // namespace
}  // namespace slidedp
