#include "runtime/host/update_pool.h"

#include <pthread.h>
#include <sched.h>

#include <stdexcept>
#include <tuple>
#include <utility>

namespace slidedp {

bool UpdatePool::Item::operator<(const Item& other) const {
  return std::tie(step, need, order) > std::tie(other.step, other.need, other.order);
}

UpdatePool::UpdatePool(int workers, std::function<void(std::exception_ptr)> on_error, const std::vector<int>& cores,
                       UpdateOrder order)
    : order_(order), on_error_(std::move(on_error)) {
  if (workers < 1) throw std::logic_error("UpdatePool: at least one worker is needed");
  if (!cores.empty() && cores.size() != static_cast<size_t>(workers)) {
    throw std::logic_error("UpdatePool: a core for each worker, or none");
  }
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
  pin(cores);
}

// A core can be taken from the process at any time; its worker then runs where it may, which is slower and not wrong.
void UpdatePool::pin(const std::vector<int>& cores) {
  for (size_t worker = 0; worker < cores.size(); ++worker) {
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(cores[worker], &set);
    pthread_setaffinity_np(threads_[worker].native_handle(), sizeof(set), &set);
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
    if (order_ == UpdateOrder::arrival) step = need = 0;
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
