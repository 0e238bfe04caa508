#include "runtime/comm/local/local_operations.h"

#include <cstring>

#include "runtime/comm/local/reduce.h"

namespace slidedp {
namespace {

class HostOperations final : public LocalOperations {
 public:
  std::shared_ptr<void> mark() override { return nullptr; }
  void follow(const std::shared_ptr<void>&) override {}
  void copy(void* to, const void* from, int64_t bytes) override { std::memcpy(to, from, static_cast<size_t>(bytes)); }
  void sum(std::span<const void* const> sources, void* to, int64_t elements, DType type) override {
    sum_in_order(sources, to, elements, type);
  }
};

}  // namespace

std::shared_ptr<LocalOperations> make_host_operations() { return std::make_shared<HostOperations>(); }

}  // namespace slidedp
