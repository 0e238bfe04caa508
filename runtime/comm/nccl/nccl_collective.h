// Collectives of ranks with a GPU each, by NCCL: one communicator a rank, all of this process.
//
// abort() ends collectives that wait for others on the GPUs (ncclCommAbort) and aborts every rank's device. A watch
// thread asks for asynchronous errors; one of them fails its rank's device and so ends the run.
#pragma once

#include <atomic>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "runtime/comm/collective.h"
#include "runtime/comm/nccl/nccl_api.h"
#include "runtime/device/cuda/cuda_device.h"

namespace slidedp {

class NcclCollective final : public Collective {
 public:
  // devices[r] drives rank r, each another GPU; their streams have no workers. They must outlive all work that was
  // issued and this object. Runs each kind of collective once, so that all connections exist. Throws Error.
  explicit NcclCollective(std::vector<CudaDevice*> devices);
  ~NcclCollective() override;

  int ranks() const override { return static_cast<int>(devices_.size()); }
  void all_gather(int rank, Stream&, const void* shard, void* full, int64_t shard_bytes) override;
  void reduce_scatter(int rank, Stream&, const void* full, void* shard, int64_t shard_elements, DType) override;
  void broadcast(int rank, Stream&, void* data, int64_t bytes, int root) override;
  void abort() override;

 private:
  using Call = std::function<int(NcclApi::Communicator, cudaStream_t)>;
  void issue(int rank, Stream& stream, const char* what, Call call);
  void warm_up();
  void warm_up_on(const std::vector<void*>& memory, const std::vector<cudaStream_t>& streams);
  void abort_communicators();
  void watch();

  const NcclApi& api_;
  const std::vector<CudaDevice*> devices_;
  std::atomic<bool> aborted_ = false;
  // Held while a rank's call is with NCCL; abort waits for it a while, but not for ever.
  std::vector<std::unique_ptr<std::timed_mutex>> calling_;
  std::mutex communicators_mutex_;  // guards what follows against the watch
  std::vector<NcclApi::Communicator> communicators_;
  bool released_ = false;
  std::mutex watch_mutex_;
  std::condition_variable watch_wake_;
  bool closing_ = false;
  std::thread watch_;  // last
};

}  // namespace slidedp
