#include "runtime/device/cuda/cuda_device.h"

#include <pthread.h>

#include <algorithm>
#include <chrono>
#include <stdexcept>

#include "model/base/format.h"
#include "model/base/types.h"
#include "runtime/device/cuda/cuda_error.h"
#include "runtime/device/cuda/gather_rows.h"
#include "runtime/device/cuda/nvtx/ranges.h"
#include "runtime/device/cuda/pinned_memory.h"

namespace slidedp {
namespace {

// How long a failed GPU stays unnoticed while no thread of ours calls CUDA; a few calls each time.
constexpr auto kWatchInterval = std::chrono::milliseconds(20);

// What an allocation takes of a reserved piece.
constexpr int64_t kAlignment = 256;
int64_t footprint(int64_t bytes) { return round_up(std::max<int64_t>(bytes, 1), kAlignment); }

// By how much alignment may make a plan's buffers larger than the budget that they fill exactly.
constexpr int64_t kRoundingSlack = int64_t{1} << 20;

thread_local cudaStream_t current_stream = nullptr;

class CurrentStream {
 public:
  explicit CurrentStream(cudaStream_t stream) : outer_(current_stream) { current_stream = stream; }
  ~CurrentStream() { current_stream = outer_; }
  CurrentStream(const CurrentStream&) = delete;
  CurrentStream& operator=(const CurrentStream&) = delete;

 private:
  const cudaStream_t outer_;
};

CudaEvent& cuda_event(Event& event) {
  auto* cuda = dynamic_cast<CudaEvent*>(&event);
  if (cuda == nullptr) throw std::logic_error("an event of another backend was given to a CUDA device");
  return *cuda;
}

void check_size(int64_t bytes) {
  if (bytes < 0) throw std::logic_error("negative copy size");
}

// Calls copy(offset, bytes) for parts that each lie in one registration.
template <typename Copy>
void copy_in_pieces(const void* host, int64_t bytes, Copy copy) {
  for (int64_t offset = 0; offset < bytes;) {
    const int64_t part =
        PinnedMemory::process().bytes_in_piece(static_cast<const char*>(host) + offset, bytes - offset);
    check_cuda(copy(offset, static_cast<size_t>(part)), "cudaMemcpyAsync");
    offset += part;
  }
}

// Where a kernel finds host memory; nullptr if it is not registered.
const void* on_device(const void* host) {
  void* address = nullptr;
  if (cudaHostGetDevicePointer(&address, const_cast<void*>(host), 0) == cudaSuccess) return address;
  cudaGetLastError();
  return nullptr;
}

}  // namespace

cudaStream_t current_cuda_stream() { return current_stream; }

CudaDevice::CudaDevice(const CudaDeviceOptions& options)
    : options_(options), failure_(std::make_shared<DeviceFailure>(options.rank)) {
  if (options.memory_budget < 0) throw std::logic_error("negative memory budget");
  activate();
  memory_.budget = options.memory_budget;
  clock_ = std::make_unique<CudaClock>();
  compute_ = make_core("compute");
  if (memory_.budget == 0) {
    size_t free = 0, total = 0;
    check_cuda(cudaMemGetInfo(&free, &total), "cudaMemGetInfo");
    memory_.budget = static_cast<int64_t>(free);
  }
  watch_ = std::thread([this] { watch(); });
}

CudaDevice::~CudaDevice() {
  failure_->abort();
  for (const auto& worker : failure_->workers()) worker->close();
  {
    const std::lock_guard lock(watch_mutex_);
    closing_ = true;
  }
  watch_wake_.notify_all();
  watch_.join();
  cudaSetDevice(options_.ordinal);
  for (const auto& core : cores()) {
    // After a failure the stream calls nothing more.
    if (cudaStreamSynchronize(core->handle()) != cudaSuccess) core->callbacks().call_all();
    core->callbacks().wait_until_idle();
  }
  drop_reserve();
}

void CudaDevice::activate() const { check_cuda(cudaSetDevice(options_.ordinal), "cudaSetDevice"); }

DeviceMemory CudaDevice::allocate(int64_t bytes, const std::string& what) {
  if (bytes < 0) throw std::logic_error("negative size for " + what);
  {
    const std::lock_guard lock(memory_mutex_);
    if (bytes > memory_.budget - memory_.in_use) {
      failf(
          "Rank {}: no device memory for {}: {} ({} bytes) wanted, {} of the budget of {} are in use. Use a plan made "
          "for this budget, or raise the budget.",
          rank(), what, format_bytes(bytes), bytes, format_bytes(memory_.in_use), format_bytes(memory_.budget));
    }
    memory_.in_use += bytes;
  }
  DeviceMemory memory(this, take(bytes, what), bytes);
  check_cuda(cudaMemsetAsync(memory.data(), 0, static_cast<size_t>(bytes), compute_->handle()), "cudaMemset");
  check_cuda(cudaStreamSynchronize(compute_->handle()), "cudaMemset");
  const std::lock_guard lock(memory_mutex_);
  memory_.peak = std::max(memory_.peak, memory_.in_use);
  return memory;
}

void CudaDevice::reserve(std::span<const int64_t> sizes) {
  int64_t bytes = 0;
  for (const int64_t size : sizes) bytes += footprint(size);
  activate();
  const std::lock_guard lock(memory_mutex_);
  if (reserve_live_ > 0) return;
  drop_reserve();
  if (bytes == 0 || bytes > memory_.budget + kRoundingSlack) return;
  void* data = nullptr;
  if (cudaMalloc(&data, static_cast<size_t>(bytes)) != cudaSuccess) {
    cudaGetLastError();
    return;
  }
  reserve_ = static_cast<char*>(data);
  reserve_bytes_ = bytes;
}

void* CudaDevice::take_from_reserve(int64_t bytes) {
  const std::lock_guard lock(memory_mutex_);
  if (footprint(bytes) > reserve_bytes_ - reserve_used_) return nullptr;
  void* data = reserve_ + reserve_used_;
  reserve_used_ += footprint(bytes);
  ++reserve_live_;
  return data;
}

void CudaDevice::drop_reserve() {
  cudaFree(reserve_);  // fails only where the context is gone, and with it the memory
  cudaGetLastError();
  reserve_ = nullptr;
  reserve_bytes_ = reserve_used_ = 0;
}

// From the GPU, for bytes that are counted already.
void* CudaDevice::take(int64_t bytes, const std::string& what) {
  activate();
  if (void* reserved = take_from_reserve(bytes)) return reserved;
  void* data = nullptr;
  const cudaError_t status = cudaMalloc(&data, static_cast<size_t>(std::max<int64_t>(bytes, 1)));
  if (status == cudaSuccess) return data;
  cudaGetLastError();
  MemoryUse use;
  {
    const std::lock_guard lock(memory_mutex_);
    memory_.in_use -= bytes;
    use = memory_;
  }
  if (status != cudaErrorMemoryAllocation) check_cuda(status, "cudaMalloc");
  size_t free = 0, total = 0;
  check_cuda(cudaMemGetInfo(&free, &total), "cudaMemGetInfo");
  failf(
      "Rank {}: GPU {} has no memory for {}: {} ({} bytes) wanted, {} of the budget of {} are in use, {} of the GPU's "
      "{} are free. Another process may hold memory (see nvidia-smi); end it, or use a plan for less GPU memory.",
      rank(), ordinal(), what, format_bytes(bytes), bytes, format_bytes(use.in_use), format_bytes(use.budget),
      format_bytes(static_cast<int64_t>(free)), format_bytes(static_cast<int64_t>(total)));
}

void CudaDevice::release(void* data, int64_t bytes) {
  cudaSetDevice(options_.ordinal);
  const std::lock_guard lock(memory_mutex_);
  memory_.in_use -= bytes;
  if (data >= reserve_ && data < reserve_ + reserve_bytes_) {
    if (--reserve_live_ == 0) drop_reserve();
    return;
  }
  cudaFree(data);
  cudaGetLastError();
}

MemoryUse CudaDevice::memory() const {
  const std::lock_guard lock(memory_mutex_);
  return memory_;
}

int64_t CudaDevice::used_by_all() const {
  activate();
  size_t free = 0, total = 0;
  check_cuda(cudaMemGetInfo(&free, &total), "cudaMemGetInfo");
  return static_cast<int64_t>(total - free);
}

std::shared_ptr<StreamCore> CudaDevice::make_core(const std::string& name) {
  auto core = std::make_shared<StreamCore>(name);
  const std::lock_guard lock(cores_mutex_);
  cores_.push_back(core);
  return core;
}

std::vector<std::shared_ptr<StreamCore>> CudaDevice::cores() const {
  const std::lock_guard lock(cores_mutex_);
  std::erase_if(cores_, [](const auto& core) { return core.expired(); });
  std::vector<std::shared_ptr<StreamCore>> alive;
  for (const auto& core : cores_) {
    if (auto strong = core.lock()) alive.push_back(std::move(strong));
  }
  return alive;
}

std::unique_ptr<Stream> CudaDevice::create_stream(const std::string& name) {
  activate();
  auto core = name == compute_->name() ? compute_ : make_core(name);
  std::shared_ptr<StreamWorker> worker;
  if (options_.shared) {
    worker = std::make_shared<StreamWorker>(failure_, name);
    failure_->add(worker);
  }
  return std::make_unique<CudaStream>(std::move(core), std::move(worker), this);
}

std::unique_ptr<Event> CudaDevice::create_event() { return std::make_unique<CudaEvent>(failure_); }

CudaStream& CudaDevice::own(Stream& stream) const {
  auto* cuda = dynamic_cast<CudaStream*>(&stream);
  if (cuda == nullptr || cuda->device() != this) {
    throw std::logic_error("rank " + std::to_string(rank()) + ": a stream of another device was given");
  }
  return *cuda;
}

// Runs `operation` in stream order: here and now, or on the stream's worker.
template <typename Operation>
void CudaDevice::issue(CudaStream& stream, Operation operation) {
  if (stream.worker() == nullptr) return run(stream.task, operation);
  stream.worker()->post_work([this, task = stream.task, operation]() mutable { run(task, operation); });
}

template <typename Operation>
void CudaDevice::run(const std::shared_ptr<const std::string>& task, Operation& operation) {
  if (aborted()) return;
  try {
    activate();
    operation();
  } catch (...) {
    fail_call(task, std::current_exception());
  }
}

// A call fails for its own reason, or because the GPU failed before in work that some other task had enqueued.
void CudaDevice::fail_call(const std::shared_ptr<const std::string>& task, std::exception_ptr error) {
  const cudaError_t status = state();
  if (status != cudaSuccess) return failure_->fail(asynchronous_failure(status));
  try {
    std::rethrow_exception(error);
  } catch (const CudaError& call) {
    const std::string where = "Rank " + std::to_string(rank()) + (task == nullptr ? "" : ", " + *task) + ": ";
    failure_->fail(std::make_exception_ptr(Error(where + call.what())));
  } catch (...) {
    failure_->fail(error);
  }
}

cudaError_t CudaDevice::state() const {
  for (const auto& core : cores()) {
    const cudaError_t status = cudaStreamQuery(core->handle());
    if (is_answer(status)) continue;
    cudaGetLastError();
    return status;
  }
  return cudaSuccess;
}

std::exception_ptr CudaDevice::asynchronous_failure(cudaError_t status) const {
  std::string tasks;
  for (const auto& core : cores()) {
    const std::string task = core->trail().under_way();
    if (!task.empty()) tasks += (tasks.empty() ? "" : "; ") + task;
  }
  return std::make_exception_ptr(Error(
      fmt::format("Rank {}: GPU {} failed: {}. Under way were: {}. With CUDA_LAUNCH_BLOCKING=1 in the environment "
                  "the next run stops at the call that causes it.",
                  rank(), ordinal(), describe(status), tasks.empty() ? "tasks that are not known" : tasks)));
}

void CudaDevice::record(Stream& stream, Event& event) {
  CudaStream& target = own(stream);
  CudaEvent& recorded = cuda_event(event);
  auto record = recorded.last();
  // With workers each record is an event of its own, since waits for an earlier one may not have reached CUDA.
  const bool reuse = record != nullptr && record->ordinal == ordinal() && target.worker() == nullptr;
  try {
    if (!reuse) {
      activate();
      record = std::make_shared<CudaRecord>(ordinal());
    }
  } catch (...) {
    return fail_call(target.task, std::current_exception());
  }
  record->skipped = true;
  issue(target, [this, record, core = &target.core()] {
    record->anchor = clock_->anchor();
    check_cuda(cudaEventRecord(record->event, core->handle()), "cudaEventRecord");
    record->skipped = false;
  });
  if (target.worker() != nullptr) record->issued = target.worker()->post_record();
  recorded.set_last(std::move(record));
}

// What comes after the wait relies on the work before the record. If that will never be done, this device must not go
// on either; the device that failed has reported why.
void CudaDevice::wait(Stream& stream, Event& event) {
  CudaStream& target = own(stream);
  const auto record = cuda_event(event).last();
  if (record == nullptr) return;
  if (record->issued != nullptr) {
    if (target.worker() == nullptr) throw std::logic_error("a device with workers and one without meet in an event");
    target.worker()->post_wait(record->issued);
  } else if (record->skipped) {
    return abort();
  }
  issue(target, [record, core = &target.core()] {
    check_cuda(cudaStreamWaitEvent(core->handle(), record->event, 0), "cudaStreamWaitEvent");
  });
}

double CudaDevice::timestamp(const Event& event) const {
  const auto* cuda = dynamic_cast<const CudaEvent*>(&event);
  const auto record = cuda == nullptr ? nullptr : cuda->last();
  if (record == nullptr || !record->reached_cuda()) {
    throw std::logic_error("timestamp of an event that was not recorded or is not complete");
  }
  return CudaClock::seconds(*record->anchor, record->event);
}

void CudaDevice::copy_to_device(Stream& stream, void* device, const void* host, int64_t bytes) {
  check_size(bytes);
  CudaStream& target = own(stream);
  issue(target, [device, host, bytes, core = &target.core()] {
    copy_in_pieces(host, bytes, [&](int64_t offset, size_t part) {
      return cudaMemcpyAsync(static_cast<char*>(device) + offset, static_cast<const char*>(host) + offset, part,
                             cudaMemcpyHostToDevice, core->handle());
    });
  });
}

void CudaDevice::copy_to_host(Stream& stream, void* host, const void* device, int64_t bytes) {
  check_size(bytes);
  CudaStream& target = own(stream);
  issue(target, [device, host, bytes, core = &target.core()] {
    copy_in_pieces(host, bytes, [&](int64_t offset, size_t part) {
      return cudaMemcpyAsync(static_cast<char*>(host) + offset, static_cast<const char*>(device) + offset, part,
                             cudaMemcpyDeviceToHost, core->handle());
    });
  });
}

void CudaDevice::copy_rows_to_device(Stream& stream, void* device, const void* host_base, const int32_t* rows,
                                     int64_t count, int64_t row_bytes) {
  check_size(count);
  check_size(row_bytes);
  CudaStream& target = own(stream);
  issue(target, [=, core = &target.core()] {
    if (count == 0) return;
    const void* base = on_device(host_base);
    const auto* list = static_cast<const int32_t*>(on_device(rows));
    if (base != nullptr && list != nullptr) {
      return check_cuda(gather_rows(device, base, list, count, row_bytes, core->handle()), "gather_rows");
    }
    for (int64_t i = 0; i < count; ++i) {  // not registered: a copy each
      check_cuda(cudaMemcpyAsync(static_cast<char*>(device) + i * row_bytes,
                                 static_cast<const char*>(host_base) + rows[i] * row_bytes,
                                 static_cast<size_t>(row_bytes), cudaMemcpyHostToDevice, core->handle()),
                 "cudaMemcpyAsync");
    }
  });
}

void CudaDevice::launch(Stream& stream, std::function<void()> work) {
  CudaStream& target = own(stream);
  issue(target, [work = std::move(work), core = &target.core()] {
    const CurrentStream current(core->handle());
    cudaGetLastError();  // what an earlier call left is not this work's failure
    work();
    check_cuda(cudaGetLastError(), "a kernel launch");
  });
}

void CudaDevice::notify(Stream& stream, std::function<void()> done) {
  CudaStream& target = own(stream);
  // Also after an abort: what CUDA has is finished first.
  auto request = [this, done = std::move(done), core = &target.core()] {
    cudaSetDevice(options_.ordinal);
    const cudaError_t status = core->notify(done);
    if (status == cudaSuccess) return;
    failure_->fail(asynchronous_failure(status));  // first: a callback must not take skipped work for done
    core->callbacks().call_all();
  };
  if (target.worker() == nullptr) return request();
  target.worker()->post_notify(std::move(request));
}

void CudaDevice::synchronize(Stream& stream) {
  CudaStream& target = own(stream);
  if (target.worker() != nullptr) target.worker()->post_record()->wait_resolved();
  StreamCore& core = target.core();
  cudaSetDevice(options_.ordinal);
  const cudaError_t status = cudaStreamSynchronize(core.handle());
  if (status != cudaSuccess) {
    cudaGetLastError();
    failure_->fail(asynchronous_failure(status));
    core.callbacks().call_all();
  }
  core.callbacks().wait_until_idle();
  report_callbacks(core);
  failure_->rethrow_unhandled();
}

void CudaDevice::begin_task(Stream& stream, const std::string& name) {
  CudaStream& target = own(stream);
  target.task = std::make_shared<const std::string>(name);
  target.task_number = target.core().trail().begin(target.task);
  push_profiler_range(name.c_str());
}

void CudaDevice::end_task(Stream& stream) {
  CudaStream& target = own(stream);
  pop_profiler_range();
  issue(target, [number = target.task_number, core = &target.core()] { core->trail().end(number); });
  target.task = nullptr;
}

void CudaDevice::register_host(void* data, int64_t bytes) {
  activate();
  PinnedMemory::process().add(data, bytes, ordinal());
}

void CudaDevice::unregister_host(void* data) {
  cudaSetDevice(options_.ordinal);
  PinnedMemory::process().remove(data);
}

void CudaDevice::set_error_handler(std::function<void(std::exception_ptr)> handler) {
  failure_->set_handler(std::move(handler));
}

void CudaDevice::abort() { failure_->abort(); }

void CudaDevice::watch() {
  pthread_setname_np(pthread_self(), (std::to_string(rank()) + ":watch").c_str());
  cudaSetDevice(options_.ordinal);
  std::unique_lock lock(watch_mutex_);
  while (!watch_wake_.wait_for(lock, kWatchInterval, [this] { return closing_; })) {
    lock.unlock();
    for (const auto& core : cores()) look_after(*core);
    try {
      if (!aborted()) clock_->refresh();
    } catch (const std::exception&) {
      // The clock goes on from its last anchor; a GPU that fails calls is found above.
    }
    lock.lock();
  }
}

void CudaDevice::look_after(StreamCore& core) {
  const cudaError_t status = cudaStreamQuery(core.handle());
  if (!is_answer(status)) {
    cudaGetLastError();
    failure_->fail(asynchronous_failure(status));
    core.callbacks().call_all();
  }
  report_callbacks(core);
}

// When this returns, what a callback threw has been reported, by whichever thread.
void CudaDevice::report_callbacks(StreamCore& core) {
  const std::lock_guard lock(reporting_mutex_);
  if (auto thrown = core.callbacks().take_exception()) failure_->fail(std::move(thrown));
}

}  // namespace slidedp
