#include "runtime/host/kernels.h"

#include <bit>
#include <cmath>
#include <vector>

namespace slidedp {
namespace {

namespace baseline {
#include "runtime/host/kernel_loops.h"
}

#if defined(__GNUC__) && !defined(__clang__) && defined(__x86_64__)
#define SLIDEDP_X86_KERNELS

#pragma GCC push_options
#pragma GCC target("avx2")
namespace avx2 {
#include "runtime/host/kernel_loops.h"
}
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx512f")
namespace avx512 {
#include "runtime/host/kernel_loops.h"
}
#pragma GCC pop_options
#endif

std::vector<Kernels> find_kernels() {
  std::vector<Kernels> found;
#ifdef SLIDEDP_X86_KERNELS
  // make_kernels only takes addresses, but is itself compiled for its set: called on CPUs that have the set only.
  if (__builtin_cpu_supports("avx512f")) found.push_back(avx512::make_kernels("avx512f"));
  if (__builtin_cpu_supports("avx2")) found.push_back(avx2::make_kernels("avx2"));
#endif
  found.push_back(baseline::make_kernels("baseline"));
  return found;
}

}  // namespace

std::span<const Kernels> supported_kernels() {
  static const std::vector<Kernels> kernels = find_kernels();
  return kernels;
}

}  // namespace slidedp
