#include "runtime/device/cuda/cuda_error.h"

namespace slidedp {

std::string describe(cudaError_t status) {
  return std::string(cudaGetErrorString(status)) + " (" + cudaGetErrorName(status) + ")";
}

void check_cuda(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  cudaGetLastError();
  throw CudaError(std::string(what) + " failed: " + describe(status) + ".");
}

bool is_answer(cudaError_t status) {
  if (status == cudaErrorNotReady) cudaGetLastError();
  return status == cudaSuccess || status == cudaErrorNotReady;
}

}  // namespace slidedp
