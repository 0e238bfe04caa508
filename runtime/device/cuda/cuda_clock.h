// Puts the times of one GPU's events on this process's clock.
//
// CUDA only tells milliseconds between two events, as a float: over 10 s its steps are 1 us, over an hour 0.25 ms. So
// times count from an anchor event whose process time is known, and the anchor is renewed every few seconds. A new
// anchor continues the old one's time exactly and corrects the drift between the two clocks by a slightly different
// rate from there on, so that times that straddle a renewal keep their order.
#pragma once

#include <cuda_runtime_api.h>

#include <memory>
#include <mutex>

namespace slidedp {

class CudaClock {
 public:
  struct Anchor {
    Anchor();
    ~Anchor();
    Anchor(const Anchor&) = delete;
    Anchor& operator=(const Anchor&) = delete;
    cudaEvent_t event = nullptr;
    double seconds = 0;     // of the process's clock, at the event
    double rate = 1;        // process seconds per second of the GPU's clock, from here on
    double measured_s = 0;  // what the process's clock said at the event
  };

  // The GPU must be the calling thread's current device. Throws Error.
  CudaClock();
  ~CudaClock();
  CudaClock(const CudaClock&) = delete;
  CudaClock& operator=(const CudaClock&) = delete;

  // For an event that is recorded after this call. Thread-safe.
  std::shared_ptr<const Anchor> anchor() const;
  // Renews the anchor if it is old; does nothing if the GPU does not answer soon. One thread at a time, with the GPU as
  // its current device.
  void refresh();
  // Seconds of the process's clock at a completed event that was recorded after anchor() had returned `from`.
  static double seconds(const Anchor& from, cudaEvent_t event);

 private:
  std::shared_ptr<Anchor> measure() const;  // nullptr: no answer
  cudaStream_t stream_ = nullptr;
  mutable std::mutex mutex_;
  std::shared_ptr<const Anchor> anchor_;
};

}  // namespace slidedp
