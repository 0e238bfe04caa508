#include "model/calibration/layer_fit.h"

#include <ceres/ceres.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <set>
#include <utility>
#include <vector>

#include "model/base/error.h"
#include "model/calibration/measurement.h"

namespace slidedp {
namespace {

constexpr double kGiga = 1e9;
// Four numbers want at least twice as many shapes.
constexpr size_t kFewestShapes = 8;
// seconds = sum of parameter * column: a fixed cost, products, attention and bytes. Columns are scaled so that each
// would take the longest time alone with a parameter of 1.
constexpr int kColumns = 4;
enum Column { kFixed, kProducts, kAttention, kBytes };
using Row = std::array<double, kColumns>;
using Covariance = std::array<double, kColumns * kColumns>;
// A flop of attention costs between a quarter and 50 times one of a product.
constexpr double kLeastAttention = 0.25, kMostAttention = 50;
// A rate with a larger relative standard error than this is not known.
constexpr double kMostRateError = 0.5;
// Weight of the distance from the law without attention and bytes apart: leads what the samples do not tell there.
constexpr double kPull = 1e-3;
// As in fit.cpp: outliers are beyond so many standard deviations; a scale for the first pass, and a least one.
constexpr double kOutlierSigmas = 2, kFirstLossScale = 0.05, kMinLossScale = 1e-3;

struct Residual {
  Row row;
  double log_seconds;
  template <typename T>
  bool operator()(const T* parameters, T* residual) const {
    using std::log;
    T seconds(0);
    // Attention's parameter is its cost a flop over that of a product.
    for (size_t i = 0; i < kColumns; ++i) {
      seconds += (i == kAttention ? parameters[i] * parameters[kProducts] : parameters[i]) * T(row[i]);
    }
    residual[0] = log(seconds) - T(log_seconds);
    return true;
  }
};

struct Pull {
  int column;
  double wanted;
  template <typename T>
  bool operator()(const T* parameters, T* residual) const {
    residual[0] = T(kPull) * (parameters[column] - T(wanted));
    return true;
  }
};

class LayerProblem {
 public:
  LayerProblem(std::span<const LayerSample> samples) {
    double most_flops = 0, most_bytes = 0;
    for (const LayerSample& sample : samples) {
      most_flops = std::max(most_flops, sample.work.flops());
      most_bytes = std::max(most_bytes, sample.work.bytes);
      longest_ = std::max(longest_, sample.seconds);
    }
    flops_ = most_flops;
    bytes_ = most_bytes;
    for (const LayerSample& sample : samples) {
      const LayerWork& work = sample.work;
      rows_.push_back({1, work.product_flops / flops_, work.attention_flops / flops_, work.bytes / bytes_});
      log_seconds_.push_back(std::log(sample.seconds / longest_));
      weights_.push_back(sample.weight);
    }
  }

  // Held: at the law without attention or bytes apart.
  bool solve(bool hold_attention, bool hold_bytes) {
    held_.clear();
    if (hold_attention) held_.push_back(kAttention);
    if (hold_bytes) held_.push_back(kBytes);
    std::vector<double> slopes;
    for (size_t i = 0; i < rows_.size(); ++i) slopes.push_back(std::exp(log_seconds_[i]) / rows_[i][kProducts]);
    parameters_ = {1e-3, 0.7 * median(slopes), 1, hold_bytes ? 0 : 0.1};
    solve_with(kFirstLossScale);
    return solve_with(std::max(kOutlierSigmas * sigma(), kMinLossScale));
  }

  LayerFit result() const {
    LayerFit fit;
    const Row& p = parameters_;
    const double second_a_flop = p[kProducts] * longest_ / flops_;
    fit.rate.products.peak_gflops = 1 / second_a_flop / kGiga;
    fit.rate.products.half_gflop = p[kFixed] * longest_ / second_a_flop / kGiga;
    fit.rate.attention_gflops = fit.rate.products.peak_gflops / p[kAttention];
    // Bytes that cost nothing that can be seen are in the peak.
    constexpr double kLeastShare = 1e-6;
    const bool bytes = p[kBytes] > kLeastShare;
    if (bytes) fit.rate.gbps = bytes_ / (p[kBytes] * longest_) / kGiga;

    double squares = 0;
    for (const double residual : residuals()) squares += residual * residual;
    fit.summary.samples = static_cast<int>(rows_.size());
    fit.summary.residual_rms_log = std::sqrt(squares / static_cast<double>(rows_.size()));
    fit.summary.residual_sigma_log = sigma();
    // Delta method: peak goes with 1 / products, half with fixed / products, attention with 1 / (products * attention).
    const Covariance c = covariance();
    const auto cov = [&](Column a, Column b) { return c[static_cast<size_t>(a * kColumns + b)]; };
    const auto relative = [&](Column a) { return std::sqrt(cov(a, a)) / p[a]; };
    LayerRate& se = fit.standard_error;
    se.products.peak_gflops = fit.rate.products.peak_gflops * relative(kProducts);
    const double ratio = p[kFixed] / p[kProducts];
    const double var_half =
        cov(kFixed, kFixed) - 2 * ratio * cov(kFixed, kProducts) + ratio * ratio * cov(kProducts, kProducts);
    const double half_scale = longest_ / second_a_flop / kGiga;
    se.products.half_gflop = std::sqrt(std::max(var_half, 0.0)) * half_scale;
    const double cov_peak_half = (ratio * cov(kProducts, kProducts) - cov(kFixed, kProducts)) / p[kProducts] *
                                 fit.rate.products.peak_gflops * half_scale;
    const double errors = se.products.peak_gflops * se.products.half_gflop;
    fit.correlation = errors > 0 ? std::clamp(cov_peak_half / errors, -1.0, 1.0) : 0;
    const double var_attention = relative(kProducts) * relative(kProducts) +
                                 relative(kAttention) * relative(kAttention) +
                                 2 * cov(kProducts, kAttention) / (p[kProducts] * p[kAttention]);
    se.attention_gflops = fit.rate.attention_gflops * std::sqrt(std::max(var_attention, 0.0));
    if (bytes) se.gbps = fit.rate.gbps * relative(kBytes);
    return fit;
  }

 private:
  bool solve_with(double loss_scale) {
    problem_ = std::make_unique<ceres::Problem>();
    problem_->AddParameterBlock(parameters_.data(), kColumns);
    for (size_t i = 0; i < rows_.size(); ++i) {
      problem_->AddResidualBlock(
          new ceres::AutoDiffCostFunction<Residual, 1, kColumns>(new Residual{rows_[i], log_seconds_[i]}),
          new ceres::ScaledLoss(new ceres::CauchyLoss(loss_scale), weights_[i], ceres::TAKE_OWNERSHIP),
          parameters_.data());
    }
    for (const Pull& pull : {Pull{kFixed, 0}, Pull{kAttention, 1}, Pull{kBytes, 0}}) {
      problem_->AddResidualBlock(new ceres::AutoDiffCostFunction<Pull, 1, kColumns>(new Pull(pull)), nullptr,
                                 parameters_.data());
    }
    for (const int column : {kFixed, kBytes}) problem_->SetParameterLowerBound(parameters_.data(), column, 0);
    problem_->SetParameterLowerBound(parameters_.data(), kProducts, 1e-9);
    problem_->SetParameterLowerBound(parameters_.data(), kAttention, kLeastAttention);
    problem_->SetParameterUpperBound(parameters_.data(), kAttention, kMostAttention);
    if (!held_.empty()) problem_->SetManifold(parameters_.data(), new ceres::SubsetManifold(kColumns, held_));
    ceres::Solver::Options options;
    options.linear_solver_type = ceres::DENSE_QR;
    options.max_num_iterations = 500;
    options.function_tolerance = 1e-14;
    options.parameter_tolerance = 1e-12;
    options.logging_type = ceres::SILENT;
    ceres::Solver::Summary summary;
    ceres::Solve(options, problem_.get(), &summary);
    return summary.termination_type == ceres::CONVERGENCE;
  }

  std::vector<double> residuals() const {
    std::vector<double> result;
    for (size_t i = 0; i < rows_.size(); ++i) {
      double residual = 0;
      Residual{rows_[i], log_seconds_[i]}(parameters_.data(), &residual);
      result.push_back(residual);
    }
    return result;
  }

  double sigma() const {
    const std::vector<double> all = residuals();
    const auto n = static_cast<double>(all.size());
    return robust_sigma(all) * std::sqrt(n / std::max(n - kColumns, 1.0));
  }

  Covariance covariance() const {
    ceres::Covariance::Options options;
    options.algorithm_type = ceres::DENSE_SVD;
    options.min_reciprocal_condition_number = 0;  // the pulls keep it of full rank
    ceres::Covariance solver(options);
    const std::vector<std::pair<const double*, const double*>> wanted{{parameters_.data(), parameters_.data()}};
    Covariance block{};
    if (!solver.Compute(wanted, problem_.get()) ||
        !solver.GetCovarianceBlock(parameters_.data(), parameters_.data(), block.data())) {
      return {};
    }
    for (double& value : block) value *= sigma() * sigma();
    return block;
  }

  std::vector<Row> rows_;
  std::vector<double> log_seconds_, weights_;
  double longest_ = 0, flops_ = 0, bytes_ = 0;
  Row parameters_{};
  std::vector<int> held_;
  std::unique_ptr<ceres::Problem> problem_;  // refers to parameters_
};

size_t shapes(std::span<const LayerSample> samples) {
  std::set<std::array<double, 3>> seen;
  for (const LayerSample& sample : samples) {
    seen.insert({sample.work.product_flops, sample.work.attention_flops, sample.work.bytes});
  }
  return seen.size();
}

// One rate for all flops, from the samples that count most: without the other terms other models have another rate.
LayerFit fit_products_alone(std::span<const LayerSample> samples, const std::string& what) {
  double most = 0;
  for (const LayerSample& sample : samples) most = std::max(most, sample.weight);
  std::vector<FitSample> plain;
  for (const LayerSample& sample : samples) {
    if (sample.weight == most) plain.push_back({sample.work.flops(), sample.seconds});
  }
  const KernelFit kernel = fit_kernel(plain, what);
  LayerFit fit;
  fit.rate.products = kernel.rate;
  fit.standard_error.products = kernel.standard_error;
  fit.correlation = kernel.correlation;
  fit.summary = kernel.summary;
  return fit;
}

}  // namespace

LayerFit fit_layer(std::span<const LayerSample> samples, const std::string& what) {
  for (const LayerSample& sample : samples) {
    const auto bad = [](double value) { return !(std::isfinite(value) && value >= 0); };
    if (bad(sample.work.attention_flops) || bad(sample.work.bytes) || !(sample.work.product_flops > 0) ||
        bad(sample.seconds) || sample.seconds == 0) {
      fail(what + ": a sample cannot be fitted; its flops and its time must be positive");
    }
  }
  if (shapes(samples) < kFewestShapes) return fit_products_alone(samples, what);
  LayerProblem problem(samples);
  bool hold_attention = false, hold_bytes = false;
  for (;;) {
    const bool converged = problem.solve(hold_attention, hold_bytes);
    LayerFit fit = problem.result();
    const auto unknown = [](double value, double error) { return !(error <= kMostRateError * value); };
    const bool no_attention =
        !hold_attention && unknown(fit.rate.attention_gflops, fit.standard_error.attention_gflops);
    const bool no_bytes = !hold_bytes && (fit.rate.gbps == 0 || unknown(fit.rate.gbps, fit.standard_error.gbps));
    if (!no_attention && !no_bytes) {
      fit.summary.what = what;
      fit.summary.converged = converged;
      if (hold_attention) fit.rate.attention_gflops = fit.standard_error.attention_gflops = 0;
      if (!converged) fit.summary.note = what + ": the fit did not converge; the values are its last iterate";
      return fit;
    }
    // The one that is known less goes first: without it the other may be known.
    const auto relative = [](double value, double error) { return value > 0 ? error / value : 1e300; };
    const bool attention_first = relative(fit.rate.attention_gflops, fit.standard_error.attention_gflops) >
                                 relative(fit.rate.gbps, fit.standard_error.gbps);
    (no_attention && (attention_first || !no_bytes) ? hold_attention : hold_bytes) = true;
    if (hold_attention && hold_bytes) return fit_products_alone(samples, what);
  }
}

}  // namespace slidedp
