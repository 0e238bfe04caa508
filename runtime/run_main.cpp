// slidedp-run: executes a plan on a Hugging Face checkpoint.
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <csignal>
#include <cstdio>
#include <string>

#include "runtime/exec/run_session.h"

namespace slidedp {
namespace {

volatile std::sig_atomic_t signals = 0;
volatile std::sig_atomic_t writing = 0;

// Before anything is written a signal ends the program at once; later the run ends after the current step, and a second
// signal stops it at once.
void on_signal(int) {
  signals = signals + 1;
  if (writing == 0) _exit(static_cast<int>(ExitCode::interrupted));
}

void catch_signals() {
  struct sigaction action {};
  action.sa_handler = on_signal;
  sigaction(SIGINT, &action, nullptr);
  sigaction(SIGTERM, &action, nullptr);
}

StopRequest requested_stop() {
  if (signals == 0) return StopRequest::none;
  return signals == 1 ? StopRequest::finish_step : StopRequest::now;
}

int run(int argc, char** argv) {
  CLI::App app{"Fine-tunes a Hugging Face checkpoint by a plan of slidedp-plan."};
  app.set_version_flag("--version", SLIDEDP_VERSION);
  RunOptions options;
  app.add_option("--plan", options.plan, "plan.yaml, written by slidedp-plan")->required();
  app.add_option("--model", options.model, "Hugging Face checkpoint directory")->required();
  app.add_option("--data", options.data, "packed data set, written by slidedp-data")->required();
  app.add_option("--out", options.out, "run directory: log, report and the trained model")->required();
  app.add_option("--steps", options.steps, "steps to run, instead of the training spec's");
  app.add_flag("--overwrite", options.overwrite, "replace the results in an existing run directory");
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : static_cast<int>(ExitCode::usage);
  }
  for (int i = 0; i < argc; ++i) options.command_line += (i == 0 ? "" : " ") + std::string(argv[i]);
  catch_signals();
  InterruptibleFileSystem files(posix_file_system(), [] { return requested_stop() == StopRequest::now; });
  RunEnvironment environment{files,
                             [](const std::string& line) {
                               std::printf("%s\n", line.c_str());
                               std::fflush(stdout);
                             },
                             requested_stop, [] { writing = 1; }};
  return static_cast<int>(run_session(options, environment));
}

}  // namespace
}  // namespace slidedp

int main(int argc, char** argv) { return slidedp::run_program("slidedp-run", slidedp::run, argc, argv); }
