// The host's pool of workers for update, norm and host_accumulate tasks: takes the task whose result is needed first.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <mutex>
#include <queue>
#include <thread>
#include <vector>

namespace slidedp {

// need: the task whose result is needed first. arrival: first come, first served; only there to be compared with.
enum class UpdateOrder { need, arrival };

class UpdatePool {
 public:
  // `on_error` is called once, on a worker, with the first exception of a task; after it queued tasks are dropped.
  // Worker i is tied to core cores[i] (see worker_cores); with no `cores`, to none. Idle workers sleep.
  UpdatePool(int workers, std::function<void(std::exception_ptr)> on_error, const std::vector<int>& cores = {},
             UpdateOrder order = UpdateOrder::need);
  ~UpdatePool();  // stops: drops queued tasks, waits for running ones
  UpdatePool(const UpdatePool&) = delete;
  UpdatePool& operator=(const UpdatePool&) = delete;

  // Smaller (step, need) runs first; equal keys, and all with UpdateOrder::arrival, in order of submission.
  // Thread-safe. Dropped after abort(). The task gets the index of its worker.
  void submit(int64_t step, int32_t need, std::function<void(int worker)> task);
  void abort();  // drops what is queued and what comes; thread-safe
  int workers() const { return static_cast<int>(threads_.size()); }

 private:
  struct Item {
    int64_t step;
    int32_t need;
    int64_t order;
    std::function<void(int)> task;
    bool operator<(const Item& other) const;  // reversed: the queue's top is the smallest
  };
  void work(int worker);
  void pin(const std::vector<int>& cores);

  std::mutex mutex_;
  std::condition_variable wake_;
  std::priority_queue<Item> queue_;
  int64_t submitted_ = 0;
  const UpdateOrder order_;
  bool stop_ = false, aborted_ = false, failed_ = false;
  std::function<void(std::exception_ptr)> on_error_;
  std::vector<std::thread> threads_;
};

}  // namespace slidedp
