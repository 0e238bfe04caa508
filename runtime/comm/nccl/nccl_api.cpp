#include "runtime/comm/nccl/nccl_api.h"

#include <dlfcn.h>

#include <map>
#include <mutex>
#include <string>

#include "model/base/error.h"

namespace slidedp {
namespace {

constexpr int kOldestVersion = 21000;  // bf16 sums

template <typename Function>
void find(void* handle, const char* name, Function& function, const char* library) {
  function = reinterpret_cast<Function>(dlsym(handle, name));
  if (function == nullptr) {
    fail(std::string(library) + " has no function " + name + ", so it is no usable NCCL; install NCCL 2.10 or newer.");
  }
}

NcclApi load(const char* library) {
  void* handle = dlopen(library, RTLD_NOW | RTLD_LOCAL);  // stays loaded
  if (handle == nullptr) {
    const char* reason = dlerror();
    fail(std::string("Several GPUs need NCCL, but ") + library + " cannot be loaded (" +
         (reason == nullptr ? "no reason given" : reason) +
         "); install it (libnccl2, or the Python package nvidia-nccl-cu13) and put its folder into LD_LIBRARY_PATH.");
  }
  NcclApi api{};
  find(handle, "ncclGetVersion", api.get_version, library);
  find(handle, "ncclGetErrorString", api.get_error_string, library);
  find(handle, "ncclCommInitAll", api.comm_init_all, library);
  find(handle, "ncclCommAbort", api.comm_abort, library);
  find(handle, "ncclCommGetAsyncError", api.comm_get_async_error, library);
  find(handle, "ncclGroupStart", api.group_start, library);
  find(handle, "ncclGroupEnd", api.group_end, library);
  find(handle, "ncclAllGather", api.all_gather, library);
  find(handle, "ncclReduceScatter", api.reduce_scatter, library);
  find(handle, "ncclBroadcast", api.broadcast, library);
  api.get_last_error = reinterpret_cast<const char* (*)(NcclApi::Communicator)>(dlsym(handle, "ncclGetLastError"));
  int version = 0;
  api.check(api.get_version(&version), "ncclGetVersion");
  if (version < kOldestVersion) {
    fail(std::string(library) + " is NCCL version code " + std::to_string(version) + "; install NCCL 2.10 or newer.");
  }
  return api;
}

}  // namespace

void NcclApi::check(int result, const char* what) const {
  if (result == kSuccess || result == kInProgress) return;
  std::string detail = get_error_string(result);
  const char* last = get_last_error == nullptr ? nullptr : get_last_error(nullptr);
  if (last != nullptr && *last != '\0') detail += std::string(" (") + last + ")";
  fail(std::string("NCCL: ") + what + " failed: " + detail + ". NCCL_DEBUG=WARN in the environment makes it say more.");
}

const NcclApi& nccl_api(const char* library) {
  static std::mutex mutex;
  static std::map<std::string, NcclApi> loaded;
  const std::lock_guard lock(mutex);
  auto found = loaded.find(library);
  if (found == loaded.end()) found = loaded.emplace(library, load(library)).first;
  return found->second;
}

}  // namespace slidedp
