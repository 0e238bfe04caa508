#include "model/calibration/fit.h"

#include <ceres/ceres.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <memory>
#include <stdexcept>
#include <utility>
#include <vector>

#include "model/base/error.h"
#include "model/calibration/measurement.h"

namespace slidedp {
namespace {

// seconds = fixed + per_work * work. Both laws are this one.
struct Affine {
  double fixed = 0, per_work = 0;
  double var_fixed = 0, var_per_work = 0, covariance = 0;
  FitSummary summary;
};

// In scaled units: the fixed cost in units of the shortest sample's time, work in units of the largest sample's work
// and its cost in units of the longest time. So both parameters are of order one, whatever the range of sizes.
struct LogResidual {
  double fixed_scale;  // shortest over longest time
  double work;
  double log_seconds;
  template <typename T>
  bool operator()(const T* parameters, T* residual) const {
    using std::log;
    residual[0] = log(parameters[0] * T(fixed_scale) + parameters[1] * T(work)) - T(log_seconds);
    return true;
  }
};

// The columns of the Jacobian are parallel for all practical purposes when the squared sine of their angle is below
// this: it corresponds to works that differ by about 2 %.
constexpr double kLeastSquaredSine = 1e-4;
// A free fit whose rate has a larger relative standard error than this has learnt nothing about the rate.
constexpr double kMostRateError = 0.5;
// The robust loss treats residuals beyond this many standard deviations as outliers.
constexpr double kOutlierSigmas = 2.0;
// A floor for the loss scale, so that noise-free samples do not make everything an outlier.
constexpr double kMinLossScale = 1e-3;
// Scale of the first pass, before the samples' own noise is known: 5 %.
constexpr double kFirstLossScale = 0.05;

class AffineProblem {
 public:
  // Sorted by work, not empty.
  explicit AffineProblem(std::vector<FitSample> samples) : samples_(std::move(samples)) {
    work_scale_ = samples_.back().work;
    shortest_ = samples_.front().seconds;
    for (const FitSample& sample : samples_) {
      shortest_ = std::min(shortest_, sample.seconds);
      longest_ = std::max(longest_, sample.seconds);
    }
  }

  // One robust solve; without `free_fixed` the fixed cost is held at zero. Returns whether Ceres converged.
  bool solve(double loss_scale, bool free_fixed) {
    if (problem_ == nullptr || !free_fixed) start(free_fixed);
    build(loss_scale, free_fixed);
    ceres::Solver::Options options;
    options.linear_solver_type = ceres::DENSE_QR;
    options.max_num_iterations = 200;
    options.function_tolerance = 1e-14;
    options.parameter_tolerance = 1e-12;
    options.logging_type = ceres::SILENT;
    ceres::Solver::Summary summary;
    ceres::Solve(options, problem_.get(), &summary);
    loss_scale_ = loss_scale;
    return summary.termination_type == ceres::CONVERGENCE;
  }

  // Whether the samples that the loss believes determine both parameters.
  bool full_rank() const {
    double fixed_2 = 0, work_2 = 0, product = 0;
    const std::vector<double> errors = residuals();
    for (size_t i = 0; i < samples_.size(); ++i) {
      const double weight = 1 / (1 + errors[i] * errors[i] / (loss_scale_ * loss_scale_));  // Cauchy
      const double fixed_column = shortest_ / longest_ / predicted(samples_[i]);
      const double work_column = samples_[i].work / work_scale_ / predicted(samples_[i]);
      fixed_2 += weight * fixed_column * fixed_column;
      work_2 += weight * work_column * work_column;
      product += weight * fixed_column * work_column;
    }
    return 1 - product * product / (fixed_2 * work_2) >= kLeastSquaredSine;
  }

  // Of the parameters in scaled units, for residuals of unit variance; 0 for a parameter that is held.
  std::array<double, 4> covariance() const {
    ceres::Covariance::Options options;
    options.algorithm_type = ceres::DENSE_SVD;
    ceres::Covariance covariance(options);
    const double* block = parameters_.data();
    const std::vector<std::pair<const double*, const double*>> wanted{{block, block}};
    std::array<double, 4> result{};
    if (!covariance.Compute(wanted, problem_.get()) || !covariance.GetCovarianceBlock(block, block, result.data())) {
      throw std::logic_error("the covariance of a problem of full rank cannot be computed");
    }
    return result;
  }

  std::vector<double> residuals() const {
    std::vector<double> result;
    for (const FitSample& sample : samples_) {
      result.push_back(std::log(predicted(sample)) - std::log(sample.seconds / longest_));
    }
    return result;
  }

  double fixed() const { return parameters_[0] * fixed_scale(); }
  double per_work() const { return parameters_[1] * per_work_scale(); }
  double fixed_scale() const { return shortest_; }
  double per_work_scale() const { return longest_ / work_scale_; }
  bool one_work() const { return samples_.front().work == samples_.back().work; }
  const std::vector<FitSample>& samples() const { return samples_; }

 private:
  // In units of the longest time.
  double predicted(const FitSample& sample) const {
    return parameters_[0] * shortest_ / longest_ + parameters_[1] * sample.work / work_scale_;
  }

  // Start from the median time per work of the larger half (there the fixed cost matters least), with a fixed cost that
  // is not on its bound.
  void start(bool free_fixed) {
    std::vector<double> slopes;
    for (size_t i = samples_.size() / 2; i < samples_.size(); ++i) {
      slopes.push_back((samples_[i].seconds / longest_) / (samples_[i].work / work_scale_));
    }
    parameters_ = {free_fixed ? 0.5 : 0.0, median(slopes)};
  }

  void build(double loss_scale, bool free_fixed) {
    problem_ = std::make_unique<ceres::Problem>();
    problem_->AddParameterBlock(parameters_.data(), 2);
    for (const FitSample& sample : samples_) {
      auto* cost = new ceres::AutoDiffCostFunction<LogResidual, 1, 2>(
          new LogResidual{shortest_ / longest_, sample.work / work_scale_, std::log(sample.seconds / longest_)});
      problem_->AddResidualBlock(cost, new ceres::CauchyLoss(loss_scale), parameters_.data());
    }
    problem_->SetParameterLowerBound(parameters_.data(), 0, 0.0);
    problem_->SetParameterUpperBound(parameters_.data(), 0, 1.0);  // no more than the shortest sample took
    problem_->SetParameterLowerBound(parameters_.data(), 1, 1e-9);
    if (!free_fixed) problem_->SetManifold(parameters_.data(), new ceres::SubsetManifold(2, {0}));
  }

  std::vector<FitSample> samples_;
  double work_scale_ = 0, shortest_ = 0, longest_ = 0, loss_scale_ = 0;
  std::array<double, 2> parameters_{};
  std::unique_ptr<ceres::Problem> problem_;  // refers to parameters_
};

std::vector<FitSample> checked(std::span<const FitSample> samples, const std::string& what) {
  if (samples.empty()) fail(what + ": there are no samples to fit");
  for (const FitSample& sample : samples) {
    if (!std::isfinite(sample.work) || !std::isfinite(sample.seconds) || sample.work <= 0 || sample.seconds <= 0) {
      fail(what + ": a sample of work " + std::to_string(sample.work) + " and " + std::to_string(sample.seconds) +
           " s cannot be fitted; both must be positive");
    }
  }
  std::vector<FitSample> sorted(samples.begin(), samples.end());
  std::sort(sorted.begin(), sorted.end(), [](const FitSample& a, const FitSample& b) {
    return a.work != b.work ? a.work < b.work : a.seconds < b.seconds;
  });
  return sorted;
}

// The factor n/(n-2) is for the two fitted parameters.
double noise_of(const std::vector<double>& residuals) {
  const double n = static_cast<double>(residuals.size());
  return robust_sigma(residuals) * (n > 2 ? std::sqrt(n / (n - 2)) : 1.0);
}

// Two passes: the first finds the noise of these samples, the second uses it as the scale of the loss.
bool solve_twice(AffineProblem& problem, bool free_fixed) {
  problem.solve(kFirstLossScale, free_fixed);
  const double sigma = noise_of(problem.residuals());
  return problem.solve(std::max(kOutlierSigmas * sigma, kMinLossScale), free_fixed);
}

// Standard normal score of a value of the F distribution. Source: Paulson 1942, from Wilson and Hilferty's cube root.
double normal_score(double f, double above, double below) {
  const double root = std::cbrt(f), a = 2 / (9 * above), b = 2 / (9 * below);
  return ((1 - b) * root - (1 - a)) / std::sqrt(b * root * root + a);
}

// The residuals at each size. `samples` are sorted by work.
std::vector<std::vector<double>> by_work(const std::vector<FitSample>& samples, const std::vector<double>& residuals) {
  std::vector<std::vector<double>> groups;
  for (size_t i = 0; i < samples.size(); ++i) {
    if (i == 0 || samples[i].work != samples[i - 1].work) groups.emplace_back();
    groups.back().push_back(residuals[i]);
  }
  return groups;
}

// The classical lack-of-fit test (misfit of the groups against the scatter inside them), with medians, so that single
// outliers are no structure. Returns the rms of the sizes' median residuals if they have one, else 0.
double structure(const std::vector<std::vector<double>>& groups, int parameters) {
  constexpr double kLeastMisfit = 0.01, kLeastScore = 3.09;  // one-sided 0.1 %
  std::vector<double> scatter;
  double samples = 0, squares = 0, misfit = 0;
  for (const std::vector<double>& group : groups) {
    const double middle = median(group), size = static_cast<double>(group.size());
    for (double residual : group) scatter.push_back(residual - middle);
    samples += size;
    squares += middle * middle;
    misfit += size * middle * middle;
  }
  const double sizes = static_cast<double>(groups.size()), above = sizes - parameters, below = samples - sizes;
  const double rms = std::sqrt(squares / sizes);
  if (above < 1 || below < sizes || rms < kLeastMisfit) return 0;
  const double sigma = robust_sigma(scatter) * std::sqrt(samples / below);
  if (sigma == 0) return rms;
  // A median's variance is pi / 2 times that of a mean.
  const double f = misfit / above / (1.5708 * sigma * sigma);
  return normal_score(f, above, below) > kLeastScore ? rms : 0;
}

void look_for_structure(const AffineProblem& problem, FitSummary& summary) {
  const double rms = structure(by_work(problem.samples(), problem.residuals()), summary.degenerate ? 1 : 2);
  if (rms == 0) return;
  char percent[16];
  std::snprintf(percent, sizeof(percent), "%.1f", 100 * rms);
  summary.structured = true;
  summary.note += (summary.note.empty() ? "" : "; ") + summary.what + ": the law misses the medians of the sizes by " +
                  percent + " % rms, more than their scatter explains";
}

// Values, variances and residuals of a solved problem.
Affine read_solution(const AffineProblem& problem) {
  Affine result;
  const std::vector<double> residuals = problem.residuals();
  double squares = 0;
  for (double residual : residuals) squares += residual * residual;
  FitSummary& summary = result.summary;
  summary.samples = static_cast<int>(residuals.size());
  summary.residual_rms_log = std::sqrt(squares / static_cast<double>(residuals.size()));
  summary.residual_sigma_log = noise_of(residuals);
  result.fixed = problem.fixed();
  result.per_work = problem.per_work();
  const std::array<double, 4> unit = problem.covariance();
  const double variance = summary.residual_sigma_log * summary.residual_sigma_log;
  result.var_fixed = variance * unit[0] * problem.fixed_scale() * problem.fixed_scale();
  result.covariance = variance * unit[1] * problem.fixed_scale() * problem.per_work_scale();
  result.var_per_work = variance * unit[3] * problem.per_work_scale() * problem.per_work_scale();
  return result;
}

// Why the samples do not determine both parameters; empty if they may.
std::string too_few(const AffineProblem& problem) {
  if (problem.one_work()) return "all are of one size";
  if (problem.samples().size() < 3) return "there are only two";
  return "";
}

Affine fit_affine(std::span<const FitSample> samples, const std::string& what) {
  AffineProblem problem(checked(samples, what));
  std::string reason = too_few(problem);
  Affine result;
  bool converged = false;
  if (reason.empty()) {
    converged = solve_twice(problem, true);
    if (!problem.full_rank()) reason = "their sizes are too similar";
  }
  if (reason.empty()) {
    result = read_solution(problem);
    if (std::sqrt(result.var_per_work) > kMostRateError * result.per_work) {
      reason = "they are too noisy for their range of sizes";
    }
  }
  if (!reason.empty()) {
    converged = solve_twice(problem, false);
    result = read_solution(problem);
    result.summary.degenerate = true;
    result.summary.note = what + ": the samples do not tell a fixed cost from a rate (" + reason +
                          "), so the fixed cost is taken as zero";
  } else if (!converged) {
    result.summary.note = what + ": the fit did not converge; the values are its last iterate";
  }
  result.summary.what = what;
  result.summary.converged = converged;
  look_for_structure(problem, result.summary);
  return result;
}

}  // namespace

LinkFit fit_link(std::span<const FitSample> samples, const std::string& what) {
  const Affine fit = fit_affine(samples, what);
  LinkFit result;
  result.rate.latency_s = fit.fixed;
  result.rate.gbps = 1 / (fit.per_work * 1e9);
  result.standard_error.latency_s = std::sqrt(fit.var_fixed);
  // Delta method for 1 / per_work.
  result.standard_error.gbps = result.rate.gbps * std::sqrt(fit.var_per_work) / fit.per_work;
  const double spread = result.standard_error.latency_s * std::sqrt(fit.var_per_work);
  if (spread > 0) result.correlation = -fit.covariance / spread;
  result.summary = fit.summary;
  return result;
}

KernelFit fit_kernel(std::span<const FitSample> samples, const std::string& what) {
  const Affine fit = fit_affine(samples, what);
  KernelFit result;
  const double peak = 1 / fit.per_work;
  const double half = fit.fixed / fit.per_work;
  result.rate.peak_gflops = peak / 1e9;
  result.rate.half_gflop = half / 1e9;
  result.standard_error.peak_gflops = result.rate.peak_gflops * std::sqrt(fit.var_per_work) / fit.per_work;
  // Delta method for fixed / per_work, with gradient (1, -half) / per_work.
  const double var_half = fit.var_fixed - 2 * half * fit.covariance + half * half * fit.var_per_work;
  result.standard_error.half_gflop = std::sqrt(std::max(var_half, 0.0)) / fit.per_work / 1e9;
  // The peak's gradient is (0, -peak) / per_work.
  const double spread = std::sqrt(std::max(var_half, 0.0) * fit.var_per_work);
  if (!fit.summary.degenerate && spread > 0) result.correlation = (half * fit.var_per_work - fit.covariance) / spread;
  result.summary = fit.summary;
  return result;
}

}  // namespace slidedp
