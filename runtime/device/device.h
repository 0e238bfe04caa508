// One rank's accelerator: memory, streams, events, copies. Implemented by every backend (cpu/, cuda/); nothing above
// this interface knows which one runs.
//
// Threads: a Device is driven by its rank's issuing thread; record/wait of an Event may cross devices of one process.
// Asynchronous work runs in stream order. The first failure of asynchronous work goes to the error handler; after that
// the device's streams skip all work (waits return at once), so that nobody hangs.
#pragma once

#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <span>
#include <string>

namespace slidedp {

class Stream {
 public:
  virtual ~Stream() = default;
};

// Marks a point of a stream. Reusable: a wait refers to the last record() issued before it; an event never recorded is
// complete. (CUDA's semantics.)
class Event {
 public:
  virtual ~Event() = default;
  virtual bool complete() const = 0;
  // Blocks the calling thread until the last record is complete or the device has failed.
  virtual void synchronize() = 0;
};

class Device;

// Move-only owner of device memory; returns it to the device on destruction. The device must outlive it.
class DeviceMemory {
 public:
  DeviceMemory() = default;
  DeviceMemory(Device* device, void* data, int64_t bytes) : device_(device), data_(data), bytes_(bytes) {}
  DeviceMemory(DeviceMemory&& other) noexcept { swap(other); }
  DeviceMemory& operator=(DeviceMemory&& other) noexcept {
    DeviceMemory(std::move(other)).swap(*this);
    return *this;
  }
  ~DeviceMemory();
  void* data() const { return data_; }
  int64_t bytes() const { return bytes_; }

 private:
  void swap(DeviceMemory& other) noexcept {
    std::swap(device_, other.device_);
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
  }
  Device* device_ = nullptr;
  void* data_ = nullptr;
  int64_t bytes_ = 0;
};

struct MemoryUse {
  int64_t budget = 0;
  int64_t in_use = 0;
  int64_t peak = 0;
};

class Device {
 public:
  virtual ~Device() = default;
  virtual int rank() const = 0;

  // Zeroed, aligned to 256 bytes. Throws Error that names `what`, the bytes wanted, the budget and what is in use.
  virtual DeviceMemory allocate(int64_t bytes, const std::string& what) = 0;
  // The allocations that follow, of these sizes, come out of one piece where the system would round each of them up.
  // Counts nothing and refuses nothing; the piece lasts until all of them are gone, and only then another is made.
  virtual void reserve(std::span<const int64_t> /*sizes*/) {}
  virtual MemoryUse memory() const = 0;
  // Bytes in use on the whole device, whoever uses them and for what; 0 = the backend cannot tell.
  virtual int64_t used_by_all() const { return 0; }

  virtual std::unique_ptr<Stream> create_stream(const std::string& name) = 0;
  virtual std::unique_ptr<Event> create_event() = 0;
  virtual void record(Stream&, Event&) = 0;
  virtual void wait(Stream&, Event&) = 0;
  // Seconds since this process's common origin at which the last record completed; requires event.complete().
  virtual double timestamp(const Event&) const = 0;

  // Host memory should be registered (CUDA: pinned); pointers stay the caller's and live until the copy is done.
  virtual void copy_to_device(Stream&, void* device, const void* host, int64_t bytes) = 0;
  // Row i of `device` becomes row rows[i] of `host_base`, for i < count; rows of `row_bytes` lie back to back. All host
  // memory, the list too, should be registered: a device may read it by itself.
  virtual void copy_rows_to_device(Stream&, void* device, const void* host_base, const int32_t* rows, int64_t count,
                                   int64_t row_bytes) = 0;
  virtual void copy_to_host(Stream&, void* host, const void* device, int64_t bytes) = 0;
  // Runs `work` in stream order. CPU: on the stream's worker. CUDA: at once on the calling thread (on a worker if ranks
  // share the GPU), where it launches kernels onto the stream. Exceptions go to the error handler.
  virtual void launch(Stream&, std::function<void()> work) = 0;
  // Calls `done` on some host thread once all earlier work of the stream is complete. `done` must be short, must not
  // call the device, and is also called after a failure (with the work skipped).
  virtual void notify(Stream&, std::function<void()> done) = 0;
  virtual void synchronize(Stream&) = 0;

  // Between the two, what is issued on the stream belongs to the task of that name: for error messages and profilers.
  virtual void begin_task(Stream&, const std::string& /*name*/) {}
  virtual void end_task(Stream&) {}

  // Makes host memory fast to copy, for every device of this process.
  virtual void register_host(void* data, int64_t bytes) = 0;
  virtual void unregister_host(void* data) = 0;

  // Called at most once, with the first failure (none after an abort()). Set before any work is issued. Without a
  // handler, synchronize() throws the failure.
  virtual void set_error_handler(std::function<void(std::exception_ptr)> handler) = 0;
  // Makes the device skip all further work and wakes every waiter. Thread-safe, idempotent.
  virtual void abort() = 0;

 private:
  friend class DeviceMemory;
  virtual void release(void* data, int64_t bytes) = 0;
};

inline DeviceMemory::~DeviceMemory() {
  if (data_ != nullptr) device_->release(data_, bytes_);
}

}  // namespace slidedp
