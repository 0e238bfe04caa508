#include "runtime/comm/nccl/nccl_collective.h"

#include <pthread.h>

#include <chrono>
#include <cstdlib>
#include <stdexcept>
#include <string>

#include "model/base/error.h"
#include "runtime/device/cuda/cuda_error.h"

namespace slidedp {
namespace {

constexpr auto kWatchInterval = std::chrono::milliseconds(50);
// A call that takes longer is stuck inside NCCL, and only aborting its communicator frees it.
constexpr auto kCallPatience = std::chrono::seconds(2);
constexpr int64_t kWarmUpElements = int64_t{1} << 18;  // per rank; 1 MiB in fp32

}  // namespace

NcclCollective::NcclCollective(std::vector<CudaDevice*> devices) : api_(nccl_api()), devices_(std::move(devices)) {
  // All connections now: later calls then never wait for another rank on the host.
  setenv("NCCL_RUNTIME_CONNECT", "0", 0);
  std::vector<int> ordinals;
  for (CudaDevice* device : devices_) {
    ordinals.push_back(device->ordinal());
    calling_.push_back(std::make_unique<std::timed_mutex>());
  }
  communicators_.resize(devices_.size(), nullptr);
  api_.check(api_.comm_init_all(communicators_.data(), ranks(), ordinals.data()), "ncclCommInitAll");
  try {
    warm_up();
    watch_ = std::thread([this] { watch(); });
  } catch (...) {
    abort_communicators();
    throw;
  }
}

NcclCollective::~NcclCollective() {
  aborted_ = true;
  {
    const std::lock_guard lock(watch_mutex_);
    closing_ = true;
  }
  watch_wake_.notify_all();
  watch_.join();
  abort_communicators();  // a plain destroy would wait for collectives that never end
}

void NcclCollective::warm_up() {
  std::vector<void*> memory(devices_.size(), nullptr);
  std::vector<cudaStream_t> streams(devices_.size(), nullptr);
  const auto release = [&] {
    for (size_t r = 0; r < devices_.size(); ++r) {
      cudaSetDevice(devices_[r]->ordinal());
      if (streams[r] != nullptr) cudaStreamDestroy(streams[r]);
      cudaFree(memory[r]);
    }
    cudaGetLastError();
  };
  try {
    for (size_t r = 0; r < devices_.size(); ++r) {
      check_cuda(cudaSetDevice(devices_[r]->ordinal()), "cudaSetDevice");
      check_cuda(cudaStreamCreateWithFlags(&streams[r], cudaStreamNonBlocking), "cudaStreamCreate");
      const auto bytes = static_cast<size_t>((ranks() + 1) * kWarmUpElements * 4);
      check_cuda(cudaMalloc(&memory[r], bytes), "cudaMalloc for the warm-up of NCCL");
      check_cuda(cudaMemset(memory[r], 0, bytes), "cudaMemset");
    }
    warm_up_on(memory, streams);
  } catch (...) {
    release();
    throw;
  }
  release();
}

// memory[r] = room for one rank's share, then for all ranks'.
void NcclCollective::warm_up_on(const std::vector<void*>& memory, const std::vector<cudaStream_t>& streams) {
  const auto for_all = [&](const char* what, const auto& call) {
    api_.check(api_.group_start(), "ncclGroupStart");
    for (size_t r = 0; r < devices_.size(); ++r) {
      char* share = static_cast<char*>(memory[r]);
      api_.check(call(share, share + kWarmUpElements * 4, communicators_[r], streams[r]), what);
    }
    api_.check(api_.group_end(), what);
  };
  for (const int64_t elements : {int64_t{64}, kWarmUpElements}) {  // small and large ones go by different protocols
    const auto count = static_cast<size_t>(elements);
    for_all("ncclAllGather", [&](void* share, void* full, auto communicator, auto stream) {
      return api_.all_gather(share, full, count * 4, NcclApi::kInt8, communicator, stream);
    });
    for (const int type : {NcclApi::kFloat32, NcclApi::kBfloat16}) {
      for_all("ncclReduceScatter", [&](void* share, void* full, auto communicator, auto stream) {
        return api_.reduce_scatter(full, share, count, type, NcclApi::kSum, communicator, stream);
      });
    }
    for_all("ncclBroadcast", [&](void* share, void*, auto communicator, auto stream) {
      return api_.broadcast(share, share, count * 4, NcclApi::kInt8, 0, communicator, stream);
    });
  }
  for (size_t r = 0; r < devices_.size(); ++r) {
    check_cuda(cudaSetDevice(devices_[r]->ordinal()), "cudaSetDevice");
    check_cuda(cudaStreamSynchronize(streams[r]), "the warm-up of NCCL");
  }
}

void NcclCollective::issue(int rank, Stream& stream, const char* what, Call call) {
  if (rank < 0 || rank >= ranks()) throw std::logic_error("no rank " + std::to_string(rank));
  CudaDevice* device = devices_[static_cast<size_t>(rank)];
  device->launch(stream, [this, device, rank, what, call = std::move(call)] {
    const std::lock_guard lock(*calling_[static_cast<size_t>(rank)]);
    if (aborted_) return device->abort();
    const int result = call(communicators_[static_cast<size_t>(rank)], current_cuda_stream());
    if (aborted_) return device->abort();  // then the result says so, and why is known already
    api_.check(result, what);
  });
}

void NcclCollective::all_gather(int rank, Stream& stream, const void* shard, void* full, int64_t shard_bytes) {
  if (shard_bytes < 0) throw std::logic_error("negative size of a collective");
  issue(rank, stream, "ncclAllGather",
        [this, shard, full, bytes = static_cast<size_t>(shard_bytes)](auto communicator, auto on) {
          return api_.all_gather(shard, full, bytes, NcclApi::kInt8, communicator, on);
        });
}

void NcclCollective::reduce_scatter(int rank, Stream& stream, const void* full, void* shard, int64_t shard_elements,
                                    DType type) {
  if (shard_elements < 0) throw std::logic_error("negative size of a collective");
  const int nccl_type = type == DType::bf16 ? NcclApi::kBfloat16 : NcclApi::kFloat32;
  issue(rank, stream, "ncclReduceScatter",
        [this, full, shard, count = static_cast<size_t>(shard_elements), nccl_type](auto communicator, auto on) {
          return api_.reduce_scatter(full, shard, count, nccl_type, NcclApi::kSum, communicator, on);
        });
}

void NcclCollective::broadcast(int rank, Stream& stream, void* data, int64_t bytes, int root) {
  if (bytes < 0) throw std::logic_error("negative size of a collective");
  if (root < 0 || root >= ranks()) throw std::logic_error("no root rank " + std::to_string(root));
  issue(rank, stream, "ncclBroadcast",
        [this, data, count = static_cast<size_t>(bytes), root](auto communicator, auto on) {
          return api_.broadcast(data, data, count, NcclApi::kInt8, root, communicator, on);
        });
}

void NcclCollective::abort() {
  aborted_ = true;
  for (CudaDevice* device : devices_) device->abort();  // first: nothing may run on a result that is missing
  abort_communicators();
}

void NcclCollective::abort_communicators() {
  const std::lock_guard lock(communicators_mutex_);
  if (std::exchange(released_, true)) return;
  for (size_t r = 0; r < communicators_.size(); ++r) {
    if (communicators_[r] == nullptr) continue;
    const std::unique_lock call(*calling_[r], kCallPatience);
    cudaSetDevice(devices_[r]->ordinal());
    api_.comm_abort(communicators_[r]);  // what it answers changes nothing any more
  }
  cudaGetLastError();
}

void NcclCollective::watch() {
  pthread_setname_np(pthread_self(), "nccl:watch");
  std::unique_lock lock(watch_mutex_);
  while (!watch_wake_.wait_for(lock, kWatchInterval, [this] { return closing_; })) {
    lock.unlock();
    for (size_t r = 0; r < devices_.size(); ++r) {
      int result = NcclApi::kSuccess;
      {
        const std::lock_guard communicators(communicators_mutex_);
        if (released_) break;
        api_.comm_get_async_error(communicators_[r], &result);
      }
      if (result == NcclApi::kSuccess || result == NcclApi::kInProgress) continue;
      const std::string message = "Rank " + std::to_string(r) +
                                  ": NCCL failed in a collective that was under way: " + api_.get_error_string(result) +
                                  ". NCCL_DEBUG=WARN in the environment makes it say more.";
      devices_[r]->fail(std::make_exception_ptr(Error(message)));
    }
    lock.lock();
  }
}

}  // namespace slidedp
