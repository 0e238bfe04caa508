#include "model/base/error.h"

#include <cstdio>
#include <exception>
#include <new>

namespace slidedp {

int run_program(const char* program, int (*body)(int, char**), int argc, char** argv) {
  try {
    return body(argc, argv);
  } catch (const Error& error) {
    std::fprintf(stderr, "%s: error: %s\n", program, error.what());
    return static_cast<int>(error.code());
  } catch (const std::bad_alloc&) {
    std::fprintf(stderr, "%s: error: out of host memory\n", program);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s: internal error: %s\n", program, error.what());
  }
  return static_cast<int>(ExitCode::failure);
}

}  // namespace slidedp
