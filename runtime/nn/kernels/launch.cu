#include <stdexcept>
#include <string>

#include "runtime/nn/kernels/launch.h"

namespace slidedp::nn {

void check_cuda(cudaError_t status, const char* call) {
  if (status == cudaSuccess) return;
  throw std::runtime_error(std::string(call) + " failed: " + cudaGetErrorString(status));
}

void check_launch(const char* kernel) { check_cuda(cudaGetLastError(), kernel); }

}  // namespace slidedp::nn
