#include "model/calibration/contention_fit.h"

#include <ceres/ceres.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "model/base/error.h"
#include "model/sim/fair_share.h"

namespace slidedp {
namespace {

constexpr double kGiga = 1e9;

// Bounds of the losses. Two stream losses together stay below 1.
constexpr double kMostLinkLoss = 0.9, kMostStreamLoss = 0.45;
// Bounds of the exponent: beyond them nothing changes between a machine's useful loads.
constexpr double kLeastExponent = 0.5, kMostExponent = 6;
// Where the search starts. Losses high, since one too small to bind has no slope to follow; or low, since beside high
// ones the controller is never full.
struct Start {
  double loss, exponent;
};
constexpr std::array<Start, 3> kStarts{{{0.3, 1}, {0.3, 3}, {0.02, 1}}};
// Weight of the distance from what is taken for granted (no loss, exponent 1, caps as seen) among the residuals: leads
// what no sample feels there, and biases the others by far less than any measurement.
constexpr double kPull = 1e-4;
// The robust loss treats residuals well beyond this as outliers: a median of repeats is within a few percent.
constexpr double kLossScale = 0.1;

enum Id : ResourceId { kH2d, kD2h, kDuplex, kStream, kDram, kRootH2d, kRootD2h, kCores };

std::vector<Resource> resources_of(const HardwareSpec& hardware) {
  const PcieSpec& pcie = hardware.pcie;
  const HostSpec& host = hardware.host;
  const double exponent = host.loss_exponent;
  return {{"h2d link", pcie.h2d.gbps * kGiga, {{kStream, pcie.h2d_loss, exponent}}},
          {"d2h link", pcie.d2h.gbps * kGiga, {{kStream, pcie.d2h_loss, exponent}}},
          {"duplex link", pcie.duplex_gbps * kGiga, {{kStream, pcie.duplex_loss, exponent}}},
          {"CPU streaming",
           host.cpu_stream_gbps * kGiga,
           {{kRootH2d, host.stream_loss_h2d, exponent}, {kRootD2h, host.stream_loss_d2h, exponent}}},
          {"host DRAM", host.dram_gbps * kGiga},
          {"root h2d", pcie.root_h2d_gbps * kGiga},
          {"root d2h", pcie.root_d2h_gbps * kGiga},
          {"CPU cores", static_cast<double>(host.cores)}};
}

// Tasks of one kind run at the least of what they can do alone and of every resource that they use;
// `count` of them
// share alike, as one task that wants so many times as much.
struct Tasks {
  std::vector<Load> loads;
  double rate;
};

Tasks copy_tasks(const std::vector<Resource>& resources, ResourceId link, ResourceId root, bool cpu_backend) {
  double rate = resources[kDram].capacity;
  for (const ResourceId id : {link, root, static_cast<ResourceId>(kDuplex)}) {
    rate = std::min(rate, resources[static_cast<size_t>(id)].capacity);
  }
  Tasks tasks{{{link, rate}, {root, rate}, {kDuplex, rate}, {kDram, rate}}, rate};
  if (cpu_backend) tasks.loads.push_back({kCores, 1});
  return tasks;
}

Tasks adam_tasks(const std::vector<Resource>& resources, const HardwareSpec& hardware, int count) {
  const double rate = count * std::min({hardware.host.adam_elements_per_s * kAdamBytes, resources[kStream].capacity,
                                        resources[kDram].capacity});
  return {{{kStream, rate}, {kDram, rate}, {kCores, static_cast<double>(count)}}, rate};
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

// The fitted numbers: all of order one, so that one size of step suits them.
enum Parameter {
  kLossH2d,
  kLossD2h,
  kLossDuplex,
  kLossStreamH2d,
  kLossStreamD2h,
  kExponent,
  kCap,
  kController,
  kThread
};
constexpr int kParameters = 9;
using Values = std::array<double, kParameters>;

// Caps relative to what was seen: that of the CPU's streams and Adam's rate as they are, the controller's as a multiple
// of the streams' cap.
struct Scales {
  double stream_gbps = 0, adam_elements_per_s = 0;
  double controller = 1;  // what is taken for granted
};

Scales scales_of(std::span<const ContentionSample> samples, const HardwareSpec& hardware, bool caps) {
  Scales scales{hardware.host.cpu_stream_gbps, hardware.host.adam_elements_per_s};
  double most = 0, most_adam = 0;
  for (const ContentionSample& sample : samples) {
    most = std::max(most, sample.measured.sum());
    most_adam = std::max(most_adam, sample.measured.adam_gbps);
  }
  // A cap that was seen elsewhere, in other memory, counts only where Adam alone was not looked at here.
  if (caps) scales.stream_gbps = most_adam;
  scales.controller = std::max({1.0, hardware.host.dram_gbps / scales.stream_gbps, most / scales.stream_gbps});
  return scales;
}

ContentionLaw law_of(const double* values, const Scales& scales) {
  ContentionLaw law;
  law.h2d_loss = values[kLossH2d];
  law.d2h_loss = values[kLossD2h];
  law.duplex_loss = values[kLossDuplex];
  law.stream_loss_h2d = values[kLossStreamH2d];
  law.stream_loss_d2h = values[kLossStreamD2h];
  law.loss_exponent = values[kExponent];
  law.cpu_stream_gbps = values[kCap] * scales.stream_gbps;
  law.dram_gbps = values[kController] * law.cpu_stream_gbps;
  law.adam_elements_per_s = values[kThread] * scales.adam_elements_per_s;
  return law;
}

struct SampleResidual {
  const ContentionSample& sample;
  const HardwareSpec& hardware;
  const Scales& scales;
  bool operator()(const double* values, double* residuals) const {
    const std::vector<double> errors = log_errors(sample, with_losses(hardware, law_of(values, scales)));
    std::copy(errors.begin(), errors.end(), residuals);
    return true;
  }
};

struct Pull {
  double granted;
  int parameter;
  bool operator()(const double* values, double* residual) const {
    residual[0] = kPull * (values[parameter] - granted);
    return true;
  }
};

class ContentionProblem {
 public:
  ContentionProblem(std::span<const ContentionSample> samples, const HardwareSpec& hardware)
      : samples_(samples), hardware_(hardware) {
    std::set<int> beside_copies;
    for (const ContentionSample& sample : samples) {
      const Together& running = sample.running;
      const bool copies = running.h2d || running.d2h;
      if (running.adam_threads > 0 && copies) beside_copies.insert(running.adam_threads);
      if (running.adam_threads > 0 && !copies) caps_ = true;
    }
    several_ = beside_copies.size() > 1;
    scales_ = scales_of(samples, hardware, caps_);
    granted_ = {0, 0, 0, 0, 0, 1, 1, scales_.controller, 1};
  }

  // The best of several starts.
  void solve() {
    double best = -1;
    Values found{};
    for (const Start& start : kStarts) {
      if (!several_ && start.exponent != 1) continue;
      values_ = granted_;
      std::fill_n(values_.begin(), kExponent, start.loss);
      values_[kExponent] = start.exponent;
      build();
      const double cost = minimize();
      if (best >= 0 && cost >= best) continue;
      best = cost;
      found = values_;
    }
    values_ = found;
    build();
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
    const HardwareSpec fitted = with_losses(hardware_, fit);
    for (const ContentionSample& sample : samples_) {
      for (const double error : log_errors(sample, fitted)) squares += error * error, ++count;
    }
    fit.residual_rms_log = std::sqrt(squares / count);
    const int free = 5 + int{several_} + (caps_ ? 3 : 0);
    const double sigma = std::sqrt(squares / std::max(count - free, 1));
    fit.standard_error = errors(sigma, fit);
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
      problem_->AddResidualBlock(new ceres::NumericDiffCostFunction<Pull, ceres::CENTRAL, 1, kParameters>(
                                     new Pull{granted_[static_cast<size_t>(i)], i}),
                                 nullptr, values_.data());
    }
    const auto bound = [&](int parameter, double least, double most) {
      problem_->SetParameterLowerBound(values_.data(), parameter, least);
      problem_->SetParameterUpperBound(values_.data(), parameter, most);
    };
    for (const int i : {kLossH2d, kLossD2h, kLossDuplex}) bound(i, 0, kMostLinkLoss);
    for (const int i : {kLossStreamH2d, kLossStreamD2h}) bound(i, 0, kMostStreamLoss);
    bound(kExponent, kLeastExponent, kMostExponent);
    bound(kCap, 0.2, 5);
    bound(kController, 1, 10);
    bound(kThread, 0.1, 10);
    std::vector<int> held;
    if (!several_) held.push_back(kExponent);
    if (!caps_) {
      for (const int i : {kCap, kController, kThread}) held.push_back(i);
    }
    if (!held.empty()) problem_->SetManifold(values_.data(), new ceres::SubsetManifold(kParameters, held));
  }

  double minimize() {
    ceres::Solver::Options options;
    options.linear_solver_type = ceres::DENSE_QR;
    options.max_num_iterations = 200;
    options.function_tolerance = 1e-12;
    options.parameter_tolerance = 1e-10;
    options.logging_type = ceres::SILENT;
    ceres::Solver::Summary summary;
    ceres::Solve(options, problem_.get(), &summary);
    return summary.final_cost;
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
    ContentionLaw result;
    result.h2d_loss = error[kLossH2d];
    result.d2h_loss = error[kLossD2h];
    result.duplex_loss = error[kLossDuplex];
    result.stream_loss_h2d = error[kLossStreamH2d];
    result.stream_loss_d2h = error[kLossStreamD2h];
    result.loss_exponent = error[kExponent];
    result.cpu_stream_gbps = error[kCap] * scales_.stream_gbps;
    // Of a product; the factors' correlation is neglected.
    result.dram_gbps =
        law.dram_gbps * std::hypot(error[kController] / values_[kController], error[kCap] / values_[kCap]);
    result.adam_elements_per_s = error[kThread] * scales_.adam_elements_per_s;
    return result;
  }

  std::span<const ContentionSample> samples_;
  const HardwareSpec& hardware_;
  bool several_ = false, caps_ = false;
  Scales scales_;
  Values granted_{}, values_{};
  std::unique_ptr<ceres::Problem> problem_;  // refers to values_
};

}  // namespace

HardwareSpec with_losses(HardwareSpec hardware, const ContentionLaw& law) {
  hardware.pcie.h2d_loss = law.h2d_loss;
  hardware.pcie.d2h_loss = law.d2h_loss;
  hardware.pcie.duplex_loss = law.duplex_loss;
  hardware.host.stream_loss_h2d = law.stream_loss_h2d;
  hardware.host.stream_loss_d2h = law.stream_loss_d2h;
  hardware.host.loss_exponent = law.loss_exponent;
  hardware.host.cpu_stream_gbps = law.cpu_stream_gbps;
  hardware.host.dram_gbps = law.dram_gbps;
  hardware.host.adam_elements_per_s = law.adam_elements_per_s;
  return hardware;
}

TogetherRates predict_together(const HardwareSpec& hardware, const Together& running) {
  const std::vector<Resource> resources = resources_of(hardware);
  const bool cpu_backend = hardware.device.backend == "cpu";
  std::vector<Tasks> tasks;
  if (running.h2d) tasks.push_back(copy_tasks(resources, kH2d, kRootH2d, cpu_backend));
  if (running.d2h) tasks.push_back(copy_tasks(resources, kD2h, kRootD2h, cpu_backend));
  if (running.adam_threads > 0) tasks.push_back(adam_tasks(resources, hardware, running.adam_threads));
  std::vector<std::span<const Load>> loads;
  for (const Tasks& one : tasks) loads.emplace_back(one.loads);
  std::vector<double> speeds(tasks.size());
  FairShare(resources).share(loads, speeds);
  const auto gbps = [&](size_t i) { return speeds[i] * tasks[i].rate / kGiga; };
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
