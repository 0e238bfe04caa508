// The CPU optimizer over buffers that roll through DRAM, as the update workers run it.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "profiler/probe.h"
#include "profiler/rolling.h"
#include "runtime/host/cpu_adam.h"

namespace slidedp {

inline constexpr int64_t kElementsPerCall = int64_t{2} << 20;  // about a chunk
inline constexpr int64_t kStateBytes = 12;                     // hi, lo, m, v
inline constexpr int64_t kWireBytes = 2;                       // bf16

inline AdamScalars typical_scalars() {
  AdamScalars scalars;
  scalars.beta1 = 0.9f;
  scalars.beta2 = 0.999f;
  scalars.one_minus_beta1 = 0.1f;
  scalars.one_minus_beta2 = 0.001f;
  scalars.eps = 1e-8f;
  scalars.step_size = 1e-6f;
  scalars.bias_correction2_sqrt = 0.1f;
  scalars.decay = 1 - 1e-6f;
  scalars.gradient_scale = 1e-3f;
  return scalars;
}

// Training state and gradient sources of one worker.
class StateSlice {
 public:
  StateSlice(int64_t elements, int sources)
      : elements_(elements),
        hi_(2 * elements, "the Adam probe's hi"),
        lo_(2 * elements, "the Adam probe's lo"),
        m_(4 * elements, "the Adam probe's m"),
        v_(4 * elements, "the Adam probe's v") {
    for (int i = 0; i < sources; ++i) gradients_.emplace_back(kWireBytes * elements, "the Adam probe's gradients");
  }

  // The next `count` elements, from the first `sources` sources.
  void update(int64_t count, int sources, UpdatePart part = UpdatePart::whole) {
    if (position_ + count > elements_) position_ = 0;
    std::vector<const void*> pointers;
    for (int i = 0; i < sources; ++i) {
      pointers.push_back(static_cast<const uint16_t*>(gradients_[static_cast<size_t>(i)].data()) + position_);
    }
    adam_update(span<uint16_t>(hi_, count), span<uint16_t>(lo_, count), span<float>(m_, count), span<float>(v_, count),
                {pointers, sources, DType::bf16}, scalars_, true, part);
    position_ += count;
  }

 private:
  template <typename T>
  std::span<T> span(RollingBuffer& buffer, int64_t count) const {
    return {static_cast<T*>(buffer.data()) + position_, static_cast<size_t>(count)};
  }
  int64_t elements_, position_ = 0;
  RollingBuffer hi_, lo_, m_, v_;
  std::vector<RollingBuffer> gradients_;
  AdamScalars scalars_ = typical_scalars();
};

// Elements of each of `workers` slices that share the rolling memory.
inline int64_t slice_elements(const ProbeContext& context, int workers, int sources) {
  return context.rolling_bytes / (workers * (kStateBytes + sources * kWireBytes)) / kBlockElements * kBlockElements;
}

}  // namespace slidedp
