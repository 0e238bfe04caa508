// Which GPUs a run uses, and why it cannot: decided before anything is loaded.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace slidedp {

struct Gpu {
  std::string name;
  int major = 0, minor = 0;  // compute capability
  int64_t free_bytes = 0, total_bytes = 0;
};

// What the CUDA runtime says of this process's GPUs.
struct CudaMachine {
  int driver_version = 0;                      // highest CUDA version of the driver, e.g. 13000; 0 = no driver
  int runtime_version = 0;                     // what this program was built with
  std::optional<std::string> visible_devices;  // CUDA_VISIBLE_DEVICES
  std::string problem;                         // why the GPUs cannot be counted
  int visible = 0;                             // GPUs
  std::vector<Gpu> gpus;                       // the first ones, as far as looked at
};

// Makes the contexts of the first `gpus` GPUs (at most those there are). Call it before anything else uses CUDA: it
// sets how many hardware queues the contexts get.
CudaMachine look_at_gpus(int gpus);

struct GpuRequest {
  int ranks = 1;
  int64_t bytes_per_rank = 0;  // device memory that each rank will need; 0 = not known
  bool share = false;          // all ranks on the first GPU
};

// The GPU of each rank: the r-th visible one for rank r. Throws Error, one sentence, if this machine cannot do it.
std::vector<int> choose_gpus(const CudaMachine& machine, const GpuRequest& request);

}  // namespace slidedp
