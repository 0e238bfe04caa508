// The CPU optimizer over buffers that roll through DRAM, as the update workers run it.
#pragma once

#include <algorithm>
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

// Training state and gradient sources, as many elements as fit into `bytes`.
class StatePool {
 public:
  StatePool(int64_t bytes, int sources)
      : elements_(elements_in(bytes, sources)),
        hi_(2 * elements_, "the Adam probe's hi"),
        lo_(2 * elements_, "the Adam probe's lo"),
        m_(4 * elements_, "the Adam probe's m"),
        v_(4 * elements_, "the Adam probe's v") {
    for (int i = 0; i < sources; ++i) gradients_.emplace_back(kWireBytes * elements_, "the Adam probe's gradients");
  }
  static int64_t elements_in(int64_t bytes, int sources) {
    return bytes / (kStateBytes + sources * kWireBytes) / kBlockElements * kBlockElements;
  }
  int64_t elements() const { return elements_; }

  void update(int64_t begin, int64_t count, int sources, UpdatePart part) {
    std::vector<const void*> pointers;
    for (int i = 0; i < sources; ++i) {
      pointers.push_back(static_cast<const uint16_t*>(gradients_[static_cast<size_t>(i)].data()) + begin);
    }
    adam_update(span<uint16_t>(hi_, begin, count), span<uint16_t>(lo_, begin, count), span<float>(m_, begin, count),
                span<float>(v_, begin, count), {pointers, sources, DType::bf16}, scalars_, true, part);
  }

 private:
  template <typename T>
  static std::span<T> span(RollingBuffer& buffer, int64_t begin, int64_t count) {
    return {static_cast<T*>(buffer.data()) + begin, static_cast<size_t>(count)};
  }
  int64_t elements_;
  RollingBuffer hi_, lo_, m_, v_;
  std::vector<RollingBuffer> gradients_;
  AdamScalars scalars_ = typical_scalars();
};

// One worker's share of a pool, gone through chunk by chunk, round and round. It begins somewhere inside, elsewhere for
// each worker: shares are often a power of two apart, and workers that go through them in step would meet in the same
// memory channels and banks. The pool must outlive it.
class StateSlice {
 public:
  StateSlice(StatePool& pool, int worker, int workers)
      : pool_(&pool),
        share_(pool.elements() / workers / kBlockElements * kBlockElements),
        begin_(worker * share_),
        rounds_(share_, staggered(worker, share_ - chunk() + 1) / kBlockElements * kBlockElements) {}
  // Elements of a chunk: what one call updates.
  int64_t chunk() const { return std::min(kElementsPerCall, share_); }
  int64_t position() const { return begin_ + rounds_.position(); }
  void seek(int64_t position) { rounds_.seek(position - begin_); }
  // Returns the elements updated.
  int64_t update(int sources, UpdatePart part = UpdatePart::whole) {
    pool_->update(begin_ + rounds_.next(chunk()), chunk(), sources, part);
    return chunk();
  }

 private:
  StatePool* pool_;
  int64_t share_, begin_;
  Rounds rounds_;
};

inline std::vector<StateSlice> slices_of(StatePool& pool, int workers) {
  std::vector<StateSlice> slices;
  for (int i = 0; i < workers; ++i) slices.emplace_back(pool, i, workers);
  return slices;
}

// Thread counts that show where a stream stops growing: one, a quarter and half of all cores, what a plan of one rank
// gives its update workers (its launching thread and the program itself keep a core), and all.
std::vector<int> thread_counts(const ProbeContext& context);
int planned_threads(const ProbeContext& context);

}  // namespace slidedp
