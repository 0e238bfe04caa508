// slidedp-plan: picks a plan for a model, a machine and a training spec.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <filesystem>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "model/base/atomic_file.h"
#include "model/base/format.h"
#include "model/spec/catalogue.h"
#include "model/spec/overrides.h"
#include "model/timeline/timeline.h"
#include "planner/calibrate.h"
#include "planner/pins.h"
#include "planner/report.h"
#include "planner/search.h"
#include "planner/space.h"

namespace slidedp {
namespace {

struct Arguments {
  std::string model, hardware, host, train, out, device_memory, host_memory, trace;
  std::vector<std::string> sets, pins, calibrate;
  int64_t profile = 0;  // 0: not said
  bool json = false;
  int gpus = 1;
  int top = 10;
};

void declare(CLI::App& app, Arguments& arguments) {
  app.add_option("--model", arguments.model, "Hugging Face directory or config.json");
  app.add_option("--hardware", arguments.hardware,
                 "Hardware profile, YAML (slidedp-profile writes one), or with --host a GPU's public figures");
  app.add_option("--host", arguments.host, "Host of the catalogue that holds the GPUs, YAML");
  app.add_option("--gpus", arguments.gpus, "With --host: how many GPUs (default: 1)")
      ->needs("--host")
      ->check(CLI::PositiveNumber);
  app.add_option("--train", arguments.train, "Training spec, YAML");
  app.add_option("--out", arguments.out, "Plan (with --calibrate: hardware profile) to write, YAML");
  app.add_option("--gpu-memory", arguments.device_memory, "Budget per GPU, such as 22GiB (default: the profile's)");
  app.add_option("--host-memory", arguments.host_memory, "Budget of the host, such as 100GiB (default: the profile's)");
  app.add_option("--set", arguments.sets, "key=value: change the hardware profile, or with train. the training spec")
      ->allow_extra_args(false);
  app.add_option("--pin", arguments.pins, "field=value: fix a field of the plan")->allow_extra_args(false);
  app.add_flag("--json", arguments.json, "Print one JSON object instead of tables");
  app.add_option("--trace", arguments.trace, "Write the predicted timeline of the best plan, Perfetto JSON");
  app.add_option("--top", arguments.top, "Candidates to print")->check(CLI::Range(1, 100));
  CLI::Option* calibrate =
      app.add_option("--calibrate", arguments.calibrate,
                     "Make a hardware profile instead of a plan: from the samples of a profile database "
                     "(slidedp-profile --db), or from the logs of runs (run.db), which correct --hardware or the "
                     "profile they were planned with")
          ->expected(1, 1000);
  for (const char* other :
       {"--train", "--set", "--pin", "--json", "--trace", "--top", "--gpu-memory", "--host-memory"}) {
    calibrate->excludes(app.get_option(other));
  }
  app.add_option("--profile", arguments.profile, "Which profile of a database to --calibrate (default: the latest)")
      ->needs(calibrate)
      ->check(CLI::PositiveNumber);
}

HardwareSpec load_machine(const Arguments& arguments) {
  if (arguments.host.empty()) return load_hardware_spec(arguments.hardware);
  return compose_hardware(load_catalogue_gpu(arguments.hardware), load_catalogue_host(arguments.host), arguments.gpus);
}

// The budgets given take the place of the profile's memory sizes, also in the plan file: what runs the plan enforces
// them.
Budgets budgets(const Arguments& arguments, HardwareSpec& hardware) {
  int64_t& device = hardware.device.memory_bytes;
  int64_t& host = hardware.host.memory_bytes;
  if (!arguments.device_memory.empty()) device = parse_bytes(arguments.device_memory, "--gpu-memory");
  if (!arguments.host_memory.empty()) host = parse_bytes(arguments.host_memory, "--host-memory");
  return {device, host};
}

PlanForecast forecast(const SearchResult& result, const TrainSpec& train) {
  const Candidate& best = result.best.front();
  return {
      best.step, tokens_per_second(train, best.step), best.bottleneck, best.exposed, best.device_bytes, best.host_bytes,
      result.why};
}

void check_out(const Arguments& arguments) {
  for (const std::string& input : {arguments.model, arguments.hardware, arguments.host, arguments.train}) {
    std::error_code ignored;
    if (std::filesystem::equivalent(input, arguments.out, ignored)) {
      failf("--out {} is an input of this command; choose another name", arguments.out);
    }
  }
}

int make_plan(const Arguments& arguments) {
  check_out(arguments);
  const ModelSpec model = load_model_spec(arguments.model);
  HardwareSpec hardware = load_machine(arguments);
  TrainSpec train = load_train_spec(arguments.train);
  for (const std::string& assignment : arguments.sets) apply_set(assignment, hardware, train);
  Pins pins;
  for (const std::string& assignment : arguments.pins) add_pin(assignment, pins);

  const Budgets limits = budgets(arguments, hardware);
  SearchOptions options;
  options.keep = std::max(options.keep, arguments.top);
  const SearchResult result = search(model, train, hardware, limits, pins, options);
  const Plan& plan = result.best.front().plan;
  const MemoryTable memory = plan_memory(SearchProblem(model, train, hardware, pins), plan);

  AtomicFile plan_file(arguments.out);
  plan_file.stream() << to_yaml(PlanFile{plan, train, hardware, forecast(result, train)});
  plan_file.finish();
  if (!arguments.trace.empty()) {
    const StepGraph graph = build_step_graph(model, train, plan);
    write_trace(graph, {simulate(graph, hardware).timeline}, arguments.trace);
  }
  plan_file.commit();
  const Report report{model, train, hardware, limits, result, memory};
  if (arguments.json) {
    nlohmann::json object = render_json(report, arguments.top);
    object["out"] = arguments.out;
    fmt::print("{}\n", object.dump(2));
  } else {
    fmt::print("{}\nPlan written to {}\n", render_text(report, arguments.top), arguments.out);
  }
  return static_cast<int>(ExitCode::ok);
}

void check_required(const Arguments& arguments) {
  std::vector<std::pair<const char*, const std::string*>> required;
  if (arguments.calibrate.empty()) {
    required = {{"--model", &arguments.model}, {"--hardware", &arguments.hardware}, {"--train", &arguments.train}};
  }
  required.emplace_back("--out", &arguments.out);
  for (const auto& [name, value] : required) {
    if (value->empty()) throw CLI::RequiredError(name);
  }
}

int make_profile(const Arguments& arguments) {
  check_out(arguments);
  CalibrateOptions options;
  options.databases.assign(arguments.calibrate.begin(), arguments.calibrate.end());
  if (arguments.profile > 0) options.profile = arguments.profile;
  if (!arguments.hardware.empty()) options.hardware = load_machine(arguments);
  options.model = arguments.model;
  options.out = arguments.out;
  fmt::print("{}", calibrate(options));
  return static_cast<int>(ExitCode::ok);
}

int run(int argc, char** argv) {
  CLI::App app("Picks the plan with which a model trains fastest on a machine, inside its memory budgets.");
  app.set_version_flag("--version", SLIDEDP_VERSION);
  Arguments arguments;
  declare(app, arguments);
  try {
    app.parse(argc, argv);
    check_required(arguments);
  } catch (const CLI::ParseError& error) {
    const bool help = error.get_exit_code() == static_cast<int>(CLI::ExitCodes::Success);
    if (!help) throw Error(error.what(), ExitCode::usage);
    return app.exit(error);
  }
  return arguments.calibrate.empty() ? make_plan(arguments) : make_profile(arguments);
}

}  // namespace
}  // namespace slidedp

int main(int argc, char** argv) { return slidedp::run_program("slidedp-plan", slidedp::run, argc, argv); }
