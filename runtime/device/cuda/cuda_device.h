// One rank on one GPU.
//
// Threads: CUDA calls are made on the thread that issues the work, save in a process whose ranks share a GPU: there
// each stream has a worker thread that makes them in stream order (as on the CPU backend). A rank that waits for
// another one then waits on that thread, never on the GPU: a GPU stream that waits for work not yet issued could hold
// up, and be held up by, whatever CUDA lets wait for the whole GPU (loading a kernel, freeing memory).
//
// A watch thread per device looks for asynchronous failures, calls what notify() owes after one, and keeps the clock.
// After abort() work that CUDA already has still finishes; nothing else is issued.
#pragma once

#include <cuda_runtime_api.h>

#include <condition_variable>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "runtime/device/cuda/cuda_stream.h"
#include "runtime/device/device.h"

namespace slidedp {

struct CudaDeviceOptions {
  int rank = 0;
  int ordinal = 0;            // the GPU, as CUDA numbers those visible to this process
  int64_t memory_budget = 0;  // bytes; 0 = what the GPU has free now
  bool shared = false;        // other ranks of this process use the same GPU: streams have workers
};

class CudaDevice final : public Device {
 public:
  // Makes the GPU's context. Throws Error.
  explicit CudaDevice(const CudaDeviceOptions& options);
  // As abort(); waits for what CUDA has.
  ~CudaDevice() override;

  int rank() const override { return options_.rank; }
  int ordinal() const { return options_.ordinal; }
  // The stream behind every create_stream("compute").
  cudaStream_t compute_stream() const { return compute_->handle(); }

  DeviceMemory allocate(int64_t bytes, const std::string& what) override;
  // One cudaMalloc, which rounds up to 2 MiB, instead of one for each; where it fails, the allocations say why.
  void reserve(std::span<const int64_t> sizes) override;
  MemoryUse memory() const override;
  int64_t used_by_all() const override;

  std::unique_ptr<Stream> create_stream(const std::string& name) override;
  std::unique_ptr<Event> create_event() override;
  void record(Stream&, Event&) override;
  void wait(Stream&, Event&) override;
  double timestamp(const Event&) const override;

  void copy_to_device(Stream&, void* device, const void* host, int64_t bytes) override;
  void copy_to_host(Stream&, void* host, const void* device, int64_t bytes) override;
  void copy_rows_to_device(Stream&, void* device, const void* host_base, const int32_t* rows, int64_t count,
                           int64_t row_bytes) override;
  void launch(Stream&, std::function<void()> work) override;
  void notify(Stream&, std::function<void()> done) override;
  void synchronize(Stream&) override;
  void begin_task(Stream&, const std::string& name) override;
  void end_task(Stream&) override;

  void register_host(void* data, int64_t bytes) override;
  void unregister_host(void* data) override;

  void set_error_handler(std::function<void(std::exception_ptr)> handler) override;
  void abort() override;
  bool aborted() const { return failure_->aborted(); }
  // Reports a failure that something outside the device found, e.g. a communicator, and aborts. Thread-safe.
  void fail(std::exception_ptr error) { failure_->fail(std::move(error)); }

 private:
  void release(void* data, int64_t bytes) override;
  void* take(int64_t bytes, const std::string& what);
  void* take_from_reserve(int64_t bytes);  // nullptr: does not fit
  void drop_reserve();                     // requires memory_mutex_
  void activate() const;                   // makes the GPU the calling thread's
  CudaStream& own(Stream& stream) const;
  std::shared_ptr<StreamCore> make_core(const std::string& name);
  std::vector<std::shared_ptr<StreamCore>> cores() const;

  template <typename Operation>
  void issue(CudaStream& stream, Operation operation);
  template <typename Operation>
  void run(const std::shared_ptr<const std::string>& task, Operation& operation);
  void fail_call(const std::shared_ptr<const std::string>& task, std::exception_ptr error);
  std::exception_ptr asynchronous_failure(cudaError_t status) const;
  cudaError_t state() const;  // a failure of the context, or success
  void watch();
  void look_after(StreamCore& core);
  void report_callbacks(StreamCore& core);

  const CudaDeviceOptions options_;
  const std::shared_ptr<DeviceFailure> failure_;
  std::unique_ptr<CudaClock> clock_;
  std::shared_ptr<StreamCore> compute_;
  mutable std::mutex cores_mutex_;
  mutable std::vector<std::weak_ptr<StreamCore>> cores_;
  mutable std::mutex memory_mutex_;
  MemoryUse memory_;
  // The reserved piece: [reserve_, + reserve_bytes_), the first reserve_used_ bytes handed out to reserve_live_ owners.
  char* reserve_ = nullptr;
  int64_t reserve_bytes_ = 0, reserve_used_ = 0, reserve_live_ = 0;
  std::mutex reporting_mutex_;
  std::mutex watch_mutex_;
  std::condition_variable watch_wake_;
  bool closing_ = false;
  std::thread watch_;  // last: starts when the rest is ready
};

// The stream whose launch() runs on the calling thread (a cudaStream_t), or null.
cudaStream_t current_cuda_stream();

}  // namespace slidedp
