#include "model/calibration/profile_record.h"

#include <ctime>

#include "model/base/atomic_file.h"
#include "model/base/format.h"
#include "model/calibration/prediction_errors.h"

namespace slidedp {
namespace {

std::string waived_text(const ProfileRun& run) {
  std::string text;
  for (const ProbeOutcome& outcome : run.outcomes) {
    if (outcome.waived) text += fmt::format("{}{}: {}", text.empty() ? "" : "; ", outcome.key, *outcome.waived);
  }
  return text;
}

}  // namespace

std::string utc_text(int64_t unix_s) {
  const std::time_t time = unix_s;
  std::tm parts{};
  gmtime_r(&time, &parts);
  char text[32];
  std::strftime(text, sizeof(text), "%Y-%m-%d %H:%M:%S UTC", &parts);
  return text;
}

std::string profile_text(const ProfileRun& run) {
  std::string text = fmt::format(
      "# Measured by slidedp-profile on {}{}.\n# Machine: {}, {}, {} cores, {}, {}{}.\n# Kernels at the shapes of {}; "
      "{} ranks on the {} backend; {} rounds, {:.0f} s in all.\n",
      utc_text(run.started_unix_s), run.quick ? " (--quick)" : "", run.machine.host, run.machine.processor,
      run.machine.cores, format_bytes(run.machine.memory_bytes), run.machine.kernel,
      run.machine.gpu.empty() ? "" : ", " + run.machine.gpu, run.model, run.ranks, run.backend, run.rounds,
      run.seconds);
  if (run.other_threads > 0) {
    text +=
        fmt::format("# Other programs kept {:.0f} threads running when it started: measure again on an idle machine.\n",
                    run.other_threads);
  }
  text += "# Value, then its standard error (se), and how well a fit describes its samples:\n";
  for (const ProbeOutcome& outcome : run.outcomes) {
    if (outcome.waived) text += fmt::format("#   {}: waived: {}\n", outcome.key, *outcome.waived);
    for (const Finding& finding : outcome.findings) {
      const std::string spread = spread_text(finding);
      text += fmt::format("#   {}: {} = {}{}{}\n", outcome.key, finding.field, value_text(finding),
                          spread.empty() ? "" : "  ", spread);
      if (!finding.note.empty()) text += fmt::format("#     note: {}\n", finding.note);
    }
  }
  const std::string predicted = errors_text(prediction_errors(run));
  if (!predicted.empty()) text += fmt::format("# Relative errors at what was left out of the fits: {}.\n", predicted);
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
