// slidedp-profile: measures this machine and writes a hardware profile.
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <atomic>
#include <csignal>
#include <cstdio>

#include "model/base/format.h"
#include "model/calibration/prediction_errors.h"
#include "model/calibration/profile_diff.h"
#include "model/calibration/profile_store.h"
#include "profiler/profile.h"
#include "profiler/registry.h"
#include "runtime/device/backends.h"

namespace slidedp {
namespace {

namespace fs = std::filesystem;

std::atomic<bool> stop_requested = false;

// The first SIGINT stops between repeats; the handler is then reset, so that a second one kills (nothing is being
// written until the end, and what is written then is renamed into place).
void install_sigint() {
  struct sigaction action {};
  action.sa_handler = [](int) { stop_requested.store(true); };
  action.sa_flags = SA_RESETHAND;
  sigaction(SIGINT, &action, nullptr);
}

struct Options {
  std::string out, db, model, backend = "cpu", device_memory;
  int ranks = 0;  // 0: not said
  std::vector<std::string> only, diff;
  bool list = false, quick = false, overwrite = false;
};

void add_options(CLI::App& app, Options& options) {
  app.add_option("--out", options.out, "Hardware profile to write (YAML)");
  app.add_option("--db", options.db, "SQLite database that every raw sample is appended to");
  app.add_option("--model", options.model,
                 "Folder of a checkpoint, or a config.json, whose shapes kernels are measured at (default: "
                 "SmolLM2-135M)");
  app.add_option("--backend", options.backend, "Device backend")->capture_default_str();
  app.add_option("--ranks", options.ranks,
                 "Ranks that will train together (default: 2 on the cpu backend, every GPU that is visible on cuda)")
      ->check(CLI::Range(1, 64));
  app.add_option("--device-memory", options.device_memory,
                 "Memory that one rank may use, for example 6GiB (default: on the cpu backend half of the host's, "
                 "shared among ranks; else all that the GPU has)");
  app.add_flag("--list", options.list, "List the probes and whether they apply here, measure nothing");
  app.add_option(
      "--only", options.only,
      "Run only these probes (of host.dram, host.adam and host.contention all or none); other values come from the "
      "existing --out file");
  app.add_flag("--quick", options.quick, "At most a minute: fewer sizes and repeats, smaller buffers");
  app.add_option(
         "--diff", options.diff,
         "Compare two measured profiles, BEFORE AFTER, and measure nothing: exit code 0 if they differ by no more "
         "than their noise, 4 if the machine has changed")
      ->expected(2);
  app.add_flag("--overwrite", options.overwrite, "Replace an existing --out file");
}

// Resolves the number of ranks, too.
ProbeContext context_of(Options& options, MachineIdentity& machine) {
  const ModelSpec model = options.model.empty() ? default_model() : load_model_spec(options.model);
  ProbeContext context = make_context(machine, model, options.quick);
  const DeviceFacts device = device_facts(options.backend);  // refuses what this build or machine does not have
  machine.gpu = device.name;
  context.backend = options.backend;
  if (options.ranks == 0) options.ranks = context.on_host() ? 2 : device.devices;
  check_backend(options.backend, options.ranks);
  if (!context.on_host()) {
    context.device_total_bytes = device.total_bytes;
    context.device_available_bytes = device.free_bytes / 10 * 9;  // a margin for what the driver rounds up
  }
  context.ranks = options.ranks;
  if (!options.device_memory.empty()) {
    context.device_memory_bytes = parse_bytes(options.device_memory, "--device-memory");
    if (context.device_memory_bytes == 0) fail("--device-memory: must be more than zero bytes.");
    if (!context.on_host() && context.device_memory_bytes > device.total_bytes) {
      failf("--device-memory: {} is more than the {} that {} has.", options.device_memory,
            format_bytes(device.total_bytes), device.name);
    }
  }
  if (context.on_host() && context.ranks * context.rank_memory_bytes() >= context.memory_bytes) {
    failf("--device-memory: {} ranks with {} each take all of this host's {}; choose a smaller size.", context.ranks,
          format_bytes(context.rank_memory_bytes()), format_bytes(context.memory_bytes));
  }
  context.stop = &stop_requested;
  return context;
}

void check_out(const Options& options) {
  const fs::path out = options.out;
  const fs::path folder = fs::absolute(out).parent_path();
  if (!fs::is_directory(folder)) {
    failf("--out {}: the folder {} does not exist; create it first.", options.out, folder.string());
  }
  if (fs::is_directory(out)) failf("--out {}: is a folder; name a file.", options.out);
  if (::access(folder.c_str(), W_OK) != 0) {
    failf("--out {}: the folder {} is not writable; choose another.", options.out, folder.string());
  }
  if (options.only.empty() && fs::exists(out) && !options.overwrite) {
    failf("--out {}: exists already; name another file, or add --overwrite to replace it.", options.out);
  }
}

// What the profile starts from: an empty one, or with --only the existing file.
HardwareSpec starting_spec(const Options& options, const MachineIdentity& machine) {
  if (options.only.empty()) {
    return empty_profile(machine, options.backend, options.ranks);
  }
  if (!fs::exists(options.out)) {
    failf("--out {}: does not exist. With --only the values that are not measured come from it: run all probes first.",
          options.out);
  }
  HardwareSpec spec = load_hardware_spec(options.out);
  if (spec.device.backend != options.backend || spec.gpus != options.ranks) {
    failf("--out {}: was measured for {} ranks on the {} backend, not for {} on {}; run all probes with --overwrite.",
          options.out, spec.gpus, spec.device.backend, options.ranks, options.backend);
  }
  return spec;
}

void list_probes(std::span<const std::unique_ptr<Probe>> probes, const ProbeContext& context) {
  for (const auto& probe : probes) {
    fmt::print("{}\n    {}\n", probe->key(), probe->method());
    if (const auto reason = probe->waived(context)) fmt::print("    waived here: {}\n", *reason);
  }
}

// A line for each probe and round.
class ProgressLines {
 public:
  ProgressLines(int rounds, size_t probes) : rounds_(rounds), probes_(probes) {}

  void operator()(const ProbePlace& place, const ProbeOutcome* outcome) {
    if (outcome == nullptr) {
      fmt::print("[round {}/{}, {:2}/{}] {:<26} ", place.round + 1, rounds_, place.index + 1, probes_,
                 place.probe.key());
      begin_ = steady_seconds();
    } else if (outcome->waived) {
      fmt::print("waived: {}\n", *outcome->waived);
    } else {
      fmt::print("{:.1f} s\n", steady_seconds() - begin_);
    }
    std::fflush(stdout);
  }

 private:
  int rounds_;
  size_t probes_;
  double begin_ = 0;
};

// Every value that was found, and what there is to say about it.
void show_values(const ProfileRun& run) {
  for (const ProbeOutcome& outcome : run.outcomes) {
    for (const Finding& finding : outcome.findings) {
      fmt::print("{:<26} {:<34} {:>16}  {}\n", outcome.key, finding.field, value_text(finding), spread_text(finding));
    }
    for (const Finding& finding : outcome.findings) {
      if (!finding.note.empty()) fmt::print("    note: {}\n", finding.note);
    }
    const auto unsteady = std::count_if(outcome.measurements.begin(), outcome.measurements.end(),
                                        [](const Measurement& m) { return !m.steady; });
    if (unsteady > 0) {
      fmt::print("    note: {}: {} of {} medians were not steady within 2 % when the time was up\n", outcome.key,
                 unsteady, outcome.measurements.size());
    }
  }
}

int show_diff(const std::string& before, const std::string& after) {
  const HardwareSpec older = load_hardware_spec(before), newer = load_hardware_spec(after);
  const ProfileDiff diff = diff_profiles(older, before, newer, after);
  fmt::print("{}", diff_table(diff));
  return static_cast<int>(diff.changed() ? ExitCode::changed : ExitCode::ok);
}

int body(int argc, char** argv) {
  Options options;
  CLI::App app{
      "Measures this machine with the code that training runs: copies, collectives, host memory, the CPU optimizer, "
      "compute kernels. Writes a hardware profile for slidedp-plan."};
  app.set_version_flag("--version", SLIDEDP_VERSION);
  add_options(app, options);
  try {
    app.parse(argc, argv);
    if (!options.list && options.diff.empty() && (options.out.empty() || options.db.empty())) {
      throw CLI::ValidationError("--out and --db are required (or --list, --diff)");
    }
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? static_cast<int>(ExitCode::ok) : static_cast<int>(ExitCode::usage);
  }
  if (!options.diff.empty()) return show_diff(options.diff[0], options.diff[1]);
  MachineIdentity machine = identify_machine();
  const ProbeContext context = context_of(options, machine);
  const auto probes = all_probes();
  if (options.list) {
    list_probes(probes, context);
    return static_cast<int>(ExitCode::ok);
  }
  const std::vector<const Probe*> chosen = choose_probes(probes, options.only);
  check_out(options);
  check_profile_store(options.db);
  const HardwareSpec start = starting_spec(options, machine);
  install_sigint();
  fmt::print("{} x {} ranks, {}, kernels at the shapes of {}: {} probes, at most {}\n", options.backend, options.ranks,
             start.name, context.model.name, chosen.size(), options.quick ? "1 minute" : "3 minutes");
  const ProfileRun run = run_profile(chosen, context, machine, start, ProgressLines(context.rounds, chosen.size()));
  context.harness(1).check_stop();
  show_values(run);
  if (run.other_threads > 0) {
    fmt::print("note: other programs kept {:.0f} threads running at the start; measure again on an idle machine\n",
               run.other_threads);
  }
  const std::string predicted = errors_text(prediction_errors(run));
  if (!predicted.empty()) fmt::print("errors at what was not fitted: {}\n", predicted);
  const int64_t id = save_profile(run, options.db);
  write_profile(run, options.out);
  fmt::print("{} written, raw samples in {} (profile {}); {:.1f} s in all\n", options.out, options.db, id, run.seconds);
  return static_cast<int>(ExitCode::ok);
}

}  // namespace
}  // namespace slidedp

int main(int argc, char** argv) { return slidedp::run_program("slidedp-profile", slidedp::body, argc, argv); }
