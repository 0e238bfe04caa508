// Errors that a user can act on. Plain header: no fmt types, so that files which see torch can include it.
#pragma once

#include <stdexcept>
#include <string>

namespace slidedp {

// Exit codes of all programs.
enum class ExitCode : int {
  ok = 0,
  failure = 1,       // bad input, a failed run
  usage = 2,         // the command line is wrong
  nothing_fits = 3,  // the planner found no plan inside the budgets
  changed = 4,       // two profiles differ by more than their noise
  interrupted = 130  // SIGINT
};

// One error that names the file, key or tensor, what is wrong with it, and what to do. The message is a complete
// sentence for the user; programs print it as "PROGRAM: error: MESSAGE" and exit with `code`.
class Error : public std::runtime_error {
 public:
  explicit Error(const std::string& message, ExitCode code = ExitCode::failure)
      : std::runtime_error(message), code_(code) {}
  ExitCode code() const { return code_; }

 private:
  ExitCode code_;
};

[[noreturn]] inline void fail(const std::string& message) { throw Error(message); }

// Runs a program's body, prints an Error or any other exception as one line on stderr, and returns the exit code.
// `body` is called once and returns the exit code of success.
int run_program(const char* program, int (*body)(int, char**), int argc, char** argv);

}  // namespace slidedp
