// The CPU backend's device: the permanent reference. Streams are worker threads, device memory is separate memory under
// a budget, copies are memcpy on the stream's worker.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <string>

#include "runtime/device/device.h"

namespace slidedp {

class DeviceFailure;
class CpuStream;

// Bytes that copies have moved so far.
struct CopiedBytes {
  int64_t to_device = 0;
  int64_t to_host = 0;
};

class CpuDevice final : public Device {
 public:
  // `memory_budget` in bytes; 0 = no limit. Memory is counted as asked for, without alignment.
  explicit CpuDevice(int rank, int64_t memory_budget = 0);
  // Finishes work that runs, skips what is queued (as abort()), joins every stream's worker.
  ~CpuDevice() override;

  int rank() const override;
  DeviceMemory allocate(int64_t bytes, const std::string& what) override;
  MemoryUse memory() const override;

  std::unique_ptr<Stream> create_stream(const std::string& name) override;
  std::unique_ptr<Event> create_event() override;
  void record(Stream&, Event&) override;
  // A wait for a record that will never be reached, because its device failed, aborts this device too, without calling
  // its error handler.
  void wait(Stream&, Event&) override;
  double timestamp(const Event&) const override;

  void copy_to_device(Stream&, void* device, const void* host, int64_t bytes) override;
  void copy_rows_to_device(Stream&, void* device, const void* host_base, const int32_t* rows, int64_t count,
                           int64_t row_bytes) override;
  void copy_to_host(Stream&, void* host, const void* device, int64_t bytes) override;
  void launch(Stream&, std::function<void()> work) override;
  void notify(Stream&, std::function<void()> done) override;
  // Also after an abort this returns only when the work that runs has ended, so that its memory may be freed.
  void synchronize(Stream&) override;

  void register_host(void*, int64_t) override {}
  void unregister_host(void*) override {}

  void set_error_handler(std::function<void(std::exception_ptr)> handler) override;
  void abort() override;

  CopiedBytes copied() const;

 private:
  void release(void* data, int64_t bytes) override;
  CpuStream& own(Stream& stream) const;  // throws std::logic_error for another device's stream
  void copy(Stream&, void* to, const void* from, int64_t bytes, std::atomic<int64_t>& counter);

  const std::shared_ptr<DeviceFailure> failure_;
  mutable std::mutex memory_mutex_;
  MemoryUse memory_;
  std::atomic<int64_t> copied_to_device_ = 0, copied_to_host_ = 0;
};

}  // namespace slidedp
