// Return codes of the CUDA runtime as errors that a user can act on.
#pragma once

#include <cuda_runtime_api.h>

#include <string>

#include "model/base/error.h"

namespace slidedp {

// A call of the CUDA runtime that failed; the message does not yet say for which task.
class CudaError : public Error {
 public:
  using Error::Error;
};

// "an illegal memory access was encountered (cudaErrorIllegalAddress)".
std::string describe(cudaError_t status);

// Throws CudaError "WHAT failed: ..." unless `status` is success. Takes the calling thread's last error with it, so
// that a later check does not find it again.
void check_cuda(cudaError_t status, const char* what);

// True for a call's own answer (done, or not yet); false for a failure, also an earlier asynchronous one. "Not yet" is
// taken from the calling thread's last error.
bool is_answer(cudaError_t status);

}  // namespace slidedp
