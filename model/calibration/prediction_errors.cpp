#include "model/calibration/prediction_errors.h"

#include <algorithm>

#include "model/base/format.h"
#include "model/calibration/fills.h"

namespace slidedp {
namespace {

constexpr double kLeastTransfer = 1 << 20;

void append(std::vector<double>& all, const std::vector<double>& more) {
  all.insert(all.end(), more.begin(), more.end());
}

std::span<const Measurement> measured_by(const ProfileRun& run, const std::string& key) {
  for (const ProbeOutcome& outcome : run.outcomes) {
    if (outcome.key == key && !outcome.waived) return outcome.measurements;
  }
  return {};
}

// The profile as it was before contention was fitted: Adam's rate is that of a thread alone.
HardwareSpec before_contention(const ProfileRun& run) {
  HardwareSpec spec = run.spec;
  const std::span<const Measurement> adam = measured_by(run, "host.adam");
  if (!adam.empty()) fill_fields("host.adam", {run.ranks, run.machine.cores}, adam, spec);
  return spec;
}

}  // namespace

PredictionErrors prediction_errors(const ProfileRun& run) {
  std::vector<double> kernel, transfer;
  const std::span<const Measurement> layer = measured_by(run, "kernel.layer"), head = measured_by(run, "kernel.head");
  for (const char* pass : {"forward", "backward"}) append(kernel, unseen_layer_errors(layer_samples(layer, pass)));
  append(kernel, unseen_kernel_errors(fit_samples(select(head, "seconds"), "flops")));
  for (const char* key : {"copy.h2d", "copy.d2h"}) {
    append(transfer,
           unseen_transfer_errors(fit_samples(select(measured_by(run, key), "seconds"), "bytes"), kLeastTransfer));
  }
  PredictionErrors errors;
  errors.kernel = summarize(kernel);
  errors.transfer = summarize(transfer);
  const std::vector<ContentionSample> together = contention_samples(measured_by(run, "host.contention"));
  errors.concurrent = summarize(unseen_concurrent_errors(together, before_contention(run)));
  return errors;
}

std::vector<NamedError> named_errors(const PredictionErrors& errors) {
  std::vector<NamedError> named;
  const auto add = [&](const std::string& what, const ErrorSummary& summary) {
    if (summary.count == 0) return;
    named.push_back({what + "_median_error", summary.median});
    named.push_back({what + "_p95_error", summary.p95});
  };
  add("unseen_kernel", errors.kernel);
  add("transfer", errors.transfer);
  add("concurrent", errors.concurrent);
  return named;
}

std::string errors_text(const PredictionErrors& errors) {
  std::string text;
  for (const NamedError& error : named_errors(errors)) {
    text += fmt::format("{}{} {:.4f}", text.empty() ? "" : ", ", error.name, error.value);
  }
  return text;
}

}  // namespace slidedp
