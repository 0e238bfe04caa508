// The host's pool of workers for update, norm and host_accumulate tasks: takes the task whose result is needed first,
// of those whose memory is on the worker's node before others.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <mutex>
#include <queue>
#include <thread>
#include <vector>

#include "runtime/host/worker_cores.h"

namespace slidedp {

// need: the task whose result is needed first. arrival: first come, first served; only there to be compared with.
enum class UpdateOrder { need, arrival };

class UpdatePool {
 public:
  // `on_error` is called once, on a worker, with the first exception of a task; after it queued tasks are dropped.
  // Worker i is tied to places[i].core and belongs to that node; with no `places`, to no core and to node 0. Idle
  // workers sleep.
  UpdatePool(int workers, std::function<void(std::exception_ptr)> on_error, std::vector<WorkerPlace> places = {},
             UpdateOrder order = UpdateOrder::need);
  ~UpdatePool();  // stops: drops queued tasks, waits for running ones
  UpdatePool(const UpdatePool&) = delete;
  UpdatePool& operator=(const UpdatePool&) = delete;

  // Of one node's tasks the one with smaller (step, need) runs first; equal keys, and all with UpdateOrder::arrival, in
  // order of submission. A worker takes another node's task when its own has none. `node`: of the task's memory; a node
  // without workers counts as the first. Thread-safe. Dropped after abort(). The task gets the index of its worker.
  void submit(int64_t step, int32_t need, std::function<void(int worker)> task, int node = 0);
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
  // What is queued for a memory node, and its workers.
  struct Node {
    std::priority_queue<Item> queue;
    std::condition_variable wake;
    int idle = 0;
  };
  void work(int worker);
  void wake_all();
  Node* next_node(size_t own);  // whose task a worker of node `own` takes; nullptr if none is queued

  std::mutex mutex_;
  const std::vector<WorkerPlace> places_;
  std::vector<Node> nodes_;
  int64_t submitted_ = 0;
  const UpdateOrder order_;
  bool stop_ = false, aborted_ = false, failed_ = false;
  std::function<void(std::exception_ptr)> on_error_;
  std::vector<std::thread> threads_;
};

}  // namespace slidedp
