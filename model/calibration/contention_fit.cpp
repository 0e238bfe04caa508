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

// Bounds, so wide that only samples without meaning reach them: of the headroom, of a slowdown beside all of
// host.dram_gbps, and of the factor on a thread's rate.
constexpr double kMostHeadroom = 3, kMostSlowdown = 10, kMostFactor = 20;
// Weight of the distance from what is taken for granted (no contention) among the residuals: leads what no sample feels
// there, and biases the others by far less than any measurement.
constexpr double kPull = 1e-3;
// The same for Adam's rate, which one thread alone has shown.
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
  const TogetherRates predicted = predict_uncapped(hardware, sample.running);
  if (sample.running.h2d) errors.push_back(std::log(predicted.h2d_gbps / sample.measured.h2d_gbps));
  if (sample.running.d2h) errors.push_back(std::log(predicted.d2h_gbps / sample.measured.d2h_gbps));
  if (sample.running.adam_threads > 0) errors.push_back(std::log(predicted.adam_gbps / sample.measured.adam_gbps));
  return errors;
}

int rates_of(const ContentionSample& sample) {
  return int{sample.running.h2d} + int{sample.running.d2h} + int{sample.running.adam_threads > 0};
}

// The fitted numbers. The first are logarithms: of the factor on a thread's rate, and the headrooms.
enum Parameter {
  kThread,
  kHeadroomH2d,
  kHeadroomD2h,
  kH2dBesideStreams,
  kH2dBesideCopies,
  kD2hBesideStreams,
  kD2hBesideCopies,
  kStreamsBesideStreams,
  kStreamsBesideH2d,
  kStreamsBesideD2h
};
constexpr int kParameters = 10;
using Values = std::array<double, kParameters>;

// Of values or of their errors; headrooms are no logarithms here.
ContentionSpec contention_of(double h2d_headroom, double d2h_headroom, const double* values) {
  return {{h2d_headroom, values[kH2dBesideStreams], values[kH2dBesideCopies]},
          {d2h_headroom, values[kD2hBesideStreams], values[kD2hBesideCopies]},
          {values[kStreamsBesideStreams], values[kStreamsBesideH2d], values[kStreamsBesideD2h]}};
}

ContentionLaw law_of(const double* values, const HardwareSpec& hardware) {
  return {contention_of(std::exp(values[kHeadroomH2d]), std::exp(values[kHeadroomD2h]), values),
          std::exp(values[kThread]) * hardware.host.adam_elements_per_s};
}

struct SampleResidual {
  const ContentionSample& sample;
  const HardwareSpec& hardware;
  bool operator()(const double* values, double* residuals) const {
    const std::vector<double> errors = log_errors(sample, with_contention(hardware, law_of(values, hardware)));
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
    // Everything contends a little at the start: a copy within its headroom has no slope to follow.
    values_.fill(1);
    values_[kThread] = 0;
    values_[kHeadroomH2d] = values_[kHeadroomD2h] = std::log(1.05);
    build();
  }

  void solve() {
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
    static_cast<ContentionLaw&>(fit) = law_of(values_.data(), hardware_);
    double squares = 0;
    int count = 0;
    const HardwareSpec fitted = with_contention(hardware_, fit);
    for (const ContentionSample& sample : samples_) {
      for (const double error : log_errors(sample, fitted)) squares += error * error, ++count;
    }
    fit.residual_rms_log = std::sqrt(squares / count);
    fit.standard_error = errors(std::sqrt(squares / std::max(count - kParameters, 1)), fit);
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
              new SampleResidual{sample, hardware_}, ceres::TAKE_OWNERSHIP, rates_of(sample)),
          new ceres::CauchyLoss(kLossScale), values_.data());
    }
    for (int i = 0; i < kParameters; ++i) {
      problem_->AddResidualBlock(new ceres::AutoDiffCostFunction<Pull, 1, kParameters>(new Pull{i}), nullptr,
                                 values_.data());
      problem_->SetParameterLowerBound(values_.data(), i, i == kThread ? -std::log(kMostFactor) : 0);
      problem_->SetParameterUpperBound(values_.data(), i,
                                       i == kThread                             ? std::log(kMostFactor)
                                       : i == kHeadroomH2d || i == kHeadroomD2h ? std::log(kMostHeadroom)
                                                                                : kMostSlowdown);
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
    }
    return {contention_of(error[kHeadroomH2d] * law.contention.h2d.headroom,
                          error[kHeadroomD2h] * law.contention.d2h.headroom, error.data()),
            error[kThread] * law.adam_elements_per_s};
  }

  std::span<const ContentionSample> samples_;
  HardwareSpec hardware_;
  Values values_{};
  std::unique_ptr<ceres::Problem> problem_;  // refers to values_
};

}  // namespace

HardwareSpec with_contention(HardwareSpec hardware, const ContentionLaw& law) {
  hardware.contention = law.contention;
  hardware.host.adam_elements_per_s = law.adam_elements_per_s;
  return hardware;
}

namespace {

TogetherRates share_of(const MachineResources& machine, const HardwareSpec& hardware, const Together& running) {
  std::vector<Tasks> tasks;
  if (running.h2d) tasks.push_back(copies(machine, true));
  if (running.d2h) tasks.push_back(copies(machine, false));
  if (running.adam_threads > 0) tasks.push_back(adam(machine, hardware, running.adam_threads));
  std::vector<std::vector<Load>> loads;
  for (const Tasks& alike : tasks) loads.push_back(alike.loads());
  const std::vector<std::span<const Load>> views(loads.begin(), loads.end());
  std::vector<double> speeds(tasks.size());
  FairShare(machine.all()).share(views, speeds);
  const auto gbps = [&](size_t i) { return speeds[i] * tasks[i].rate() / kGiga; };
  TogetherRates rates;
  size_t next = 0;
  if (running.h2d) rates.h2d_gbps = gbps(next++);
  if (running.d2h) rates.d2h_gbps = gbps(next++);
  if (running.adam_threads > 0) rates.adam_gbps = gbps(next);
  return rates;
}

}  // namespace

TogetherRates predict_together(const HardwareSpec& hardware, const Together& running) {
  return share_of(MachineResources(hardware, 1, 1), hardware, running);
}

TogetherRates predict_uncapped(const HardwareSpec& hardware, const Together& running) {
  return share_of(MachineResources(hardware, 1, 1, /*memory_caps=*/false), hardware, running);
}

ContentionFit fit_contention(std::span<const ContentionSample> samples, const HardwareSpec& hardware) {
  check(samples);
  ContentionProblem problem(samples, hardware);
  problem.solve();
  return problem.result();
}

}  // namespace slidedp
