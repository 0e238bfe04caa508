#include "runtime/device/cpu/cpu_event.h"

#include <algorithm>

#include "runtime/device/clock.h"

namespace slidedp {

void Record::resolve(Outcome outcome) {
  const double now = process_seconds();
  std::lock_guard lock(mutex_);
  seconds_ = now;
  outcome_ = outcome;
  // Notified under the lock: a waiter that sees the outcome may drop the last reference to this record.
  changed_.notify_all();
}

Record::Outcome Record::outcome() const {
  std::lock_guard lock(mutex_);
  return outcome_;
}

void Record::wait_resolved() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return outcome_ != Outcome::pending; });
}

double Record::seconds() const {
  std::lock_guard lock(mutex_);
  return seconds_;
}

// While it lives, cancel() wakes the waiter of this record.
class Cancellation::Registration {
 public:
  Registration(Cancellation& owner, Record* record) : owner_(owner), record_(record) {
    std::lock_guard lock(owner_.mutex_);
    owner_.blocked_.push_back(record_);
  }
  ~Registration() {
    std::lock_guard lock(owner_.mutex_);
    owner_.blocked_.erase(std::find(owner_.blocked_.begin(), owner_.blocked_.end(), record_));
  }

 private:
  Cancellation& owner_;
  Record* record_;
};

void Cancellation::cancel() {
  cancelled_.store(true, std::memory_order_release);
  // A waiter that registers after this lock sees the flag; one that registered before is woken below.
  std::lock_guard lock(mutex_);
  for (Record* record : blocked_) {
    std::lock_guard record_lock(record->mutex_);
    record->changed_.notify_all();
  }
}

Record::Outcome Cancellation::wait(Record& record) {
  if (const auto outcome = record.outcome(); outcome != Record::Outcome::pending) return outcome;
  Registration registration(*this, &record);
  std::unique_lock lock(record.mutex_);
  record.changed_.wait(lock, [&] { return record.outcome_ != Record::Outcome::pending || cancelled(); });
  return record.outcome_;
}

bool CpuEvent::complete() const {
  const auto record = last();
  return record == nullptr || record->outcome() == Record::Outcome::done;
}

void CpuEvent::synchronize() {
  if (const auto record = last()) record->recorder().wait(*record);
}

void CpuEvent::set_last(std::shared_ptr<Record> record) {
  std::lock_guard lock(mutex_);
  last_ = std::move(record);
}

std::shared_ptr<Record> CpuEvent::last() const {
  std::lock_guard lock(mutex_);
  return last_;
}

}  // namespace slidedp
