// For tests that start programs.
#pragma once

#include <sys/wait.h>

#include <array>
#include <cstdio>
#include <cstdlib>
#include <string>

namespace slidedp::test {

// A program of the build. Where the programs were carried to another machine, SLIDEDP_BUILD_DIR in the environment is
// the folder that holds them.
inline std::string program(const std::string& name) {
  const char* carried = std::getenv("SLIDEDP_BUILD_DIR");
  return std::string(carried != nullptr ? carried : SLIDEDP_BUILD_DIR) + "/" + name;
}

struct Finished {
  int status = -1;     // the exit code, or 128 + the signal; -1: no shell could be started
  std::string output;  // stdout
};

// Runs a shell command to its end.
inline Finished run_command(const std::string& command) {
  Finished finished;
  FILE* pipe = popen(command.c_str(), "r");
  if (pipe == nullptr) return finished;
  std::array<char, 4096> block;
  while (const size_t size = fread(block.data(), 1, block.size(), pipe)) finished.output.append(block.data(), size);
  const int status = pclose(pipe);
  finished.status = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  return finished;
}

}  // namespace slidedp::test
