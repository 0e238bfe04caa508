#include "model/calibration/layer_fit.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <vector>

#include "model/base/error.h"
#include "model/calibration/leave_one_out.h"

namespace slidedp {
namespace {

ModelSpec decoder(int64_t hidden, int64_t intermediate, int64_t heads) {
  ModelSpec model;
  model.hidden = hidden;
  model.intermediate = intermediate;
  model.layers = 1;
  model.heads = heads;
  model.kv_heads = 8;
  model.head_dim = 128;
  return model;
}

// Shapes of three models, long and short rows.
std::vector<LayerWork> designed_works() {
  std::vector<LayerWork> works;
  for (const ModelSpec& model : {decoder(1024, 3072, 16), decoder(2560, 9728, 32), decoder(5120, 17408, 40)}) {
    for (const auto& [rows, seq] : {std::pair(1, 1024), {4, 1024}, {1, 4096}, {4, 4096}, {1, 16384}}) {
      works.push_back(layer_forward_work(model, rows, seq, DType::bf16));
    }
  }
  return works;
}

constexpr LayerRate kTruth{{700e3, 20}, 450e3, 3000};

std::vector<LayerSample> samples_of(const std::vector<LayerWork>& works, double noise, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<double> log_error(0, noise);
  std::vector<LayerSample> samples;
  for (const LayerWork& work : works) {
    for (int i = 0; i < 5; ++i) samples.push_back({work, layer_seconds(kTruth, work) * std::exp(log_error(random))});
  }
  return samples;
}

TEST(LayerFit, CleanSamplesGiveTheLaw) {
  const LayerFit fit = fit_layer(samples_of(designed_works(), 0, 1), "test");
  EXPECT_FALSE(fit.summary.degenerate);
  EXPECT_EQ(fit.summary.note, "");
  // The pull is 1e-3 of a residual's weight.
  EXPECT_NEAR(fit.rate.products.peak_gflops / 700e3, 1, 2e-3);
  EXPECT_NEAR(fit.rate.products.half_gflop, 20, 0.5);
  EXPECT_NEAR(fit.rate.attention_gflops / 450e3, 1, 1e-2);
  EXPECT_NEAR(fit.rate.gbps / 3000, 1, 2e-2);
}

TEST(LayerFit, NoiseAndOutliersAreWithinTheErrors) {
  int recovered = 0, values = 0;
  for (unsigned seed = 1; seed <= 20; ++seed) {
    std::vector<LayerSample> samples = samples_of(designed_works(), 0.02, seed);
    for (size_t i = 0; i < samples.size(); i += 12) samples[i].seconds *= 2;
    const LayerFit fit = fit_layer(samples, "test");
    const auto within = [&](double found, double real, double error) {
      ++values;
      recovered += std::abs(found - real) <= 3 * error ? 1 : 0;
    };
    within(fit.rate.products.peak_gflops, 700e3, fit.standard_error.products.peak_gflops);
    within(fit.rate.products.half_gflop, 20, fit.standard_error.products.half_gflop);
    within(fit.rate.attention_gflops, 450e3, fit.standard_error.attention_gflops);
    within(fit.rate.gbps, 3000, fit.standard_error.gbps);
  }
  EXPECT_GE(recovered, 95 * values / 100);
}

TEST(LayerFit, FewShapesGiveOneRateForAllFlops) {
  const std::vector<LayerWork> works = designed_works();
  const std::vector<LayerWork> few(works.begin(), works.begin() + 5);
  const LayerFit fit = fit_layer(samples_of(few, 0, 1), "test");
  EXPECT_EQ(fit.rate.attention_gflops, 0);
  EXPECT_EQ(fit.rate.gbps, 0);
  EXPECT_GT(fit.rate.products.peak_gflops, 0);
}

// Times without any order in them: a rate for everything is all that can be said.
TEST(LayerFit, NoiseThatHidesTheTermsLeavesOneRate) {
  for (unsigned seed = 1; seed <= 10; ++seed) {
    const LayerFit fit = fit_layer(samples_of(designed_works(), 0.6, seed), "test");
    EXPECT_GT(fit.rate.products.peak_gflops, 0) << seed;
    for (const auto& [rate, error] : {std::pair(fit.rate.attention_gflops, fit.standard_error.attention_gflops),
                                      {fit.rate.gbps, fit.standard_error.gbps}}) {
      EXPECT_TRUE(rate == 0 || error <= 0.5 * rate) << seed;
    }
  }
  // Rows so short that attention does not show: bytes are still told apart.
  std::vector<LayerWork> short_rows;
  for (const ModelSpec& model : {decoder(1024, 3072, 16), decoder(2560, 9728, 32), decoder(5120, 17408, 40)}) {
    for (const int64_t rows : {8, 16, 32, 64}) short_rows.push_back(layer_forward_work(model, rows, 32, DType::bf16));
  }
  const LayerFit fit = fit_layer(samples_of(short_rows, 0.01, 1), "test");
  EXPECT_EQ(fit.rate.attention_gflops, 0) << "less than a hundredth of the flops";
  EXPECT_NEAR(fit.rate.gbps / 3000, 1, 0.1);
}

TEST(LayerFit, BadSamplesAreNamed) {
  std::vector<LayerSample> samples = samples_of(designed_works(), 0, 1);
  samples[3].seconds = 0;
  EXPECT_THROW(fit_layer(samples, "test"), Error);
  EXPECT_THROW(fit_layer({}, "test"), Error);
}

TEST(LeaveOneOut, LawsPredictWhatTheyHaveNotSeen) {
  const ErrorSummary layers = summarize(unseen_layer_errors(samples_of(designed_works(), 0.02, 3)));
  EXPECT_EQ(layers.count, 15);
  EXPECT_LT(layers.median, 0.02);
  EXPECT_LT(layers.p95, 0.1) << "samples with 2 % noise, five of them a shape";
  std::vector<FitSample> transfers;
  for (double bytes = 65536; bytes <= 1 << 30; bytes *= 4) transfers.push_back({bytes, 5e-6 + bytes / 55e9});
  const std::vector<double> clean = unseen_transfer_errors(transfers, 1 << 20);
  EXPECT_EQ(clean.size(), 6u) << "sizes from 1 MiB up";
  for (const double error : clean) EXPECT_LT(error, 1e-3);
  transfers[4].seconds *= 1.5;
  EXPECT_NEAR(unseen_transfer_errors(transfers, 1 << 20)[2], 1 - 1 / 1.5, 0.02) << "the one that no law explains";
}

TEST(LeaveOneOut, TooFewWorksGiveNothing) {
  const std::vector<FitSample> two{{1e9, 1}, {2e9, 2}};
  EXPECT_TRUE(unseen_kernel_errors(two).empty());
  EXPECT_EQ(summarize({}).count, 0);
}

TEST(LeaveOneOut, SummaryIsOfAllErrors) {
  std::vector<double> errors;
  for (int i = 1; i <= 40; ++i) errors.push_back(i / 100.0);
  const ErrorSummary summary = summarize(errors);
  EXPECT_EQ(summary.count, 40);
  EXPECT_DOUBLE_EQ(summary.median, 0.205);
  EXPECT_DOUBLE_EQ(summary.p95, 0.38) << "two of forty are above";
}

TEST(LayerWork, CountsByHand) {
  const ModelSpec model = decoder(4, 3, 16);  // queries 2048, keys 1024
  const double matrices = 4 * (2 * 2048.0 + 2 * 1024) + 3 * 4 * 3;
  const LayerWork forward = layer_forward_work(model, 2, 8, DType::bf16);
  EXPECT_DOUBLE_EQ(forward.product_flops, 2 * 16 * matrices);
  EXPECT_DOUBLE_EQ(forward.attention_flops, 2 * 16 * 8 * 2048.0);
  EXPECT_DOUBLE_EQ(forward.bytes, 16 * 2 * (6 * 4 + 2 * 3072.0 + 3 * 3) + 2 * matrices);
  const LayerWork backward = layer_backward_work(model, 2, 8, DType::bf16, DType::fp32, true);
  EXPECT_DOUBLE_EQ(backward.flops(), 2 * forward.flops());
  EXPECT_DOUBLE_EQ(backward.bytes, 16 * 2 * (8 * 4 + 3 * 3072.0 + 2 * 1024 + 5 * 3) + 6 * matrices);
  const LayerWork again = layer_backward_work(model, 2, 8, DType::bf16, DType::fp32, false);
  EXPECT_DOUBLE_EQ(again.bytes - backward.bytes, 4 * matrices) << "gradients are read as well";
}

TEST(LayerWork, SecondsByHand) {
  const LayerWork work{6e9, 2e9, 4e9};
  EXPECT_DOUBLE_EQ(layer_seconds({{2, 1}, 0, 0}, work), (6 + 1 + 2) / 2.0) << "nothing measured apart";
  EXPECT_DOUBLE_EQ(layer_seconds({{2, 1}, 1, 0}, work), 7 / 2.0 + 2);
  EXPECT_DOUBLE_EQ(layer_seconds({{2, 1}, 1, 8}, work), 7 / 2.0 + 2 + 0.5);
}

}  // namespace
}  // namespace slidedp
