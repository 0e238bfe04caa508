// Streams and events of the CUDA backend.
#pragma once

#include <cuda_runtime_api.h>

#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "runtime/device/cpu/cpu_stream.h"
#include "runtime/device/cuda/callbacks.h"
#include "runtime/device/cuda/cuda_clock.h"
#include "runtime/device/cuda/task_trail.h"
#include "runtime/device/device.h"

namespace slidedp {

// The CUDA stream and what belongs to it. Shared by handles and by the device that watches over it.
class StreamCore {
 public:
  // On the calling thread's current device. Throws Error.
  explicit StreamCore(std::string name);
  ~StreamCore();
  StreamCore(const StreamCore&) = delete;
  StreamCore& operator=(const StreamCore&) = delete;

  cudaStream_t handle() const { return stream_.handle; }
  const std::string& name() const { return name_; }
  TaskTrail& trail() { return trail_; }
  Callbacks& callbacks() { return *callbacks_; }
  // Has `done` called when the stream gets here. Where CUDA refuses (returns no success), callbacks() still owes it.
  cudaError_t notify(std::function<void()> done);

 private:
  struct Handle {
    Handle();
    ~Handle();
    cudaStream_t handle = nullptr;
  };
  const std::string name_;
  Handle stream_;
  TaskTrail trail_;
  const std::shared_ptr<Callbacks> callbacks_ = std::make_shared<Callbacks>();
};

class CudaStream final : public Stream {
 public:
  // With a worker, what is issued goes through its queue first.
  CudaStream(std::shared_ptr<StreamCore> core, std::shared_ptr<StreamWorker> worker, const void* device)
      : core_(std::move(core)), worker_(std::move(worker)), device_(device) {}
  ~CudaStream() override {
    if (worker_ != nullptr) worker_->close();
  }
  StreamCore& core() const { return *core_; }
  StreamWorker* worker() const { return worker_.get(); }
  const void* device() const { return device_; }

  // The task that the issuing thread works on; null between tasks.
  std::shared_ptr<const std::string> task;
  uint32_t task_number = 0;

 private:
  std::shared_ptr<StreamCore> core_;
  std::shared_ptr<StreamWorker> worker_;
  const void* device_;
};

// One record() of an event.
struct CudaRecord {
  explicit CudaRecord(int ordinal);  // the GPU must be the calling thread's current device
  ~CudaRecord();
  CudaRecord(const CudaRecord&) = delete;
  CudaRecord& operator=(const CudaRecord&) = delete;
  bool reached_cuda() const;

  const int ordinal;
  cudaEvent_t event = nullptr;
  std::shared_ptr<const CudaClock::Anchor> anchor;
  bool skipped = false;            // the device had failed or was aborted
  std::shared_ptr<Record> issued;  // streams with a worker: resolved when CUDA has the record
};

class CudaEvent final : public Event {
 public:
  // `failure`: of the device that made the event; its abort releases who waits here.
  explicit CudaEvent(std::shared_ptr<DeviceFailure> failure) : failure_(std::move(failure)) {}
  bool complete() const override;
  void synchronize() override;

  void set_last(std::shared_ptr<CudaRecord> record);
  std::shared_ptr<CudaRecord> last() const;  // nullptr: never recorded

 private:
  const std::shared_ptr<DeviceFailure> failure_;
  mutable std::mutex mutex_;
  std::shared_ptr<CudaRecord> last_;
};

}  // namespace slidedp
