#include "runtime/host/update_pool.h"

#include <stdexcept>
#include <tuple>
#include <utility>

namespace slidedp {

bool UpdatePool::Item::operator<(const Item& other) const {
  return std::tie(step, need, order) > std::tie(other.step, other.need, other.order);
}

UpdatePool::UpdatePool(int workers, std::function<void(std::exception_ptr)> on_error) : on_error_(std::move(on_error)) {
  if (workers < 1) throw std::logic_error("UpdatePool: at least one worker is needed");
  threads_.reserve(static_cast<size_t>(workers));
  try {
    for (int worker = 0; worker < workers; ++worker) threads_.emplace_back([this, worker] { work(worker); });
  } catch (...) {  // no thread left: stop those that run, or their destructors would end the program
    {
      std::lock_guard lock(mutex_);
      stop_ = true;
    }
    wake_.notify_all();
    for (std::thread& thread : threads_) thread.join();
    throw;
  }
}

UpdatePool::~UpdatePool() {
  abort();
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
  }
  wake_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void UpdatePool::submit(int64_t step, int32_t need, std::function<void(int worker)> task) {
  {
    std::lock_guard lock(mutex_);
    if (aborted_) return;
    queue_.push({step, need, submitted_++, std::move(task)});
  }
  wake_.notify_one();
}

void UpdatePool::abort() {
  std::priority_queue<Item> dropped;  // destroyed after the lock: a task's captures may do anything
  std::lock_guard lock(mutex_);
  aborted_ = true;
  dropped.swap(queue_);
}

void UpdatePool::work(int worker) {
  for (;;) {
    std::function<void(int)> task;
    {
      std::unique_lock lock(mutex_);
      wake_.wait(lock, [this] { return stop_ || !queue_.empty(); });
      if (stop_) return;
      // top() is const; moving the task out leaves the keys, which pop() compares, as they are.
      task = std::move(const_cast<Item&>(queue_.top()).task);
      queue_.pop();
    }
    try {
      task(worker);
    } catch (...) {
      bool first = false;
      {
        std::lock_guard lock(mutex_);
        first = !failed_;
        failed_ = true;
      }
      if (first) {
        abort();
        on_error_(std::current_exception());
      }
    }
  }
}

}  // namespace slidedp
