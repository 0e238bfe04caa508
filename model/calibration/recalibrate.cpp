#include "model/calibration/recalibrate.h"

#include <ceres/ceres.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "model/base/format.h"
#include "model/calibration/measurement.h"
#include "model/sim/simulator.h"

namespace slidedp {
namespace {

constexpr double kMostVariation = 0.05, kMostSteal = 0.02;
constexpr size_t kFewestSteps = 4;
// Standard deviations, of logs: what the profile may be off before a run has been seen, and what the simulator is not
// expected to meet however well the rates are known.
constexpr double kPriorSigma = 0.25, kModelSigma = 0.02;
// The robust loss treats a group of a run beyond so many standard deviations as an outlier.
constexpr double kOutlierSigmas = 3;
constexpr double kLeastFactor = 0.25, kMostFactor = 4;
// For the slope of a simulation: far above the tolerance by which simulated steps agree, 1e-3.
constexpr double kRelativeStep = 0.03;

double spread_of(std::span<const double> values) {
  const double middle = median(values);
  std::vector<double> deviations;
  for (const double value : values) deviations.push_back(value - middle);
  return robust_sigma(deviations);
}

// What a set of steps of one run took.
struct Target {
  StepGraph graph;
  double step_s = 0;
  BusySeconds busy_s{};  // medians over steps
  BusySeconds sigma{};   // standard errors of their logs
};

Target target_of(const LoggedRun& run, std::span<const LoggedStep> steps) {
  Target target{build_rank_graph(run.model, run.plan.train, run.plan.plan)};
  std::vector<double> seconds;
  for (const LoggedStep& step : steps) seconds.push_back(step.step_s);
  target.step_s = median(seconds);
  for (size_t group = 0; group < kRateGroups; ++group) {
    std::vector<double> busy;
    for (const LoggedStep& step : steps) busy.push_back(step.busy_s[group]);
    target.busy_s[group] = median(busy);
    if (target.busy_s[group] == 0) continue;
    // 1.2533: of a median over a mean.
    const double error = 1.2533 * spread_of(busy) / std::sqrt(static_cast<double>(busy.size()));
    target.sigma[group] = std::hypot(error / target.busy_s[group], kModelSigma);
  }
  return target;
}

std::vector<double*> rates_of(HardwareSpec& spec, RateGroup group) {
  switch (group) {
    case RateGroup::h2d:
      return {&spec.pcie.h2d.gbps, &spec.pcie.root_h2d_gbps};
    case RateGroup::d2h:
      return {&spec.pcie.d2h.gbps, &spec.pcie.root_d2h_gbps};
    case RateGroup::all_gather:
      return {&spec.collectives.all_gather.gbps};
    case RateGroup::reduce_scatter:
      return {&spec.collectives.reduce_scatter.gbps};
    case RateGroup::broadcast:
      return {&spec.collectives.broadcast.gbps};
    case RateGroup::layer_forward:
      return {&spec.kernels.layer_fwd.peak_gflops, &spec.kernels.attention_fwd_gflops, &spec.kernels.layer_fwd_gbps};
    case RateGroup::layer_backward:
      return {&spec.kernels.layer_bwd.peak_gflops, &spec.kernels.attention_bwd_gflops, &spec.kernels.layer_bwd_gbps};
    case RateGroup::head:
      return {&spec.kernels.head.peak_gflops};
    case RateGroup::embedding:
      return {&spec.kernels.embedding.peak_gflops};
    case RateGroup::cast:
      return {&spec.kernels.elementwise_gbps};
    case RateGroup::host_accumulate:
      return {&spec.host.source_gbps};
    case RateGroup::norm:
      return {&spec.host.norm_elements_per_s};
    case RateGroup::update:  // the CPU's streaming cap was measured by the update itself
      return {&spec.host.adam_elements_per_s, &spec.host.split_weights_elements_per_s,
              &spec.host.split_moments_elements_per_s, &spec.host.cpu_stream_gbps};
  }
  throw std::logic_error("unknown RateGroup");
}

HardwareSpec corrected(HardwareSpec spec, const std::vector<RateGroup>& groups, const double* factors) {
  for (size_t i = 0; i < groups.size(); ++i) {
    for (double* rate : rates_of(spec, groups[i])) *rate *= factors[i];
    // What threads that go so much faster take of the memory together is so much more, too.
    if (groups[i] == RateGroup::update) spec.contention.streams.beside_streams /= factors[i];
  }
  if (spec.host.cpu_stream_gbps > spec.host.dram_gbps) correct_dram_cap(spec, spec.host.cpu_stream_gbps);
  return spec;
}

// Of one run, for each group that it has: log of predicted over measured, in standard deviations, flattened beyond the
// outlier scale as Cauchy's loss does.
struct GroupResiduals {
  const Target& target;
  const HardwareSpec& hardware;
  const std::vector<RateGroup>& groups;

  bool operator()(double const* const* parameters, double* residuals) const {
    const Simulation simulation = simulate(target.graph, corrected(hardware, groups, parameters[0]));
    const BusySeconds busy = busy_seconds(target.graph, simulation.timeline);
    for (size_t i = 0; i < groups.size(); ++i) {
      const auto group = static_cast<size_t>(groups[i]);
      residuals[i] = 0;
      if (busy[group] <= 0 || target.busy_s[group] <= 0) continue;
      const double error = std::log(busy[group] / target.busy_s[group]) / target.sigma[group];
      const double flat = kOutlierSigmas * std::sqrt(std::log1p(error * error / (kOutlierSigmas * kOutlierSigmas)));
      residuals[i] = std::copysign(flat, error);
    }
    return true;
  }
};

struct PriorResiduals {
  size_t count;
  bool operator()(double const* const* factors, double* residuals) const {
    for (size_t i = 0; i < count; ++i) residuals[i] = std::log(factors[0][i]) / kPriorSigma;
    return true;
  }
};

struct Factors {
  std::vector<double> values, errors;
};

template <typename Residuals>
void add_block(ceres::Problem& problem, const Residuals& residuals, std::vector<double>& factors) {
  ceres::NumericDiffOptions options;
  options.relative_step_size = kRelativeStep;
  auto* cost = new ceres::DynamicNumericDiffCostFunction<Residuals, ceres::FORWARD>(new Residuals(residuals),
                                                                                    ceres::TAKE_OWNERSHIP, options);
  const int count = static_cast<int>(factors.size());
  cost->AddParameterBlock(count);
  cost->SetNumResiduals(count);
  problem.AddResidualBlock(cost, nullptr, factors.data());
}

Factors fit_factors(const std::vector<Target>& targets, const HardwareSpec& hardware,
                    const std::vector<RateGroup>& groups) {
  Factors factors{std::vector<double>(groups.size(), 1.0), std::vector<double>(groups.size(), 0.0)};
  ceres::Problem problem;
  for (const Target& target : targets) add_block(problem, GroupResiduals{target, hardware, groups}, factors.values);
  add_block(problem, PriorResiduals{groups.size()}, factors.values);
  for (int i = 0; i < static_cast<int>(groups.size()); ++i) {
    problem.SetParameterLowerBound(factors.values.data(), i, kLeastFactor);
    problem.SetParameterUpperBound(factors.values.data(), i, kMostFactor);
  }
  ceres::Solver::Options options;
  options.linear_solver_type = ceres::DENSE_QR;
  options.max_num_iterations = 10;
  options.function_tolerance = 1e-3;  // a simulated step is not exacter
  options.parameter_tolerance = 1e-3;
  options.logging_type = ceres::SILENT;
  ceres::Solver::Summary summary;
  ceres::Solve(options, &problem, &summary);
  ceres::Covariance::Options covariance_options;
  covariance_options.algorithm_type = ceres::DENSE_SVD;
  ceres::Covariance covariance(covariance_options);
  const double* block = factors.values.data();
  std::vector<double> matrix(groups.size() * groups.size());
  const std::vector<std::pair<const double*, const double*>> wanted{{block, block}};
  // The prior keeps the Jacobian of full rank.
  if (!covariance.Compute(wanted, &problem) || !covariance.GetCovarianceBlock(block, block, matrix.data())) {
    throw std::logic_error("the covariance of a correction cannot be computed");
  }
  for (size_t i = 0; i < groups.size(); ++i) factors.errors[i] = std::sqrt(matrix[i * groups.size() + i]);
  return factors;
}

std::vector<RateGroup> groups_of(const std::vector<Target>& targets) {
  std::vector<RateGroup> groups;
  for (size_t group = 0; group < kRateGroups; ++group) {
    if (std::any_of(targets.begin(), targets.end(), [&](const Target& t) { return t.busy_s[group] > 0; })) {
      groups.push_back(static_cast<RateGroup>(group));
    }
  }
  return groups;
}

// What is learnt from, and what the result is judged by.
struct Split {
  std::vector<Target> learnt, held_out, all;
  std::string name;
};

Split split(const std::vector<const LoggedRun*>& runs) {
  Split parts;
  for (const LoggedRun* run : runs) parts.all.push_back(target_of(*run, run->steps));
  if (runs.size() > 1) {
    parts.name = runs.back()->name;
    parts.learnt.assign(parts.all.begin(), parts.all.end() - 1);
    parts.held_out.push_back(parts.all.back());
    return parts;
  }
  const std::span<const LoggedStep> steps(runs.front()->steps);
  parts.name = "the later half of the steps";
  parts.learnt.push_back(target_of(*runs.front(), steps.first(steps.size() / 2)));
  parts.held_out.push_back(target_of(*runs.front(), steps.subspan(steps.size() / 2)));
  return parts;
}

// Relative errors on the held-out target.
struct Errors {
  double step = 0;
  BusySeconds busy{};
};

Errors errors_of(const Target& target, const HardwareSpec& hardware) {
  const Simulation simulation = simulate(target.graph, hardware);
  const BusySeconds busy = busy_seconds(target.graph, simulation.timeline);
  Errors errors{simulation.step.seconds / target.step_s - 1, {}};
  for (size_t group = 0; group < kRateGroups; ++group) {
    if (target.busy_s[group] > 0) errors.busy[group] = busy[group] / target.busy_s[group] - 1;
  }
  return errors;
}

// Values that changed with the corrected ones (contention) are as certain, in relation, as they were.
void scale_errors(const HardwareSpec& before, HardwareSpec& after) {
  const std::vector<NamedValue> old = named_values(before), now = named_values(after);
  for (FieldError& error : after.uncertainty.standard_errors) {
    for (size_t i = 0; i < now.size(); ++i) {
      if (now[i].field == error.field && old[i].value != 0) error.value *= now[i].value / old[i].value;
    }
  }
}

// The corrected rates are as certain as the factors; a profile that had no uncertainties starts to have some.
void note_correction(const LoggedRun& run, const Recalibration& result, HardwareSpec& spec) {
  Uncertainty& uncertainty = spec.uncertainty;
  if (!uncertainty.known()) {
    uncertainty.measured_at = run.started_at;
    uncertainty.program_version = run.program_version;
    uncertainty.processor = run.processor;
    uncertainty.kernel_shapes = run.model.name;
    uncertainty.rounds = 1;
  }
  for (const GroupCorrection& correction : result.groups) {
    const std::string group(name(correction.group));
    uncertainty.corrections.push_back({group, correction.factor, correction.standard_error});
    const std::vector<double*> rates = rates_of(spec, correction.group);
    HardwareSpec marked = spec;  // a rate's field is the one that changes with it
    for (double* rate : rates_of(marked, correction.group)) *rate += 1;
    const std::vector<NamedValue> values = named_values(spec), changed = named_values(marked);
    for (size_t i = 0; i < values.size(); ++i) {
      if (values[i].value == changed[i].value || values[i].value == 0) continue;
      std::erase_if(uncertainty.standard_errors, [&](const FieldError& e) { return e.field == values[i].field; });
      uncertainty.standard_errors.push_back(
          {values[i].field, values[i].value * correction.standard_error / correction.factor, "runs"});
    }
  }
}

}  // namespace

std::string disturbance(const LoggedRun& run) {
  if (run.steps.size() < kFewestSteps) {
    return fmt::format("{} steps with logged tasks after warm-up, but {} are needed", run.steps.size(), kFewestSteps);
  }
  if (run.cpu_steal_share.value_or(0) > kMostSteal) {
    return fmt::format("other guests of the host took {:.0f} % of its CPU time (at most {:.0f} % may be)",
                       100 * *run.cpu_steal_share, 100 * kMostSteal);
  }
  std::vector<double> seconds;
  for (const LoggedStep& step : run.steps) seconds.push_back(step.step_s);
  const double variation = spread_of(seconds) / median(seconds);
  if (variation > kMostVariation) {
    return fmt::format("its step times vary by {:.0f} % (at most {:.0f} % may be)", 100 * variation,
                       100 * kMostVariation);
  }
  return "";
}

Recalibration recalibrate(std::span<const LoggedRun> runs, const HardwareSpec& hardware) {
  Recalibration result;
  std::vector<const LoggedRun*> quiet;
  for (const LoggedRun& run : runs) {
    const std::string reason = disturbance(run);
    if (reason.empty()) quiet.push_back(&run);
    if (!reason.empty()) result.refused.push_back(fmt::format("{}: {}", run.name, reason));
  }
  if (quiet.empty()) {
    failf("Nothing is to be learnt from these runs: {}. Run again on an idle machine.",
          fmt::join(result.refused, "; "));
  }
  const Split parts = split(quiet);
  result.held_out = parts.name;
  const std::vector<RateGroup> groups = groups_of(parts.all);
  const Factors judged = fit_factors(parts.learnt, hardware, groups);
  const Errors before = errors_of(parts.held_out.front(), hardware);
  const Errors after = errors_of(parts.held_out.front(), corrected(hardware, groups, judged.values.data()));
  const Factors factors = fit_factors(parts.all, hardware, groups);
  for (size_t i = 0; i < groups.size(); ++i) {
    const auto group = static_cast<size_t>(groups[i]);
    result.groups.push_back({groups[i], factors.values[i], factors.errors[i], before.busy[group], after.busy[group]});
  }
  result.step_error_before = before.step;
  result.step_error_after = after.step;
  result.hardware = corrected(hardware, groups, factors.values.data());
  scale_errors(hardware, result.hardware);
  note_correction(*quiet.front(), result, result.hardware);
  return result;
}

std::string recalibration_table(const Recalibration& result) {
  std::string text;
  for (const std::string& run : result.refused) text += fmt::format("not learnt from: {}\n", run);
  text += fmt::format(
      "Predicted against measured, on {}, before and after the correction:\n{:<18}{:>10}{:>10}{:>10}{:>8}\n",
      result.held_out, "busy time of", "before", "after", "factor", "se");
  for (const GroupCorrection& group : result.groups) {
    text += fmt::format("{:<18}{:>+8.1f} %{:>+8.1f} %{:>10.3f}{:>8.3f}\n", name(group.group), 100 * group.error_before,
                        100 * group.error_after, group.factor, group.standard_error);
  }
  return text + fmt::format("{:<18}{:>+8.1f} %{:>+8.1f} %\n", "step time", 100 * result.step_error_before,
                            100 * result.step_error_after);
}

}  // namespace slidedp
