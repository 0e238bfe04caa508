// The few functions of NCCL that are used, found at run time: programs start without the library, and a machine that
// lacks it gets a clear message.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

namespace slidedp {

// The library's binary interface, stable throughout version 2.
struct NcclApi {
  using Communicator = struct ncclComm*;
  static constexpr int kSuccess = 0, kInProgress = 7;
  static constexpr int kInt8 = 0, kFloat32 = 7, kBfloat16 = 9;  // data types
  static constexpr int kSum = 0;

  int (*get_version)(int* version);
  const char* (*get_error_string)(int result);
  const char* (*get_last_error)(Communicator);  // may be null: newer than the rest
  int (*comm_init_all)(Communicator* communicators, int count, const int* devices);
  int (*comm_abort)(Communicator);
  int (*comm_get_async_error)(Communicator, int* result);
  int (*group_start)();
  int (*group_end)();
  int (*all_gather)(const void* send, void* receive, size_t count, int type, Communicator, cudaStream_t);
  int (*reduce_scatter)(const void* send, void* receive, size_t count, int type, int operation, Communicator,
                        cudaStream_t);
  int (*broadcast)(const void* send, void* receive, size_t count, int type, int root, Communicator, cudaStream_t);

  // Throws Error "NCCL: WHAT failed: ..." unless `result` is success.
  void check(int result, const char* what) const;
};

// Loads `library` at the first call with that name. Throws Error if it is missing, no NCCL, or too old.
const NcclApi& nccl_api(const char* library = "libnccl.so.2");

}  // namespace slidedp
