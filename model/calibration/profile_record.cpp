#include "model/calibration/profile_record.h"

#include <ctime>
#include <exception>

#include "model/base/atomic_file.h"
#include "model/base/format.h"

namespace slidedp {
namespace {

std::string utc(int64_t unix_s) {
  const std::time_t time = unix_s;
  std::tm parts{};
  gmtime_r(&time, &parts);
  char text[32];
  std::strftime(text, sizeof(text), "%Y-%m-%d %H:%M:%S UTC", &parts);
  return text;
}

std::string waived_text(const ProfileRun& run) {
  std::string text;
  for (const ProbeOutcome& outcome : run.outcomes) {
    if (outcome.waived) text += fmt::format("{}{}: {}", text.empty() ? "" : "; ", outcome.key, *outcome.waived);
  }
  return text;
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

void fit_outcome(ProbeOutcome& outcome, const FillFacts& facts, HardwareSpec& spec, const FillOfProbe& fill) {
  outcome.findings.clear();
  if (outcome.waived) return;
  try {
    HardwareSpec filled = spec;
    outcome.findings = fill(outcome.key, facts, outcome.measurements, filled);
    spec = filled;
  } catch (const Error& error) {
    if (error.code() == ExitCode::interrupted) throw;
    outcome.waived = failure_text(error);
  } catch (const std::exception& error) {
    outcome.waived = failure_text(error);
  }
}

void fit_profile(ProfileRun& run, const HardwareSpec& start, const FillOfProbe& fill) {
  run.spec = start;
  for (ProbeOutcome& outcome : run.outcomes) fit_outcome(outcome, {run.ranks, run.machine.cores}, run.spec, fill);
}

std::string failure_text(const std::exception& error) { return std::string("it failed: ") + error.what(); }

std::string profile_text(const ProfileRun& run) {
  std::string text = fmt::format(
      "# Measured by slidedp-profile on {}{}.\n# Machine: {}, {}, {} cores, {}, {}{}.\n# Kernels at the shapes of {}; "
      "{} "
      "ranks on the {} backend; {:.0f} s in all.\n",
      utc(run.started_unix_s), run.quick ? " (--quick)" : "", run.machine.host, run.machine.processor,
      run.machine.cores, format_bytes(run.machine.memory_bytes), run.machine.kernel,
      run.machine.gpu.empty() ? "" : ", " + run.machine.gpu, run.model, run.ranks, run.backend, run.seconds);
  if (run.other_threads > 0) {
    text +=
        fmt::format("# Other programs kept {:.0f} threads running when it started: measure again on an idle machine.\n",
                    run.other_threads);
  }
  text += "# Value, then its spread (error of the median) or the standard error (se) of a fit:\n";
  for (const ProbeOutcome& outcome : run.outcomes) {
    if (outcome.waived) text += fmt::format("#   {}: waived: {}\n", outcome.key, *outcome.waived);
    for (const Finding& finding : outcome.findings) {
      text += fmt::format("#   {}: {} = {}{}{}\n", outcome.key, finding.field, finding.text,
                          finding.spread.empty() ? "" : "  ", finding.spread);
      if (!finding.note.empty()) text += fmt::format("#     note: {}\n", finding.note);
    }
  }
  return text + to_yaml(run.spec);
}

void write_profile(const ProfileRun& run, const std::filesystem::path& file) {
  AtomicFile out(file);
  out.stream() << profile_text(run);
  out.finish();
  try {
    load_hardware_spec(out.partial());
  } catch (const Error& error) {
    const std::string waived = waived_text(run);
    failf("{}: not written, since the profile is not complete ({}){}.", file.string(), error.what(),
          waived.empty() ? "" : "; waived probes: " + waived);
  }
  out.commit();
}

}  // namespace slidedp
