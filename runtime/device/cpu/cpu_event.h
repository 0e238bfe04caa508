// Events of the CPU backend. Each Device::record() makes a Record; a wait holds the Record that was the last one when
// the wait was issued, so a later record() of the same event does not disturb it.
#pragma once

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <vector>

#include "runtime/device/device.h"

namespace slidedp {

class Cancellation;

// One execution of a record(). Thread-safe.
class Record {
 public:
  enum class Outcome : uint8_t {
    pending,
    done,
    skipped,   // the device failed or was aborted before this point was reached
    abandoned  // the stream was destroyed before this point was reached
  };

  // `recorder`: releases host threads that wait for this record when the recording device fails.
  explicit Record(std::shared_ptr<Cancellation> recorder) : recorder_(std::move(recorder)) {}

  // Called once, by the stream's worker.
  void resolve(Outcome outcome);
  Outcome outcome() const;
  // Blocks until resolved, whatever happens to the device: a stream's worker resolves every record in its queue.
  void wait_resolved();
  double seconds() const;  // when resolved, since the process's origin
  Cancellation& recorder() const { return *recorder_; }

 private:
  friend class Cancellation;
  const std::shared_ptr<Cancellation> recorder_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  Outcome outcome_ = Outcome::pending;
  double seconds_ = 0;
};

// Lets a group of waiters give up together: the worker of one stream, or the host threads that wait for one device.
class Cancellation {
 public:
  bool cancelled() const { return cancelled_.load(std::memory_order_acquire); }
  // Wakes every waiter; later waits return at once. Thread-safe, idempotent.
  void cancel();
  // Blocks until the record is resolved or this is cancelled; `pending` means cancelled.
  Record::Outcome wait(Record& record);

 private:
  class Registration;
  std::atomic<bool> cancelled_ = false;
  std::mutex mutex_;
  std::vector<Record*> blocked_;  // what waiters wait for at this moment; they keep it alive
};

class CpuEvent final : public Event {
 public:
  bool complete() const override;
  void synchronize() override;

  void set_last(std::shared_ptr<Record> record);
  std::shared_ptr<Record> last() const;  // nullptr: never recorded

 private:
  mutable std::mutex mutex_;
  std::shared_ptr<Record> last_;
};

}  // namespace slidedp
