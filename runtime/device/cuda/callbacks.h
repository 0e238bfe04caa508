// Functions that a stream owes its caller: each is called exactly once, also when the GPU stops working.
//
// CUDA calls a host function when the stream gets there, but never once the context has failed; then whoever finds
// that out calls the ones that are left.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <map>
#include <mutex>

namespace slidedp {

class Callbacks {
 public:
  int64_t add(std::function<void()> function);  // its number
  // Calls a function unless it has been called. What it throws waits in take_exception(): a thread of the driver must
  // not run an error handler, which calls CUDA.
  void call(int64_t number);
  void call_all();  // in order of add()
  // Blocks until no function runs. Not from within one.
  void wait_until_idle();
  std::exception_ptr take_exception();

 private:
  std::mutex mutex_;
  std::condition_variable idle_;
  std::map<int64_t, std::function<void()>> waiting_;
  int64_t added_ = 0;
  int running_ = 0;
  std::exception_ptr exception_;
};

}  // namespace slidedp
