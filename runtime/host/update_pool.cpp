#include "runtime/host/update_pool.h"

#include <algorithm>
#include <stdexcept>
#include <tuple>
#include <utility>

namespace slidedp {

bool UpdatePool::Item::operator<(const Item& other) const {
  return std::tie(step, need, order) > std::tie(other.step, other.need, other.order);
}

namespace {

size_t count_nodes(const std::vector<WorkerPlace>& places) {
  size_t nodes = 1;
  for (const WorkerPlace& place : places) nodes = std::max(nodes, static_cast<size_t>(place.node) + 1);
  return nodes;
}

}  // namespace

UpdatePool::UpdatePool(int workers, std::function<void(std::exception_ptr)> on_error, std::vector<WorkerPlace> places,
                       UpdateOrder order)
    : places_(std::move(places)), nodes_(count_nodes(places_)), order_(order), on_error_(std::move(on_error)) {
  if (workers < 1) throw std::logic_error("UpdatePool: at least one worker is needed");
  if (!places_.empty() && places_.size() != static_cast<size_t>(workers)) {
    throw std::logic_error("UpdatePool: a place for each worker, or none");
  }
  threads_.reserve(static_cast<size_t>(workers));
  try {
    for (int worker = 0; worker < workers; ++worker) threads_.emplace_back([this, worker] { work(worker); });
  } catch (...) {  // no thread left: stop those that run, or their destructors would end the program
    {
      std::lock_guard lock(mutex_);
      stop_ = true;
    }
    wake_all();
    for (std::thread& thread : threads_) thread.join();
    throw;
  }
}

void UpdatePool::wake_all() {
  for (Node& node : nodes_) node.wake.notify_all();
}

UpdatePool::~UpdatePool() {
  abort();
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
  }
  wake_all();
  for (std::thread& thread : threads_) thread.join();
}

void UpdatePool::submit(int64_t step, int32_t need, std::function<void(int worker)> task, int node) {
  const std::lock_guard lock(mutex_);
  if (aborted_) return;
  if (order_ == UpdateOrder::arrival) step = need = 0;
  Node& home = nodes_[static_cast<size_t>(node) < nodes_.size() ? static_cast<size_t>(node) : 0];
  home.queue.push({step, need, submitted_++, std::move(task)});
  if (home.idle > 0) return home.wake.notify_one();
  const auto other =
      std::find_if(nodes_.begin(), nodes_.end(), [](const Node& candidate) { return candidate.idle > 0; });
  if (other != nodes_.end()) other->wake.notify_one();
}

void UpdatePool::abort() {
  std::vector<std::priority_queue<Item>> dropped(nodes_.size());  // destroyed after the lock: captures may do anything
  const std::lock_guard lock(mutex_);
  aborted_ = true;
  for (size_t node = 0; node < nodes_.size(); ++node) dropped[node].swap(nodes_[node].queue);
}

UpdatePool::Node* UpdatePool::next_node(size_t own) {
  if (!nodes_[own].queue.empty()) return &nodes_[own];
  Node* best = nullptr;
  for (Node& node : nodes_) {
    if (!node.queue.empty() && (best == nullptr || best->queue.top() < node.queue.top())) best = &node;
  }
  return best;
}

void UpdatePool::work(int worker) {
  const WorkerPlace place = places_.empty() ? WorkerPlace{} : places_[static_cast<size_t>(worker)];
  // A core can be taken from the process at any time; its worker then runs where it may, slower and not wrong.
  if (!places_.empty()) run_on_cores({place.core});
  const auto own = static_cast<size_t>(place.node);
  for (;;) {
    std::function<void(int)> task;
    {
      std::unique_lock lock(mutex_);
      Node* from = next_node(own);
      while (!stop_ && from == nullptr) {
        ++nodes_[own].idle;
        nodes_[own].wake.wait(lock);
        --nodes_[own].idle;
        from = next_node(own);
      }
      if (stop_) return;
      // top() is const; moving the task out leaves the keys, which pop() compares, as they are.
      task = std::move(const_cast<Item&>(from->queue.top()).task);
      from->queue.pop();
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
