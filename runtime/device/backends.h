// The one file that knows which backends exist.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "model/spec/layout.h"
#include "model/spec/model_spec.h"
#include "model/spec/plan.h"
#include "runtime/comm/collective.h"
#include "runtime/device/device.h"
#include "runtime/nn/compute.h"

namespace slidedp {

// Something that a backend says of itself, for the reader of a run's output and log.
struct BackendFact {
  std::string key, value;
};

// Everything a run needs from a backend: one device and one compute object a rank, one collective for all.
struct Backend {
  std::vector<std::unique_ptr<Device>> devices;
  std::unique_ptr<Collective> collective;
  std::vector<std::unique_ptr<Compute>> compute;  // empty when made without a model
  std::vector<BackendFact> facts;                 // the hardware, what was chosen for it by measurement
};

std::vector<std::string> backend_names();  // those compiled in

struct BackendOptions {
  int64_t memory_budget = 0;  // bytes per rank; 0 = what the device has (the CPU backend then has no limit)
  // Bytes that each rank will use in all. A device with less free memory is refused at once; the CPU backend knows no
  // such limit.
  int64_t memory_needed = 0;
  // CUDA: all ranks on the first visible GPU, with local collectives. The CPU backend's ranks share the host anyway.
  bool share_gpu = false;
  // CUDA: every result has the same bits twice, at the price of a slow attention. The CPU backend always is.
  bool deterministic = false;
};

// What there is to train on. On the CPU backend ranks share the host: no device, no memory of its own.
struct DeviceFacts {
  std::string name;  // of the first device; empty on the CPU backend
  int devices = 0;   // that this process sees
  // Of the first device's memory, free now. What the process itself holds, its driver context too, is not free.
  int64_t total_bytes = 0, free_bytes = 0;
};
// Throws Error as check_backend() does. CUDA: makes the first GPU's context.
DeviceFacts device_facts(const std::string& backend);

// Throws Error for an unknown backend or one that this machine cannot run; quick, so that nothing is loaded in vain.
void check_backend(const std::string& name, int ranks, const BackendOptions& options = {});
// Throws Error as check_backend() does: it looks again, since another process may have taken memory in between.
Backend make_backend(const std::string& name, int ranks, const BackendOptions& options = {});
// As above, with compute objects for this model and plan.
Backend make_backend(const ModelSpec& model, const ModelLayout& layout, const Plan& plan,
                     const BackendOptions& options = {});

// Temporaries of the compute lanes: bytes that the backend's tensor library holds now and at most, over all ranks.
MemoryUse temporary_memory(const std::string& backend);
void reset_temporary_peak(const std::string& backend);

}  // namespace slidedp
