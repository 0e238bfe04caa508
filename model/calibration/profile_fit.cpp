// From all samples of a run to a profile with uncertainties.
#include <algorithm>
#include <cmath>
#include <map>
#include <set>

#include "model/base/error.h"
#include "model/base/format.h"
#include "model/calibration/drift.h"
#include "model/calibration/profile_record.h"

namespace slidedp {
namespace {

// No two processes on an idle machine measure the same rate closer than this, however little it scatters inside each:
// a share of the value. Losses are shares of a rate, so it is a floor for them as it stands.
constexpr double kFloor = 0.0025;

std::string failure_text(const std::exception& error) { return std::string("it failed: ") + error.what(); }

FillFacts facts_of(const ProfileRun& run) { return {run.ranks, run.machine.cores}; }

// The last finding of each field: earlier ones were overridden.
std::map<std::string, Finding*> final_findings(ProfileRun& run) {
  std::map<std::string, Finding*> found;
  for (ProbeOutcome& outcome : run.outcomes) {
    for (Finding& finding : outcome.findings) found[finding.field] = &finding;
  }
  return found;
}

// What the profile's values would be without each of the rounds. A replicate lacks the fields of a probe that cannot be
// fitted without that round.
std::vector<std::map<std::string, double>> leave_rounds_out(const ProfileRun& run, const HardwareSpec& start,
                                                            const FillOfProbe& fill) {
  std::vector<std::map<std::string, double>> replicates;
  for (int round = 0; round < run.rounds && run.rounds > 1; ++round) {
    HardwareSpec spec = start;
    std::set<std::string> fitted;
    for (const ProbeOutcome& outcome : run.outcomes) {
      ProbeOutcome part{outcome.key, outcome.method, outcome.waived, without_round(outcome.measurements, round)};
      fit_outcome(part, facts_of(run), spec, fill);
      for (const Finding& finding : part.findings) fitted.insert(finding.field);
      if (part.findings.empty()) {
        for (const Finding& finding : outcome.findings) fitted.erase(finding.field);
      }
    }
    std::map<std::string, double>& values = replicates.emplace_back();
    for (const NamedValue& value : named_values(spec)) {
      if (fitted.contains(value.field)) values[value.field] = value.value;
    }
  }
  return replicates;
}

// How far one round's value of a field lies from another's: the jackknife's standard error (Efron and Tibshirani, An
// Introduction to the Bootstrap, 1993, chapter 11) times the root of the rounds. Their mean would be better known if
// rounds were independent; but they share a process, its memory and the state of the machine, and the next profile has
// others. 0 if fewer than two replicates have the field.
double round_error(const std::vector<std::map<std::string, double>>& replicates, const std::string& field) {
  std::vector<double> values;
  for (const auto& replicate : replicates) {
    if (const auto value = replicate.find(field); value != replicate.end()) values.push_back(value->second);
  }
  if (values.size() < 2) return 0;
  const double count = static_cast<double>(values.size());
  double mean = 0, squares = 0;
  for (double value : values) mean += value / count;
  for (double value : values) squares += (value - mean) * (value - mean);
  return std::sqrt((count - 1) * squares);
}

void widen_errors(ProfileRun& run, const HardwareSpec& start, const FillOfProbe& fill) {
  const auto replicates = leave_rounds_out(run, start, fill);
  for (const auto& [field, finding] : final_findings(run)) {
    if (finding->exact) continue;
    const double floor = kFloor * (finding->unit.empty() ? std::max(std::abs(finding->value), 1.0) : finding->value);
    finding->standard_error = std::max({finding->standard_error, round_error(replicates, field), floor});
  }
}

// Appends what `start` knew of things that this run has not looked at again.
template <typename T, typename IsNew>
void keep(std::vector<T>& now, const std::vector<T>& before, const IsNew& is_new) {
  std::copy_if(before.begin(), before.end(), std::back_inserter(now), [&](const T& item) { return !is_new(item); });
}

void describe(const ProfileRun& run, Uncertainty& uncertainty) {
  uncertainty.measured_at = utc_text(run.started_unix_s);
  uncertainty.program_version = run.program_version;
  uncertainty.host = run.machine.host;
  uncertainty.processor = run.machine.processor;
  uncertainty.kernel = run.machine.kernel;
  uncertainty.gpu = run.machine.gpu;
  uncertainty.kernel_shapes = run.model;
  uncertainty.rounds = run.rounds;
  uncertainty.quick = run.quick;
}

void add_outcome(const ProbeOutcome& outcome, const std::map<std::string, Finding*>& final, Uncertainty& uncertainty) {
  if (outcome.waived) uncertainty.waived.push_back({outcome.key, *outcome.waived});
  for (const Finding& finding : outcome.findings) {
    if (!finding.note.empty()) uncertainty.notes.push_back(finding.note);
    if (finding.fit) {
      const FitSummary& fit = *finding.fit;
      uncertainty.fits.push_back({fit.what, fit.samples, fit.residual_rms_log, fit.structured, fit.degenerate});
    }
    if (final.at(finding.field) != &finding) continue;
    if (!finding.correlated_with.empty()) {
      uncertainty.correlations.push_back({finding.field, finding.correlated_with, finding.correlation});
    }
    if (finding.standard_error > 0) {
      uncertainty.standard_errors.push_back({finding.field, finding.standard_error, outcome.key});
    }
  }
}

Uncertainty uncertainty_of(ProfileRun& run, const Uncertainty& before) {
  Uncertainty now;
  describe(run, now);
  const auto final = final_findings(run);
  std::set<std::string> probes;
  for (const ProbeOutcome& outcome : run.outcomes) {
    add_outcome(outcome, final, now);
    probes.insert(outcome.key);
  }
  keep(now.standard_errors, before.standard_errors, [&](const FieldError& e) { return final.contains(e.field); });
  keep(now.correlations, before.correlations,
       [&](const FieldCorrelation& c) { return final.contains(c.first) || final.contains(c.second); });
  keep(now.fits, before.fits, [&](const FitQuality& q) { return probes.contains(q.fit.substr(0, q.fit.find(' '))); });
  keep(now.waived, before.waived, [&](const WaivedProbe& w) { return probes.contains(w.probe); });
  return now;
}

}  // namespace

HardwareSpec empty_profile(const MachineIdentity& machine, const std::string& backend, int ranks) {
  HardwareSpec spec;
  spec.name =
      fmt::format("{}{}, {} cores", machine.gpu.empty() ? "" : machine.gpu + ", ", machine.processor, machine.cores);
  spec.measured = true;
  spec.gpus = ranks;
  spec.device.name = machine.gpu.empty() ? fmt::format("{} rank", backend) : machine.gpu;
  spec.device.backend = backend;
  return spec;
}

void waive_for(ProbeOutcome& outcome, const std::exception& error) {
  const auto* known = dynamic_cast<const Error*>(&error);
  if (known != nullptr && known->code() == ExitCode::interrupted) throw *known;
  outcome.waived = failure_text(error);
}

void fit_outcome(ProbeOutcome& outcome, const FillFacts& facts, HardwareSpec& spec, const FillOfProbe& fill) {
  outcome.findings.clear();
  if (outcome.waived) return;
  try {
    HardwareSpec filled = spec;
    outcome.findings = fill(outcome.key, facts, outcome.measurements, filled);
    spec = filled;
  } catch (const std::exception& error) {
    waive_for(outcome, error);
  }
}

void fit_profile(ProfileRun& run, const HardwareSpec& start, const FillOfProbe& fill) {
  run.spec = start;
  for (ProbeOutcome& outcome : run.outcomes) fit_outcome(outcome, facts_of(run), run.spec, fill);
  for (ProbeOutcome& outcome : run.outcomes) {
    const std::string note = drift_note(outcome.key, drift_of(outcome.measurements));
    if (note.empty() || outcome.findings.empty()) continue;
    std::string& notes = outcome.findings.front().note;
    notes += (notes.empty() ? "" : "; ") + note;
  }
  widen_errors(run, start, fill);
  run.spec.uncertainty = uncertainty_of(run, start.uncertainty);
}

}  // namespace slidedp
