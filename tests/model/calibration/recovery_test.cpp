// Samples of a known machine, with noise, outliers and things that were not measured: the fits give its parameters back
// within three of their own standard errors.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "model/calibration/contention_fit.h"
#include "model/calibration/fills.h"
#include "model/calibration/measurement.h"
#include "model/cost/layer_work.h"

namespace slidedp {
namespace {

constexpr int kSeeds = 200;
constexpr int kRepeats = 8;
constexpr double kNoise = 0.02, kOutliers = 0.05;

class Sampler {
 public:
  explicit Sampler(unsigned seed) : random_(seed) {}

  bool happens(double share) { return std::bernoulli_distribution(share)(random_); }
  // Repeats of a time; an outlier takes 1.5 to 4 times as long.
  std::vector<double> repeats(double seconds) {
    std::vector<double> values;
    for (int i = 0; i < kRepeats; ++i) {
      const double factor = happens(kOutliers) ? std::uniform_real_distribution<double>(1.5, 4)(random_) : 1;
      values.push_back(seconds * factor * std::exp(std::normal_distribution<double>(0, kNoise)(random_)));
    }
    return values;
  }
  // Of a rate: an outlier is as much slower.
  std::vector<double> rates(double gbps) {
    std::vector<double> values = repeats(1 / gbps);
    for (double& value : values) value = 1 / value;
    return values;
  }

 private:
  std::mt19937 random_;
};

// Fits `measure(seed)` as the probe `key` does, and counts for each field how often it is within three standard errors
// of what `machine` has.
void expect_recovered(const std::string& key, const HardwareSpec& machine,
                      const std::function<std::vector<Measurement>(Sampler&)>& measure, double largest_error) {
  std::map<std::string, double> truth;
  for (const NamedValue& value : named_values(machine)) truth[value.field] = value.value;
  std::map<std::string, int> recovered;
  std::map<std::string, std::vector<double>> errors;
  for (unsigned seed = 0; seed < kSeeds; ++seed) {
    Sampler sampler(seed);
    HardwareSpec spec = machine;
    for (const Finding& finding : fill_fields(key, {1, 16}, measure(sampler), spec)) {
      recovered[finding.field] += std::abs(finding.value - truth.at(finding.field)) <= 3 * finding.standard_error;
      errors[finding.field].push_back(finding.standard_error / std::abs(truth.at(finding.field)));
    }
  }
  ASSERT_FALSE(recovered.empty());
  for (const auto& [field, count] : recovered) {
    EXPECT_GE(count, kSeeds * 95 / 100) << field;
    double mean = 0;
    for (const double error : errors.at(field)) mean += error / kSeeds;
    EXPECT_LT(mean, largest_error) << field << ": errors so large would excuse anything";
  }
}

TEST(Recovery, Links) {
  HardwareSpec machine;
  machine.pcie.h2d = {5e-6, 55};
  expect_recovered(
      "copy.h2d", machine,
      [&](Sampler& sampler) {
        std::vector<Measurement> measured;
        for (double bytes = 65536; bytes <= 1 << 30; bytes *= 4) {
          if (sampler.happens(0.2)) continue;
          measured.push_back({"seconds",
                              "s",
                              {{"bytes", bytes}},
                              sampler.repeats(machine.pcie.h2d.latency_s + bytes / (machine.pcie.h2d.gbps * 1e9)),
                              true});
        }
        return measured;
      },
      0.05);
}

TEST(Recovery, Kernels) {
  HardwareSpec machine;
  machine.kernels.embedding = {1100, 0.13};
  expect_recovered(
      "kernel.embedding", machine,
      [&](Sampler& sampler) {
        std::vector<Measurement> measured;
        for (double gflop = 0.01; gflop <= 3; gflop *= 2) {
          if (sampler.happens(0.2)) continue;
          measured.push_back({"backward",
                              "s",
                              {{"flops", gflop * 1e9}},
                              sampler.repeats(kernel_seconds(machine.kernels.embedding, gflop * 1e9)),
                              true});
        }
        return measured;
      },
      0.1);
}

// Adam with several teams beside copies in no, one and both directions; some situations are missing.
TEST(Recovery, Contention) {
  HardwareSpec machine;
  machine.device.backend = "cuda";
  machine.pcie = {{5e-6, 55}, {4e-6, 54}, 98, 55, 54};
  machine.host.cores = 16;
  machine.host.cpu_stream_gbps = 300;  // more than what the samples show
  machine.host.dram_gbps = 400;
  machine.host.adam_elements_per_s = 7.7e8;
  machine.contention = {{1.2, 1.28, 2.92}, {1.1, 1, 1.6}, {0.88, 0.56, 1.12}};
  expect_recovered(
      "host.contention", machine,
      [&](Sampler& sampler) {
        std::vector<Measurement> measured;
        for (const int threads : {5, 10, 14}) {
          for (const auto& [h2d, d2h] : {std::pair(false, false), {true, false}, {false, true}, {true, true}}) {
            if ((h2d || d2h) && sampler.happens(0.1)) continue;
            const TogetherRates rates = predict_together(machine, {h2d, d2h, threads});
            const std::map<std::string, double> parameters{
                {"h2d", h2d ? 1.0 : 0.0}, {"d2h", d2h ? 1.0 : 0.0}, {"threads", threads}};
            if (h2d) measured.push_back({"h2d", "GB/s", parameters, sampler.rates(rates.h2d_gbps), true});
            if (d2h) measured.push_back({"d2h", "GB/s", parameters, sampler.rates(rates.d2h_gbps), true});
            measured.push_back({"adam", "GB/s", parameters, sampler.rates(rates.adam_gbps), true});
          }
        }
        return measured;
      },
      0.2);
}

}  // namespace
}  // namespace slidedp
