#include "model/calibration/fit.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <random>
#include <vector>

#include "model/base/error.h"

namespace slidedp {
namespace {

using testing::HasSubstr;

const LinkRate kLink{20e-6, 12.5};
const KernelRate kKernel{80, 0.5};

double link_seconds(double bytes) { return kLink.latency_s + bytes / (kLink.gbps * 1e9); }
double kernel_seconds(double flops) { return (flops + kKernel.half_gflop * 1e9) / (kKernel.peak_gflops * 1e9); }

// 64 KiB ... 64 MiB in steps of four: the probes' own sizes.
std::vector<double> link_sizes() {
  std::vector<double> sizes;
  for (double bytes = 65536; bytes <= 64.0 * (1 << 20); bytes *= 4) sizes.push_back(bytes);
  return sizes;
}
std::vector<double> kernel_sizes() { return {0.25e9, 0.5e9, 1e9, 2e9, 4e9}; }

// `repeats` samples a size with 3 % of log-normal noise; a share of them `outlier` times slower, as a preempted thread
// is.
std::vector<FitSample> noisy(const std::vector<double>& sizes, const std::function<double(double)>& law, int repeats,
                             double outlier_share, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<double> noise(0, 0.03);
  std::bernoulli_distribution is_outlier(outlier_share);
  std::uniform_real_distribution<double> outlier(1.5, 5.0);
  std::vector<FitSample> samples;
  for (double size : sizes) {
    for (int i = 0; i < repeats; ++i) {
      const double factor = is_outlier(random) ? outlier(random) : 1.0;
      samples.push_back({size, law(size) * factor * std::exp(noise(random))});
    }
  }
  return samples;
}

TEST(Fit, ExactSamplesGiveTheExactLaw) {
  std::vector<FitSample> link, kernel;
  for (double bytes : link_sizes()) link.push_back({bytes, link_seconds(bytes)});
  for (double flops : kernel_sizes()) kernel.push_back({flops, kernel_seconds(flops)});
  const LinkFit link_fit = fit_link(link, "link");
  // 1e-6: the solver's own tolerance, far below any measurement.
  EXPECT_NEAR(link_fit.rate.latency_s / kLink.latency_s, 1, 1e-6);
  EXPECT_NEAR(link_fit.rate.gbps / kLink.gbps, 1, 1e-6);
  EXPECT_TRUE(link_fit.summary.converged);
  EXPECT_FALSE(link_fit.summary.degenerate);
  EXPECT_LT(link_fit.summary.residual_rms_log, 1e-6);
  EXPECT_EQ(link_fit.summary.samples, static_cast<int>(link.size()));
  const KernelFit kernel_fit = fit_kernel(kernel, "kernel");
  EXPECT_NEAR(kernel_fit.rate.peak_gflops / kKernel.peak_gflops, 1, 1e-6);
  EXPECT_NEAR(kernel_fit.rate.half_gflop / kKernel.half_gflop, 1, 1e-6);
}

// 200 seeds with outliers: each parameter within three of its standard errors in at least 95 % of them (a normal
// estimate would be in 99.7 %; the margin is for the one-sided outliers), and the standard errors are not just large.
TEST(Fit, LinkIsRecoveredFromNoiseWithOutliers) {
  int latency_hits = 0, rate_hits = 0;
  double largest_se = 0;
  for (unsigned seed = 0; seed < 200; ++seed) {
    const LinkFit fit = fit_link(noisy(link_sizes(), link_seconds, 12, 0.05, seed), "link");
    ASSERT_TRUE(fit.summary.converged) << seed;
    latency_hits += std::abs(fit.rate.latency_s - kLink.latency_s) <= 3 * fit.standard_error.latency_s;
    rate_hits += std::abs(fit.rate.gbps - kLink.gbps) <= 3 * fit.standard_error.gbps;
    largest_se =
        std::max({largest_se, fit.standard_error.gbps / kLink.gbps, fit.standard_error.latency_s / kLink.latency_s});
  }
  EXPECT_GE(latency_hits, 190);
  EXPECT_GE(rate_hits, 190);
  EXPECT_LT(largest_se, 0.05);
}

TEST(Fit, KernelIsRecoveredFromNoiseWithOutliers) {
  int peak_hits = 0, half_hits = 0;
  double largest_se = 0;
  for (unsigned seed = 0; seed < 200; ++seed) {
    const KernelFit fit = fit_kernel(noisy(kernel_sizes(), kernel_seconds, 12, 0.05, seed), "kernel");
    ASSERT_TRUE(fit.summary.converged) << seed;
    peak_hits += std::abs(fit.rate.peak_gflops - kKernel.peak_gflops) <= 3 * fit.standard_error.peak_gflops;
    half_hits += std::abs(fit.rate.half_gflop - kKernel.half_gflop) <= 3 * fit.standard_error.half_gflop;
    largest_se = std::max(largest_se, fit.standard_error.peak_gflops / kKernel.peak_gflops);
  }
  EXPECT_GE(peak_hits, 190);
  EXPECT_GE(half_hits, 190);
  EXPECT_LT(largest_se, 0.05);
}

// A quarter of the samples slowed by up to five times would move a least-squares rate by tens of per cent.
TEST(Fit, ManyOutliersHardlyMoveTheRate) {
  for (unsigned seed = 0; seed < 20; ++seed) {
    const LinkFit fit = fit_link(noisy(link_sizes(), link_seconds, 12, 0.25, seed), "link");
    // 5 %: the bias that the loss leaves at this share of outliers; three times the noise of the mean.
    EXPECT_NEAR(fit.rate.gbps / kLink.gbps, 1, 0.05) << seed;
    EXPECT_GT(fit.summary.residual_rms_log, 0.2) << "the outliers are still reported";
  }
}

TEST(Fit, OneSizeFallsBackToZeroLatencyAndSaysSo) {
  const std::vector<FitSample> samples{{1e6, 1.0e-3}, {1e6, 1.01e-3}, {1e6, 0.99e-3}};
  const LinkFit fit = fit_link(samples, "copy.h2d");
  EXPECT_TRUE(fit.summary.degenerate);
  EXPECT_EQ(fit.rate.latency_s, 0);
  EXPECT_NEAR(fit.rate.gbps, 1.0, 1e-3);  // the middle sample
  EXPECT_THAT(fit.summary.note, HasSubstr("copy.h2d"));
  EXPECT_THAT(fit.summary.note, HasSubstr("one size"));
  const KernelFit kernel = fit_kernel(samples, "kernel.head");
  EXPECT_TRUE(kernel.summary.degenerate);
  EXPECT_EQ(kernel.rate.half_gflop, 0);
  EXPECT_THAT(kernel.summary.note, HasSubstr("kernel.head"));
}

TEST(Fit, SizesThatAreAlmostAlikeAreDegenerate) {
  std::vector<FitSample> alike, apart;
  for (double size : {1e6, 1.002e6, 1.004e6}) alike.push_back({size, link_seconds(size)});
  for (double size : {1e6, 1.2e6, 1.4e6}) apart.push_back({size, link_seconds(size)});
  const LinkFit fit = fit_link(alike, "link");
  EXPECT_TRUE(fit.summary.degenerate);
  EXPECT_EQ(fit.rate.latency_s, 0);
  EXPECT_THAT(fit.summary.note, HasSubstr("similar"));
  EXPECT_FALSE(fit_link(apart, "link").summary.degenerate);
}

// As on a busy machine: the larger size came out faster. Without a fall-back the best rate would be infinite.
TEST(Fit, NoiseThatHidesTheRateIsSaid) {
  const std::vector<FitSample> samples{{1e9, 1.0}, {1e9, 1.1}, {1e9, 0.9}, {2e9, 0.8}, {2e9, 0.9}, {2e9, 0.85}};
  const KernelFit fit = fit_kernel(samples, "kernel.layer");
  EXPECT_TRUE(fit.summary.degenerate);
  EXPECT_EQ(fit.rate.half_gflop, 0);
  EXPECT_THAT(fit.summary.note, HasSubstr("noisy"));
  EXPECT_GE(fit.rate.peak_gflops, 1 / 1.1);  // between the slowest and the fastest sample's own rate
  EXPECT_LE(fit.rate.peak_gflops, 2 / 0.8);
}

// Sizes over many decades and no fixed cost at all: the bound holds, and this is not a lack of rank.
TEST(Fit, NoFixedCostStaysOnTheBound) {
  std::vector<FitSample> samples;
  for (double bytes : link_sizes()) samples.push_back({bytes, bytes / 10e9 * (1 + bytes * 1e-9)});
  const LinkFit fit = fit_link(samples, "link");
  EXPECT_FALSE(fit.summary.degenerate);
  EXPECT_GE(fit.rate.latency_s, 0);
  EXPECT_LT(fit.rate.latency_s, 1e-7);  // 1 % of the shortest sample is 66 ns
  EXPECT_TRUE(std::isfinite(fit.standard_error.latency_s));
}

// A law that bends away by a quarter over the sizes, as a cache makes it: no scatter of 3 % explains that.
TEST(Fit, StructuredResidualsAreSaid) {
  const auto bent = [](double bytes) { return link_seconds(bytes) * (1 + 0.25 * std::sin(std::log(bytes))); };
  const LinkFit fit = fit_link(noisy(link_sizes(), bent, 12, 0.05, 1), "copy.h2d");
  EXPECT_TRUE(fit.summary.structured);
  EXPECT_THAT(fit.summary.note, HasSubstr("copy.h2d: the law misses the medians of the sizes by"));
  EXPECT_EQ(fit.summary.what, "copy.h2d");
}

TEST(Fit, NoiseAndOutliersAreNoStructure) {
  int structured = 0;
  for (unsigned seed = 0; seed < 200; ++seed) {
    structured += fit_link(noisy(link_sizes(), link_seconds, 12, 0.05, seed), "link").summary.structured;
  }
  // The test's level is 0.1 %; outliers make the scatter inside a size larger, not smaller.
  EXPECT_LE(structured, 3);
}

// What a fit says of its two parameters together is what they do from one data set to the next.
TEST(Fit, CorrelationIsThatOfTheParameters) {
  double latency = 0, rate = 0, both = 0, said = 0;
  constexpr int kSets = 200;
  for (unsigned seed = 0; seed < kSets; ++seed) {
    const LinkFit fit = fit_link(noisy(link_sizes(), link_seconds, 12, 0, seed), "link");
    const double dl = fit.rate.latency_s / kLink.latency_s - 1, dr = fit.rate.gbps / kLink.gbps - 1;
    latency += dl * dl;
    rate += dr * dr;
    both += dl * dr;
    said += fit.correlation / kSets;
  }
  // 200 sets give a correlation to within 1 / sqrt(200) = 0.07; three of that.
  EXPECT_NEAR(said, both / std::sqrt(latency * rate), 0.21);
}

TEST(Fit, OrderOfSamplesDoesNotMatter) {
  std::vector<FitSample> samples = noisy(link_sizes(), link_seconds, 5, 0.1, 7);
  const LinkFit sorted = fit_link(samples, "link");
  std::shuffle(samples.begin(), samples.end(), std::mt19937(3));
  EXPECT_EQ(fit_link(samples, "link").rate, sorted.rate);
}

TEST(Fit, BadSamplesAreNamed) {
  const auto message = [](const std::vector<FitSample>& samples) {
    try {
      fit_link(samples, "copy.d2h");
    } catch (const Error& error) {
      return std::string(error.what());
    }
    return std::string("accepted");
  };
  EXPECT_THAT(message({}), HasSubstr("copy.d2h: there are no samples"));
  EXPECT_THAT(message({{1e6, 1e-3}, {1e6, 0}}), HasSubstr("must be positive"));
  EXPECT_THAT(message({{-1, 1e-3}}), HasSubstr("copy.d2h"));
  EXPECT_THAT(message({{1e6, std::nan("")}}), HasSubstr("must be positive"));
}

}  // namespace
}  // namespace slidedp
