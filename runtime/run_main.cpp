// slidedp-run: executes a plan on a Hugging Face checkpoint.
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <atomic>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <string>

#include "runtime/exec/run_session.h"

namespace slidedp {
namespace {

std::atomic<int> signals = 0;
std::atomic<bool> writing = false;
static_assert(std::atomic<int>::is_always_lock_free && std::atomic<bool>::is_always_lock_free);

void say(const char* text) {
  // Nothing can be done if this fails.
  if (::write(STDERR_FILENO, text, std::strlen(text)) < 0) return;
}

// Before anything is written a signal ends the program at once; later the run ends after the steps under way, and a
// second signal stops it at once.
void on_signal(int) {
  if (!writing) {
    say("slidedp-run: interrupted: nothing was written\n");
    _exit(static_cast<int>(ExitCode::interrupted));
  }
  if (++signals == 1) {
    say("slidedp-run: interrupted: finishing the steps under way, then exporting; once more stops at once and exports "
        "nothing\n");
  }
}

void catch_signals() {
  struct sigaction action {};
  action.sa_handler = on_signal;
  action.sa_flags = SA_RESTART;
  sigemptyset(&action.sa_mask);
  sigaddset(&action.sa_mask, SIGINT);
  sigaddset(&action.sa_mask, SIGTERM);
  sigaddset(&action.sa_mask, SIGHUP);
  std::signal(SIGPIPE, SIG_IGN);  // a closed terminal or pipe must not end a run
  sigaction(SIGINT, &action, nullptr);
  sigaction(SIGTERM, &action, nullptr);
  sigaction(SIGHUP, &action, nullptr);
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
  app.add_flag("--share-gpu", options.share_gpu,
               "all ranks on the first GPU: for tests, slower than a GPU a rank (backend cuda)");
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
                             requested_stop, [] { writing = true; }};
  return static_cast<int>(run_session(options, environment));
}

}  // namespace
}  // namespace slidedp

int main(int argc, char** argv) { return slidedp::run_program("slidedp-run", slidedp::run, argc, argv); }
