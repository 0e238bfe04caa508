#include "model/calibration/contention_fit.h"

#include <ceres/ceres.h>

#include <algorithm>
#include <array>
#include <cmath>
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
// Where the search starts: high, since a loss too small to bind has no slope to follow.
constexpr double kStart = 0.3;
// Weight of a loss itself among the residuals: leads those that no sample feels to 0, and biases the others by far less
// than any measurement.
constexpr double kPull = 1e-4;

enum Id : ResourceId { kH2d, kD2h, kDuplex, kStream, kDram, kRootH2d, kRootD2h, kCores };

std::vector<Resource> resources_of(const HardwareSpec& hardware) {
  const PcieSpec& pcie = hardware.pcie;
  const HostSpec& host = hardware.host;
  return {{"h2d link", pcie.h2d.gbps * kGiga, {{kStream, pcie.h2d_loss}}},
          {"d2h link", pcie.d2h.gbps * kGiga, {{kStream, pcie.d2h_loss}}},
          {"duplex link", pcie.duplex_gbps * kGiga},
          {"CPU streaming",
           host.cpu_stream_gbps * kGiga,
           {{kRootH2d, host.stream_loss_h2d}, {kRootD2h, host.stream_loss_d2h}}},
          {"host DRAM", host.dram_gbps * kGiga},
          {"root h2d", pcie.root_h2d_gbps * kGiga},
          {"root d2h", pcie.root_d2h_gbps * kGiga},
          {"CPU cores", static_cast<double>(host.cores)}};
}

// Tasks of one kind run at the least of what they can do alone and of every resource that they use.
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

Tasks adam_tasks(const std::vector<Resource>& resources, const HardwareSpec& hardware) {
  const double rate = std::min(
      {hardware.host.adam_elements_per_s * kAdamBytes, resources[kStream].capacity, resources[kDram].capacity});
  return {{{kStream, rate}, {kDram, rate}, {kCores, 1}}, rate};
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

ContentionFit fit_of(const double* losses) { return {losses[0], losses[1], losses[2], losses[3], 0}; }

// Log of predicted over measured, for each rate of each sample.
std::vector<double> log_errors(std::span<const ContentionSample> samples, const HardwareSpec& hardware) {
  std::vector<double> errors;
  for (const ContentionSample& sample : samples) {
    const TogetherRates predicted = predict_together(hardware, sample.running);
    if (sample.running.h2d) errors.push_back(std::log(predicted.h2d_gbps / sample.measured.h2d_gbps));
    if (sample.running.d2h) errors.push_back(std::log(predicted.d2h_gbps / sample.measured.d2h_gbps));
    if (sample.running.adam_threads > 0) errors.push_back(std::log(predicted.adam_gbps / sample.measured.adam_gbps));
  }
  return errors;
}

struct Residuals {
  std::span<const ContentionSample> samples;
  const HardwareSpec& hardware;
  bool operator()(const double* losses, double* residuals) const {
    const std::vector<double> errors = log_errors(samples, with_losses(hardware, fit_of(losses)));
    double* next = std::copy(errors.begin(), errors.end(), residuals);
    for (int i = 0; i < 4; ++i) next[i] = kPull * losses[i];
    return true;
  }
};

}  // namespace

HardwareSpec with_losses(HardwareSpec hardware, const ContentionFit& fit) {
  hardware.pcie.h2d_loss = fit.h2d_loss;
  hardware.pcie.d2h_loss = fit.d2h_loss;
  hardware.host.stream_loss_h2d = fit.stream_loss_h2d;
  hardware.host.stream_loss_d2h = fit.stream_loss_d2h;
  return hardware;
}

TogetherRates predict_together(const HardwareSpec& hardware, const Together& running) {
  const std::vector<Resource> resources = resources_of(hardware);
  const bool cpu_backend = hardware.device.backend == "cpu";
  std::vector<Tasks> tasks;
  if (running.h2d) tasks.push_back(copy_tasks(resources, kH2d, kRootH2d, cpu_backend));
  if (running.d2h) tasks.push_back(copy_tasks(resources, kD2h, kRootD2h, cpu_backend));
  for (int i = 0; i < running.adam_threads; ++i) tasks.push_back(adam_tasks(resources, hardware));
  std::vector<std::span<const Load>> loads;
  for (const Tasks& one : tasks) loads.emplace_back(one.loads);
  std::vector<double> speeds(tasks.size());
  FairShare(resources).share(loads, speeds);
  const auto gbps = [&](size_t i) { return speeds[i] * tasks[i].rate / kGiga; };
  TogetherRates rates;
  size_t next = 0;
  if (running.h2d) rates.h2d_gbps = gbps(next++);
  if (running.d2h) rates.d2h_gbps = gbps(next++);
  while (next < tasks.size()) rates.adam_gbps += gbps(next++);
  return rates;
}

ContentionFit fit_contention(std::span<const ContentionSample> samples, const HardwareSpec& hardware) {
  check(samples);
  std::array<double, 4> losses{kStart, kStart, kStart, kStart};
  const int residuals = static_cast<int>(log_errors(samples, hardware).size() + losses.size());
  ceres::Problem problem;
  problem.AddResidualBlock(new ceres::NumericDiffCostFunction<Residuals, ceres::CENTRAL, ceres::DYNAMIC, 4>(
                               new Residuals{samples, hardware}, ceres::TAKE_OWNERSHIP, residuals),
                           nullptr, losses.data());
  for (int i = 0; i < 4; ++i) {
    problem.SetParameterLowerBound(losses.data(), i, 0.0);
    problem.SetParameterUpperBound(losses.data(), i, i < 2 ? kMostLinkLoss : kMostStreamLoss);
  }
  ceres::Solver::Options options;
  options.linear_solver_type = ceres::DENSE_QR;
  options.max_num_iterations = 200;
  options.function_tolerance = 1e-14;
  options.parameter_tolerance = 1e-12;
  options.logging_type = ceres::SILENT;
  ceres::Solver::Summary summary;
  ceres::Solve(options, &problem, &summary);
  ContentionFit fit = fit_of(losses.data());
  double squares = 0;
  const std::vector<double> errors = log_errors(samples, with_losses(hardware, fit));
  for (const double error : errors) squares += error * error;
  fit.residual_rms_log = std::sqrt(squares / static_cast<double>(errors.size()));
  return fit;
}

}  // namespace slidedp
