// Which task a stream works on, readable also after the GPU has failed.
//
// CUDA does not say which kernel an asynchronous error came from, and after one no event can be asked any more. So the
// stream itself writes the number of each finished task into host memory.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>

namespace slidedp {

class TaskTrail {
 public:
  // On the calling thread's current device. Where the driver lacks the operation, under_way() stays empty.
  explicit TaskTrail(cudaStream_t stream);
  ~TaskTrail();
  TaskTrail(const TaskTrail&) = delete;
  TaskTrail& operator=(const TaskTrail&) = delete;

  // Called in the order of the tasks. Returns the task's number.
  uint32_t begin(std::shared_ptr<const std::string> name);
  // Enqueues the note that the task is done. Called in stream order.
  void end(uint32_t number);
  // The first task that was begun and is not done; empty if there is none or it is not known. Thread-safe.
  std::string under_way() const;

 private:
  struct Task {
    uint32_t number;
    std::shared_ptr<const std::string> name;
  };
  bool is_done(uint32_t number) const;

  const cudaStream_t stream_;
  uint32_t* done_ = nullptr;  // pinned; written by the GPU
  void* done_on_device_ = nullptr;
  mutable std::mutex mutex_;
  std::deque<Task> tasks_;
  uint32_t begun_ = 0;
};

}  // namespace slidedp
