#include "model/calibration/contention_fit.h"

#include <ceres/ceres.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "model/base/error.h"
#include "model/sim/machine_resources.h"

namespace slidedp {
namespace {

constexpr double kGiga = 1e9;

// Bounds of costs and weights, so wide that only samples without meaning reach them.
constexpr double kLeastFactor = 0.05, kMostFactor = 20;
// Weight of the distance from what is taken for granted (costs and weights of 1, caps as seen) among the residuals:
// leads what no sample feels there, and biases the others by far less than any measurement.
constexpr double kPull = 1e-3;
// The same for Adam's rate: where all its threads together are always more than enough, their rate and the copies'
// weights cannot be told apart, and a thread alone has been measured.
constexpr double kThreadPull = 0.05;
// The robust loss treats residuals well beyond this as outliers: a median of repeats is within a few percent.
constexpr double kLossScale = 0.1;

// Tasks of one kind, each of one byte. All that are alike share alike, as one task that wants so many times as much.
struct Tasks {
  int count;
  TaskCost one;
  double rate() const { return count / one.solo_s; }  // of all, alone
  std::vector<Load> loads() const {
    std::vector<Load> loads;
    for (const Demand& demand : one.demands) loads.push_back({demand.resource, demand.amount * rate()});
    return loads;
  }
};

Tasks copies(const MachineResources& machine, bool host_to_device) {
  Tasks tasks{1, {}};
  machine.add_copy(tasks.one, host_to_device, 0, 1, 1);
  machine.add_lane_threads(tasks.one, 1);
  return tasks;
}

Tasks adam(const MachineResources& machine, const HardwareSpec& hardware, int threads) {
  Tasks tasks{threads, {}};
  tasks.one.solo_s = 1 / (hardware.host.adam_elements_per_s * kAdamBytes);
  machine.add_host_stream(tasks.one, 1);
  return tasks;
}

void check(std::span<const ContentionSample> samples) {
  if (samples.empty()) fail("Contention: there are no samples to fit.");
  for (const ContentionSample& sample : samples) {
    const auto bad = [](bool runs, double rate) { return runs && !(std::isfinite(rate) && rate > 0); };
    if (bad(sample.running.h2d, sample.measured.h2d_gbps) || bad(sample.running.d2h, sample.measured.d2h_gbps) ||
        bad(sample.running.adam_threads > 0, sample.measured.adam_gbps)) {
      fail("Contention: a sample's rates cannot be fitted; each must be positive.");
    }
  }
}

// Log of predicted over measured, for each rate of a sample.
std::vector<double> log_errors(const ContentionSample& sample, const HardwareSpec& hardware) {
  std::vector<double> errors;
  const TogetherRates predicted = predict_together(hardware, sample.running);
  if (sample.running.h2d) errors.push_back(std::log(predicted.h2d_gbps / sample.measured.h2d_gbps));
  if (sample.running.d2h) errors.push_back(std::log(predicted.d2h_gbps / sample.measured.d2h_gbps));
  if (sample.running.adam_threads > 0) errors.push_back(std::log(predicted.adam_gbps / sample.measured.adam_gbps));
  return errors;
}

int rates_of(const ContentionSample& sample) {
  return int{sample.running.h2d} + int{sample.running.d2h} + int{sample.running.adam_threads > 0};
}

// The fitted numbers, as logarithms of factors on what is taken for granted: one size of step suits all.
enum Parameter { kCap, kController, kThread, kCostH2d, kCostD2h, kWeightH2d, kWeightD2h };
constexpr int kParameters = 7;
using Values = std::array<double, kParameters>;

// What is taken for granted. The controller's cap is a multiple of the streams'.
struct Scales {
  double stream_gbps = 0, adam_elements_per_s = 0, controller = 1;
};

Scales scales_of(std::span<const ContentionSample> samples, const HardwareSpec& hardware, bool caps) {
  Scales scales{hardware.host.cpu_stream_gbps, hardware.host.adam_elements_per_s};
  // A cap that was seen elsewhere, in other memory, counts only where Adam alone was not looked at here.
  if (caps) {
    scales.stream_gbps = 0;
    for (const ContentionSample& sample : samples) {
      scales.stream_gbps = std::max(scales.stream_gbps, sample.measured.adam_gbps);
    }
  } else {
    scales.controller = std::max(1.0, hardware.host.dram_gbps / scales.stream_gbps);
  }
  return scales;
}

ContentionLaw law_of(const double* values, const Scales& scales) {
  ContentionLaw law;
  law.cpu_stream_gbps = std::exp(values[kCap]) * scales.stream_gbps;
  law.dram_gbps = std::exp(values[kController]) * scales.controller * law.cpu_stream_gbps;
  law.adam_elements_per_s = std::exp(values[kThread]) * scales.adam_elements_per_s;
  law.h2d_cost = std::exp(values[kCostH2d]);
  law.d2h_cost = std::exp(values[kCostD2h]);
  law.h2d_weight = std::exp(values[kWeightH2d]);
  law.d2h_weight = std::exp(values[kWeightD2h]);
  return law;
}

struct SampleResidual {
  const ContentionSample& sample;
  const HardwareSpec& hardware;
  const Scales& scales;
  bool operator()(const double* values, double* residuals) const {
    const std::vector<double> errors = log_errors(sample, with_contention(hardware, law_of(values, scales)));
    std::copy(errors.begin(), errors.end(), residuals);
    return true;
  }
};

struct Pull {
  int parameter;
  template <typename T>
  bool operator()(const T* values, T* residual) const {
    residual[0] = T(parameter == kThread ? kThreadPull : kPull) * values[parameter];
    return true;
  }
};

class ContentionProblem {
 public:
  ContentionProblem(std::span<const ContentionSample> samples, const HardwareSpec& hardware)
      : samples_(samples), hardware_(hardware) {
    for (const ContentionSample& sample : samples) {
      const Together& running = sample.running;
      if (running.adam_threads > 0 && !running.h2d && !running.d2h) caps_ = true;
    }
    scales_ = scales_of(samples, hardware, caps_);
  }

  void solve() {
    // Copies cost enough at the start to fill the controller: one that is not full has no slope to follow.
    values_ = {0, 0, 0, 0, 0, 0, 0};
    build();
    ceres::Solver::Options options;
    options.linear_solver_type = ceres::DENSE_QR;
    options.max_num_iterations = 200;
    options.function_tolerance = 1e-12;
    options.parameter_tolerance = 1e-10;
    options.logging_type = ceres::SILENT;
    ceres::Solver::Summary summary;
    ceres::Solve(options, problem_.get(), &summary);
  }

  ContentionFit result() const {
    ContentionFit fit;
    static_cast<ContentionLaw&>(fit) = law_of(values_.data(), scales_);
    fit.caps = caps_;
    if (!caps_) {
      fit.cpu_stream_gbps = hardware_.host.cpu_stream_gbps;
      fit.dram_gbps = hardware_.host.dram_gbps;
      fit.adam_elements_per_s = hardware_.host.adam_elements_per_s;
    }
    double squares = 0;
    int count = 0;
    const HardwareSpec fitted = with_contention(hardware_, fit);
    for (const ContentionSample& sample : samples_) {
      for (const double error : log_errors(sample, fitted)) squares += error * error, ++count;
    }
    fit.residual_rms_log = std::sqrt(squares / count);
    const int free = caps_ ? kParameters : kParameters - 3;
    fit.standard_error = errors(std::sqrt(squares / std::max(count - free, 1)), fit);
    return fit;
  }

 private:
  void build() {
    problem_ = std::make_unique<ceres::Problem>();
    problem_->AddParameterBlock(values_.data(), kParameters);
    for (const ContentionSample& sample : samples_) {
      if (rates_of(sample) == 0) continue;
      problem_->AddResidualBlock(
          new ceres::NumericDiffCostFunction<SampleResidual, ceres::CENTRAL, ceres::DYNAMIC, kParameters>(
              new SampleResidual{sample, hardware_, scales_}, ceres::TAKE_OWNERSHIP, rates_of(sample)),
          new ceres::CauchyLoss(kLossScale), values_.data());
    }
    for (int i = 0; i < kParameters; ++i) {
      problem_->AddResidualBlock(new ceres::AutoDiffCostFunction<Pull, 1, kParameters>(new Pull{i}), nullptr,
                                 values_.data());
      problem_->SetParameterLowerBound(values_.data(), i, i == kController ? 0 : std::log(kLeastFactor));
      problem_->SetParameterUpperBound(values_.data(), i, std::log(kMostFactor));
    }
    if (!caps_) {
      problem_->SetManifold(values_.data(),
                            new ceres::SubsetManifold(kParameters, std::vector<int>{kCap, kController, kThread}));
    }
  }

  // `sigma`: of one rate's log. The pulls keep the Jacobian of full rank: what no sample feels gets sigma / kPull.
  ContentionLaw errors(double sigma, const ContentionLaw& law) const {
    ceres::Covariance::Options options;
    options.algorithm_type = ceres::DENSE_SVD;
    options.apply_loss_function = false;
    options.min_reciprocal_condition_number = 0;
    ceres::Covariance covariance(options);
    const std::vector<std::pair<const double*, const double*>> wanted{{values_.data(), values_.data()}};
    std::array<double, kParameters * kParameters> block{};
    Values error{};
    if (covariance.Compute(wanted, problem_.get()) &&
        covariance.GetCovarianceBlock(values_.data(), values_.data(), block.data())) {
      for (size_t i = 0; i < kParameters; ++i) error[i] = sigma * std::sqrt(block[i * kParameters + i]);
      // Of the product of the streams' cap and the multiple.
      error[kController] =
          sigma * std::sqrt(std::max(block[kCap * kParameters + kCap] + block[kController * kParameters + kController] +
                                         2 * block[kCap * kParameters + kController],
                                     0.0));
    }
    ContentionLaw result;
    result.cpu_stream_gbps = error[kCap] * law.cpu_stream_gbps;
    result.dram_gbps = error[kController] * law.dram_gbps;
    result.adam_elements_per_s = error[kThread] * law.adam_elements_per_s;
    result.h2d_cost = error[kCostH2d] * law.h2d_cost;
    result.d2h_cost = error[kCostD2h] * law.d2h_cost;
    result.h2d_weight = error[kWeightH2d] * law.h2d_weight;
    result.d2h_weight = error[kWeightD2h] * law.d2h_weight;
    return result;
  }

  std::span<const ContentionSample> samples_;
  const HardwareSpec& hardware_;
  bool caps_ = false;
  Scales scales_;
  Values values_{};
  std::unique_ptr<ceres::Problem> problem_;  // refers to values_
};

}  // namespace

HardwareSpec with_contention(HardwareSpec hardware, const ContentionLaw& law) {
  HostSpec& host = hardware.host;
  hardware.pcie.h2d_loss = hardware.pcie.d2h_loss = 0;
  host.stream_loss_h2d = host.stream_loss_d2h = 0;
  host.cpu_stream_gbps = law.cpu_stream_gbps;
  host.dram_gbps = law.dram_gbps;
  host.adam_elements_per_s = law.adam_elements_per_s;
  host.h2d_cost = law.h2d_cost;
  host.d2h_cost = law.d2h_cost;
  host.h2d_weight = law.h2d_weight;
  host.d2h_weight = law.d2h_weight;
  return hardware;
}

TogetherRates predict_together(const HardwareSpec& hardware, const Together& running) {
  const MachineResources machine(hardware, 1, 1);
  std::vector<Tasks> tasks;
  if (running.h2d) tasks.push_back(copies(machine, true));
  if (running.d2h) tasks.push_back(copies(machine, false));
  if (running.adam_threads > 0) tasks.push_back(adam(machine, hardware, running.adam_threads));
  std::vector<std::vector<Load>> loads;
  std::vector<double> weights;
  for (const Tasks& alike : tasks) {
    loads.push_back(alike.loads());
    weights.push_back(alike.one.weight);
  }
  const std::vector<std::span<const Load>> views(loads.begin(), loads.end());
  std::vector<double> speeds(tasks.size());
  FairShare(machine.all()).share(views, speeds, weights);
  const auto gbps = [&](size_t i) { return speeds[i] * tasks[i].rate() / kGiga; };
  TogetherRates rates;
  size_t next = 0;
  if (running.h2d) rates.h2d_gbps = gbps(next++);
  if (running.d2h) rates.d2h_gbps = gbps(next++);
  if (running.adam_threads > 0) rates.adam_gbps = gbps(next);
  return rates;
}

ContentionFit fit_contention(std::span<const ContentionSample> samples, const HardwareSpec& hardware) {
  check(samples);
  ContentionProblem problem(samples, hardware);
  problem.solve();
  return problem.result();
}

}  // namespace slidedp
