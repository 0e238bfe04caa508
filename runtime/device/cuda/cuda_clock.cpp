#include "runtime/device/cuda/cuda_clock.h"

#include <algorithm>
#include <stdexcept>

#include "model/base/error.h"
#include "runtime/device/clock.h"
#include "runtime/device/cuda/cuda_error.h"

namespace slidedp {
namespace {

constexpr double kRenewalSeconds = 4;  // the float's steps stay below 0.5 us
constexpr int kTries = 5;              // the one that took least is the most exact
constexpr double kPatienceSeconds = 0.05;
// Crystal clocks differ by far less; a larger difference is a bad measurement, to be made good later.
constexpr double kMostDrift = 200e-6;

}  // namespace

CudaClock::Anchor::Anchor() { check_cuda(cudaEventCreate(&event), "cudaEventCreate"); }
CudaClock::Anchor::~Anchor() { cudaEventDestroy(event); }

CudaClock::CudaClock() {
  check_cuda(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreate");
  for (int tries = 0; tries < 20 && anchor_ == nullptr; ++tries) {  // a first call may take long
    if (const auto first = measure()) {
      first->seconds = first->measured_s;
      anchor_ = first;
    }
  }
  if (anchor_ != nullptr) return;
  cudaStreamDestroy(stream_);
  fail("The GPU does not answer: an event recorded on an idle stream was not reached within a second.");
}

CudaClock::~CudaClock() { cudaStreamDestroy(stream_); }

std::shared_ptr<const CudaClock::Anchor> CudaClock::anchor() const {
  const std::lock_guard lock(mutex_);
  return anchor_;
}

std::shared_ptr<CudaClock::Anchor> CudaClock::measure() const {
  std::shared_ptr<Anchor> best;
  double best_width = kPatienceSeconds;
  for (int i = 0; i < kTries; ++i) {
    auto anchor = std::make_shared<Anchor>();
    const double before = process_seconds();
    if (cudaEventRecord(anchor->event, stream_) != cudaSuccess) return best;
    double after = before;
    cudaError_t status = cudaErrorNotReady;
    while (status == cudaErrorNotReady && after - before < kPatienceSeconds) {
      status = cudaEventQuery(anchor->event);
      after = process_seconds();
    }
    if (!is_answer(status)) return best;
    if (status != cudaSuccess || after - before >= best_width) continue;
    best_width = after - before;
    anchor->measured_s = (before + after) / 2;
    best = std::move(anchor);
  }
  return best;
}

void CudaClock::refresh() {
  const auto old = anchor();
  if (process_seconds() - old->measured_s < kRenewalSeconds) return;
  const auto next = measure();
  if (next == nullptr) return;
  next->seconds = seconds(*old, next->event);
  const double interval = next->measured_s - old->measured_s;
  next->rate = 1 + std::clamp((next->measured_s - next->seconds) / interval, -kMostDrift, kMostDrift);
  const std::lock_guard lock(mutex_);
  anchor_ = next;
}

double CudaClock::seconds(const Anchor& from, cudaEvent_t event) {
  float milliseconds = 0;
  if (cudaEventElapsedTime(&milliseconds, from.event, event) != cudaSuccess) {
    cudaGetLastError();
    throw std::logic_error("timestamp of an event that was not recorded or is not complete");
  }
  return from.seconds + static_cast<double>(milliseconds) * 1e-3 * from.rate;
}

}  // namespace slidedp
