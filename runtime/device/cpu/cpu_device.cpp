#include "runtime/device/cpu/cpu_device.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <stdexcept>

#include "model/base/format.h"
#include "model/base/types.h"
#include "runtime/device/cpu/cpu_event.h"
#include "runtime/device/cpu/cpu_stream.h"

namespace slidedp {
namespace {

constexpr int64_t kAlignment = 256;

CpuEvent& cpu_event(Event& event) {
  auto* cpu = dynamic_cast<CpuEvent*>(&event);
  if (cpu == nullptr) throw std::logic_error("an event of another backend was given to a CPU device");
  return *cpu;
}

}  // namespace

CpuDevice::CpuDevice(int rank, int64_t memory_budget) : failure_(std::make_shared<DeviceFailure>(rank)) {
  if (memory_budget < 0) throw std::logic_error("negative memory budget");
  memory_.budget = memory_budget;
}

CpuDevice::~CpuDevice() {
  failure_->abort();
  // Streams that outlive the device have no worker left that could touch it.
  for (const auto& worker : failure_->workers()) worker->close();
}

int CpuDevice::rank() const { return failure_->rank(); }

DeviceMemory CpuDevice::allocate(int64_t bytes, const std::string& what) {
  if (bytes < 0) throw std::logic_error("negative size for " + what);
  {
    std::lock_guard lock(memory_mutex_);
    if (memory_.budget > 0 && bytes > memory_.budget - memory_.in_use) {
      failf(
          "Rank {}: no device memory for {}: {} ({} bytes) wanted, {} of the budget of {} are in use. Use a plan made "
          "for this budget, or raise the budget.",
          rank(), what, format_bytes(bytes), bytes, format_bytes(memory_.in_use), format_bytes(memory_.budget));
    }
    memory_.in_use += bytes;
  }
  const auto size = static_cast<size_t>(round_up(std::max<int64_t>(bytes, 1), kAlignment));
  void* data = std::aligned_alloc(kAlignment, size);
  if (data == nullptr) {
    std::lock_guard lock(memory_mutex_);
    memory_.in_use -= bytes;
    failf("Rank {}: the host has no memory left for {} ({} of a CPU rank's device memory wanted, {} in use).", rank(),
          what, format_bytes(bytes), format_bytes(memory_.in_use));
  }
  std::memset(data, 0, size);
  std::lock_guard lock(memory_mutex_);
  memory_.peak = std::max(memory_.peak, memory_.in_use);
  return DeviceMemory(this, data, bytes);
}

void CpuDevice::release(void* data, int64_t bytes) {
  std::free(data);
  std::lock_guard lock(memory_mutex_);
  memory_.in_use -= bytes;
}

MemoryUse CpuDevice::memory() const {
  std::lock_guard lock(memory_mutex_);
  return memory_;
}

std::unique_ptr<Stream> CpuDevice::create_stream(const std::string& name) {
  auto worker = std::make_shared<StreamWorker>(failure_, name);
  failure_->add(worker);
  return std::make_unique<CpuStream>(std::move(worker));
}

std::unique_ptr<Event> CpuDevice::create_event() { return std::make_unique<CpuEvent>(); }

CpuStream& CpuDevice::own(Stream& stream) const {
  auto* cpu = dynamic_cast<CpuStream*>(&stream);
  if (cpu == nullptr || &cpu->worker().device() != failure_.get()) {
    throw std::logic_error("rank " + std::to_string(rank()) + ": a stream of another device was given");
  }
  return *cpu;
}

void CpuDevice::record(Stream& stream, Event& event) {
  auto& target = cpu_event(event);
  target.set_last(own(stream).worker().post_record());
}

void CpuDevice::wait(Stream& stream, Event& event) {
  auto& worker = own(stream).worker();
  if (auto record = cpu_event(event).last()) worker.post_wait(std::move(record));
}

double CpuDevice::timestamp(const Event& event) const {
  const auto* cpu = dynamic_cast<const CpuEvent*>(&event);
  const auto record = cpu == nullptr ? nullptr : cpu->last();
  if (record == nullptr || record->outcome() != Record::Outcome::done) {
    throw std::logic_error("timestamp of an event that was not recorded or is not complete");
  }
  return record->seconds();
}

void CpuDevice::copy(Stream& stream, void* to, const void* from, int64_t bytes, std::atomic<int64_t>& counter) {
  if (bytes < 0) throw std::logic_error("negative copy size");
  own(stream).worker().post_work([to, from, bytes, &counter] {
    if (bytes > 0) std::memcpy(to, from, static_cast<size_t>(bytes));
    counter.fetch_add(bytes, std::memory_order_relaxed);
  });
}

void CpuDevice::copy_to_device(Stream& stream, void* device, const void* host, int64_t bytes) {
  copy(stream, device, host, bytes, copied_to_device_);
}

void CpuDevice::copy_rows_to_device(Stream& stream, void* device, const void* host_base, const int32_t* rows,
                                    int64_t count, int64_t row_bytes) {
  if (count < 0 || row_bytes < 0) throw std::logic_error("negative copy size");
  own(stream).worker().post_work([=, this] {
    auto* to = static_cast<std::byte*>(device);
    for (int64_t i = 0; i < count; ++i) {
      std::memcpy(to + i * row_bytes, static_cast<const std::byte*>(host_base) + rows[i] * row_bytes,
                  static_cast<size_t>(row_bytes));
    }
    copied_to_device_.fetch_add(count * row_bytes, std::memory_order_relaxed);
  });
}

void CpuDevice::copy_to_host(Stream& stream, void* host, const void* device, int64_t bytes) {
  copy(stream, host, device, bytes, copied_to_host_);
}

void CpuDevice::launch(Stream& stream, std::function<void()> work) { own(stream).worker().post_work(std::move(work)); }

void CpuDevice::notify(Stream& stream, std::function<void()> done) {
  own(stream).worker().post_notify(std::move(done));
}

void CpuDevice::synchronize(Stream& stream) {
  own(stream).worker().post_record()->wait_resolved();
  failure_->rethrow_unhandled();
}

void CpuDevice::set_error_handler(std::function<void(std::exception_ptr)> handler) {
  failure_->set_handler(std::move(handler));
}

void CpuDevice::abort() { failure_->abort(); }

CopiedBytes CpuDevice::copied() const {
  return {copied_to_device_.load(std::memory_order_relaxed), copied_to_host_.load(std::memory_order_relaxed)};
}

}  // namespace slidedp
