#include "runtime/device/cuda/cuda_stream.h"

#include <chrono>
#include <thread>

#include "runtime/device/cuda/cuda_error.h"

namespace slidedp {
namespace {

struct Ticket {
  std::shared_ptr<Callbacks> callbacks;
  int64_t number;
};

void redeem(void* data) {
  const std::unique_ptr<Ticket> ticket(static_cast<Ticket*>(data));
  ticket->callbacks->call(ticket->number);
}

}  // namespace

StreamCore::Handle::Handle() {
  check_cuda(cudaStreamCreateWithFlags(&handle, cudaStreamNonBlocking), "cudaStreamCreate");
}

StreamCore::Handle::~Handle() {
  cudaStreamDestroy(handle);
  cudaGetLastError();
}

StreamCore::StreamCore(std::string name) : name_(std::move(name)), trail_(stream_.handle) {}

// The trail's word is freed before the stream goes: nothing may be on its way to it.
StreamCore::~StreamCore() {
  cudaStreamSynchronize(stream_.handle);
  cudaGetLastError();
}

cudaError_t StreamCore::notify(std::function<void()> done) {
  const int64_t number = callbacks_->add(std::move(done));
  // CUDA owns the ticket: a context that fails later drops it, which leaks these few bytes, since none can tell whether
  // the driver still holds it.
  auto ticket = std::make_unique<Ticket>(Ticket{callbacks_, number});
  const cudaError_t status = cudaLaunchHostFunc(handle(), redeem, ticket.get());
  if (status == cudaSuccess) {
    ticket.release();  // NOLINT(bugprone-unused-return-value)
    return status;
  }
  cudaGetLastError();
  return status;
}

CudaRecord::CudaRecord(int ordinal) : ordinal(ordinal) { check_cuda(cudaEventCreate(&event), "cudaEventCreate"); }

CudaRecord::~CudaRecord() {
  cudaEventDestroy(event);
  cudaGetLastError();
}

bool CudaRecord::reached_cuda() const {
  return (issued == nullptr || issued->outcome() == Record::Outcome::done) && !skipped;
}

bool CudaEvent::complete() const {
  const auto record = last();
  if (record == nullptr) return true;
  if (!record->reached_cuda()) return false;
  const cudaError_t status = cudaEventQuery(record->event);
  if (status != cudaSuccess) cudaGetLastError();
  return status == cudaSuccess;
}

// Asks again and again instead of waiting in the driver, where an abort could not reach it.
void CudaEvent::synchronize() {
  const auto record = last();
  if (record == nullptr) return;
  if (record->issued != nullptr && failure_->host_waits()->wait(*record->issued) != Record::Outcome::done) return;
  if (record->skipped) return;
  for (int tries = 0; !failure_->aborted(); ++tries) {
    const cudaError_t status = cudaEventQuery(record->event);
    if (status == cudaSuccess) return;
    if (!is_answer(status)) {
      cudaGetLastError();
      return;  // the device's watch reports it
    }
    if (tries > 100) std::this_thread::sleep_for(std::chrono::microseconds(20));
  }
}

void CudaEvent::set_last(std::shared_ptr<CudaRecord> record) {
  const std::lock_guard lock(mutex_);
  last_ = std::move(record);
}

std::shared_ptr<CudaRecord> CudaEvent::last() const {
  const std::lock_guard lock(mutex_);
  return last_;
}

}  // namespace slidedp
