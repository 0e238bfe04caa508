// Streams of the CPU backend: one worker thread each, which runs a queue in order and sleeps when it is empty.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "runtime/device/cpu/cpu_event.h"
#include "runtime/device/device.h"

namespace slidedp {

class StreamWorker;

// The failure state that a device shares with its streams. Thread-safe.
class DeviceFailure {
 public:
  explicit DeviceFailure(int rank) : rank_(rank), host_waits_(std::make_shared<Cancellation>()) {}
  int rank() const { return rank_; }
  bool aborted() const { return aborted_.load(std::memory_order_acquire); }
  void abort();  // thread-safe, idempotent
  // Reports `error`, unless the device was aborted before (then this failure is a consequence), and aborts.
  void fail(std::exception_ptr error);

  void set_handler(std::function<void(std::exception_ptr)> handler);
  // Throws the first failure if there was no handler to take it.
  void rethrow_unhandled() const;

  void add(const std::shared_ptr<StreamWorker>& worker);
  std::vector<std::shared_ptr<StreamWorker>> workers() const;  // those that live
  const std::shared_ptr<Cancellation>& host_waits() const { return host_waits_; }

 private:
  const int rank_;
  const std::shared_ptr<Cancellation> host_waits_;
  std::atomic<bool> aborted_ = false;
  std::mutex reporting_;  // held while the handler runs
  mutable std::mutex mutex_;
  std::function<void(std::exception_ptr)> handler_;
  std::exception_ptr unhandled_;
  std::vector<std::weak_ptr<StreamWorker>> workers_;
};

// After an abort, or once closing, the worker skips work and waits, but still resolves records and calls callbacks.
class StreamWorker {
 public:
  StreamWorker(std::shared_ptr<DeviceFailure> device, std::string name);
  ~StreamWorker() { close(); }

  void post_work(std::function<void()> work) { post({Kind::work, std::move(work), nullptr}); }
  void post_notify(std::function<void()> done) { post({Kind::notify, std::move(done), nullptr}); }
  void post_wait(std::shared_ptr<Record> record) { post({Kind::wait, nullptr, std::move(record)}); }
  std::shared_ptr<Record> post_record();

  // Makes the worker give up a wait for an event.
  void cancel_waits() { waits_.cancel(); }
  // Finishes the item that runs, skips what is queued, joins. Idempotent.
  void close();
  const DeviceFailure& device() const { return *device_; }

 private:
  enum class Kind : uint8_t { work, notify, record, wait };
  struct Item {
    Kind kind{};
    std::function<void()> call;
    std::shared_ptr<Record> record;
  };

  void post(Item item);
  void run();
  void execute(Item& item);
  void call(const std::function<void()>& function);
  void wait_for(Record& record);

  const std::shared_ptr<DeviceFailure> device_;
  const std::string name_;
  Cancellation waits_;
  std::mutex mutex_;
  std::condition_variable posted_;
  std::deque<Item> queue_;
  bool closing_ = false;
  std::mutex join_mutex_;
  std::thread thread_;  // last: starts when the rest is ready
};

class CpuStream final : public Stream {
 public:
  explicit CpuStream(std::shared_ptr<StreamWorker> worker) : worker_(std::move(worker)) {}
  // Work that is still queued is skipped: synchronize first to have it done.
  ~CpuStream() override { worker_->close(); }
  StreamWorker& worker() { return *worker_; }

 private:
  std::shared_ptr<StreamWorker> worker_;
};

}  // namespace slidedp
