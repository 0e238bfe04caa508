#include "profiler/registry.h"

// A new probe is a file profiler/probe_*.cpp that defines make_NAME(), and one line here. Order matters in two ways:
// rates and caps come before the probes that raise them or fit a law over them (host_contention); device_context comes
// last, when all that the driver loads on demand is there.
#define SLIDEDP_PROBES(X)      \
  X(machine)                   \
  X(host_dram)                 \
  X(host_adam)                 \
  X(host_split)                \
  X(host_norm)                 \
  X(host_sources)              \
  X(copy_h2d)                  \
  X(copy_d2h)                  \
  X(copy_duplex)               \
  X(copy_root)                 \
  X(host_contention)           \
  X(collective_all_gather)     \
  X(collective_reduce_scatter) \
  X(collective_broadcast)      \
  X(kernel_layer)              \
  X(device_state)              \
  X(kernel_head)               \
  X(kernel_embedding)          \
  X(kernel_cast)               \
  X(kernel_product)            \
  X(launch_latency)            \
  X(storage)                   \
  X(device_context)

namespace slidedp {

#define SLIDEDP_DECLARE(NAME) std::unique_ptr<Probe> make_##NAME();
SLIDEDP_PROBES(SLIDEDP_DECLARE)
#undef SLIDEDP_DECLARE

std::vector<std::unique_ptr<Probe>> all_probes() {
  std::vector<std::unique_ptr<Probe>> probes;
#define SLIDEDP_ADD(NAME) probes.push_back(make_##NAME());
  SLIDEDP_PROBES(SLIDEDP_ADD)
#undef SLIDEDP_ADD
  return probes;
}

}  // namespace slidedp
