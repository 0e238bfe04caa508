// slidedp-run: executes a plan on a Hugging Face checkpoint.
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <atomic>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <map>
#include <string>

#include "model/base/format.h"
#include "runtime/host/memory_limit.h"
#include "runtime/run/run_session.h"

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
  std::filesystem::path plan;
  auto* one = app.add_option("--plan", plan, "plan.yaml, written by slidedp-plan");
  auto* several = app.add_option("--plans", options.plans, "plans to follow one after another: FIRST.yaml,SECOND.yaml");
  several->delimiter(',')->excludes(one);
  app.add_option("--model", options.model, "Hugging Face checkpoint directory")->required();
  app.add_option("--data", options.data, "packed data set, written by slidedp-data")->required();
  app.add_option("--out", options.out, "run directory: log, report and the trained model")->required();
  app.add_option("--steps", options.steps, "steps to run (by each plan), instead of the training spec's");
  std::string host_memory;
  app.add_option("--host-memory", host_memory,
                 "host memory that this run may use, such as 100GiB (default: what the system says is available)");
  app.add_option(
         "--update-order", options.update_order,
         "order in which update workers take tasks: need (whose result is needed first) or arrival (first come, "
         "first served; slower, to compare with)")
      ->transform(CLI::CheckedTransformer(
          std::map<std::string, UpdateOrder>{{"need", UpdateOrder::need}, {"arrival", UpdateOrder::arrival}}));
  app.add_flag("--share-gpu", options.share_gpu,
               "all ranks on the first GPU: for tests, slower than a GPU a rank (backend cuda)");
  app.add_flag("--deterministic", options.deterministic,
               "the same bits in every run, with a slow attention: for tests and audits (backend cuda; cpu always is)");
  app.add_flag("--overwrite", options.overwrite, "replace the results in an existing run directory");
  try {
    app.parse(argc, argv);
    if (one->count() + several->count() == 0) throw CLI::RequiredError("--plan or --plans");
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : static_cast<int>(ExitCode::usage);
  }
  if (one->count() > 0) options.plans = {plan};
  for (int i = 0; i < argc; ++i) options.command_line += (i == 0 ? "" : " ") + std::string(argv[i]);
  if (!host_memory.empty()) declare_host_memory(parse_bytes(host_memory, "--host-memory"));
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
