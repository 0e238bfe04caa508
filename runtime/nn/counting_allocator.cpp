#include "runtime/nn/counting_allocator.h"

#include <c10/core/CPUAllocator.h>

#include <atomic>
#include <memory>
#include <utility>

namespace slidedp {
namespace {

std::atomic<int64_t> in_use{0};
std::atomic<int64_t> peak{0};

void count(int64_t bytes) {
  const int64_t now = in_use.fetch_add(bytes) + bytes;
  int64_t seen = peak.load();
  while (seen < now && !peak.compare_exchange_weak(seen, now)) {
  }
}

// Owns the wrapped allocator's memory; its destruction returns it.
struct Counted {
  c10::DataPtr memory;
  int64_t bytes;
};

void release(void* context) {
  std::unique_ptr<Counted> counted(static_cast<Counted*>(context));
  in_use.fetch_sub(counted->bytes);
}

class CountingAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    auto counted =
        std::make_unique<Counted>(Counted{c10::GetDefaultCPUAllocator()->allocate(bytes), static_cast<int64_t>(bytes)});
    void* data = counted->memory.get();
    count(counted->bytes);
    return {data, counted.release(), &release, c10::Device(c10::DeviceType::CPU)};
  }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
};

}  // namespace

void install_counting_allocator() {
  // Lives as long as the process: tensors may outlive every object of ours.
  static const bool installed = [] {
    c10::SetCPUAllocator(new CountingAllocator, /*priority=*/100);
    return true;
  }();
  static_cast<void>(installed);
}

AllocatorUse counted_memory() { return {in_use.load(), peak.load()}; }

void reset_counted_peak() { peak.store(in_use.load()); }

}  // namespace slidedp
