// What a rank's part of a local collective does with memory. Called inside Device::launch of the rank's stream.
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "model/base/types.h"

namespace slidedp {

class LocalOperations {
 public:
  virtual ~LocalOperations() = default;
  // The point that the stream's work has reached; null where work is done when its call returns.
  virtual std::shared_ptr<void> mark() = 0;
  // What the stream does from here on comes after that point of another stream. Ignores null.
  virtual void follow(const std::shared_ptr<void>& point) = 0;
  virtual void copy(void* to, const void* from, int64_t bytes) = 0;
  // As sum_in_order.
  virtual void sum(std::span<const void* const> sources, void* to, int64_t elements, DType type) = 0;
};

// On memory that the calling thread can use.
std::shared_ptr<LocalOperations> make_host_operations();

}  // namespace slidedp
