#include "runtime/device/cpu/cpu_stream.h"

#include <pthread.h>

#include <algorithm>

#include "model/base/error.h"

namespace slidedp {

void DeviceFailure::set_handler(std::function<void(std::exception_ptr)> handler) {
  std::lock_guard reporting(reporting_);  // whoever takes a handler away may destroy what it uses
  std::lock_guard lock(mutex_);
  handler_ = std::move(handler);
}

void DeviceFailure::fail(std::exception_ptr error) {
  // One failure at a time; a second one waits until the first was reported.
  std::lock_guard reporting(reporting_);
  if (aborted()) return;
  std::function<void(std::exception_ptr)> handler;
  {
    std::lock_guard lock(mutex_);
    handler = handler_;
    if (!handler) unhandled_ = error;
  }
  // Before work is skipped: else what was skipped would look done to one who has not heard of the failure.
  if (handler) handler(error);
  abort();
}

void DeviceFailure::abort() {
  {
    std::lock_guard lock(mutex_);
    if (aborted()) return;
    aborted_.store(true, std::memory_order_release);
  }
  host_waits_->cancel();
  for (const auto& worker : workers()) worker->cancel_waits();
}

void DeviceFailure::rethrow_unhandled() const {
  std::exception_ptr error;
  {
    std::lock_guard lock(mutex_);
    error = unhandled_;
  }
  if (error) std::rethrow_exception(error);
}

void DeviceFailure::add(const std::shared_ptr<StreamWorker>& worker) {
  std::lock_guard lock(mutex_);
  std::erase_if(workers_, [](const auto& other) { return other.expired(); });
  workers_.push_back(worker);
}

std::vector<std::shared_ptr<StreamWorker>> DeviceFailure::workers() const {
  std::vector<std::shared_ptr<StreamWorker>> alive;
  std::lock_guard lock(mutex_);
  for (const auto& worker : workers_) {
    if (auto strong = worker.lock()) alive.push_back(std::move(strong));
  }
  return alive;
}

StreamWorker::StreamWorker(std::shared_ptr<DeviceFailure> device, std::string name)
    : device_(std::move(device)), name_(std::move(name)), thread_([this] { run(); }) {}

std::shared_ptr<Record> StreamWorker::post_record() {
  auto record = std::make_shared<Record>(device_->host_waits());
  post({Kind::record, nullptr, record});
  return record;
}

void StreamWorker::post(Item item) {
  {
    std::lock_guard lock(mutex_);
    queue_.push_back(std::move(item));
  }
  posted_.notify_one();
}

void StreamWorker::close() {
  {
    std::lock_guard lock(mutex_);
    closing_ = true;
  }
  posted_.notify_one();
  waits_.cancel();
  std::lock_guard lock(join_mutex_);
  if (thread_.joinable()) thread_.join();
}

void StreamWorker::run() {
  // Shown by debuggers and profilers; the kernel keeps 15 characters.
  pthread_setname_np(pthread_self(), (std::to_string(device_->rank()) + ":" + name_).substr(0, 15).c_str());
  while (true) {
    Item item;
    {
      std::unique_lock lock(mutex_);
      posted_.wait(lock, [this] { return closing_ || !queue_.empty(); });
      if (queue_.empty()) return;
      item = std::move(queue_.front());
      queue_.pop_front();
    }
    execute(item);
  }
}

void StreamWorker::execute(Item& item) {
  const bool skip = device_->aborted() || waits_.cancelled();
  switch (item.kind) {
    case Kind::work:
      if (!skip) call(item.call);
      break;
    case Kind::notify:
      call(item.call);
      break;
    case Kind::record:
      item.record->resolve(!skip                ? Record::Outcome::done
                           : device_->aborted() ? Record::Outcome::skipped
                                                : Record::Outcome::abandoned);
      break;
    case Kind::wait:
      if (!skip) wait_for(*item.record);
      break;
  }
}

void StreamWorker::call(const std::function<void()>& function) {
  try {
    function();
  } catch (...) {
    device_->fail(std::current_exception());
  }
}

// What comes after the wait relies on the work before the record. If that work will never be done, this device must
// not go on either; the device that failed has reported why.
void StreamWorker::wait_for(Record& record) {
  switch (waits_.wait(record)) {
    case Record::Outcome::done:
    case Record::Outcome::pending:
      break;
    case Record::Outcome::skipped:
      device_->abort();
      break;
    case Record::Outcome::abandoned:
      device_->fail(std::make_exception_ptr(
          Error("rank " + std::to_string(device_->rank()) + ", stream " + name_ +
                ": waits for an event of a stream that was destroyed before it got there; synchronize first.")));
      break;
  }
}

}  // namespace slidedp
