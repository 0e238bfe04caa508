#include "runtime/device/cuda/callbacks.h"

#include <utility>

namespace slidedp {

int64_t Callbacks::add(std::function<void()> function) {
  const std::lock_guard lock(mutex_);
  waiting_.emplace(added_, std::move(function));
  return added_++;
}

void Callbacks::call(int64_t number) {
  std::function<void()> function;
  {
    const std::lock_guard lock(mutex_);
    const auto found = waiting_.find(number);
    if (found == waiting_.end()) return;
    function = std::move(found->second);
    waiting_.erase(found);
    ++running_;
  }
  std::exception_ptr thrown;
  try {
    function();
  } catch (...) {
    thrown = std::current_exception();
  }
  const std::lock_guard lock(mutex_);
  if (thrown != nullptr && exception_ == nullptr) exception_ = std::move(thrown);
  if (--running_ == 0) idle_.notify_all();
}

void Callbacks::call_all() {
  for (;;) {
    int64_t number = 0;
    {
      const std::lock_guard lock(mutex_);
      if (waiting_.empty()) return;
      number = waiting_.begin()->first;
    }
    call(number);
  }
}

void Callbacks::wait_until_idle() {
  std::unique_lock lock(mutex_);
  idle_.wait(lock, [this] { return running_ == 0; });
}

std::exception_ptr Callbacks::take_exception() {
  const std::lock_guard lock(mutex_);
  return std::exchange(exception_, nullptr);
}

}  // namespace slidedp
