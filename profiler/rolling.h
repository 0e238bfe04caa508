// Host memory for probes that must miss the caches, as the training state does.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "model/base/types.h"
#include "runtime/host/arena.h"
#include "runtime/host/machine_facts.h"

namespace slidedp {

// Where in a part of `size` its worker begins: multiples of the golden ratio, so that the distances between workers are
// all different, and none a power of two.
inline int64_t staggered(int worker, int64_t size) {
  constexpr double kGoldenRatio = 0.6180339887498949;
  const double turns = worker * kGoldenRatio;
  return static_cast<int64_t>((turns - std::floor(turns)) * static_cast<double>(size));
}

// Places in something of `size`, handed out one after another, round and round. Later rounds begin less than one place
// behind the front, where they differ if the starts do.
class Rounds {
 public:
  explicit Rounds(int64_t size, int64_t start = 0) : size_(size), start_(start), position_(start) {}
  // Where the next `wanted` of it begin, at most size.
  int64_t next(int64_t wanted) {
    if (position_ + wanted > size_) position_ = std::min(start_ % wanted, size_ - wanted);
    const int64_t begin = position_;
    position_ += wanted;
    return begin;
  }
  int64_t position() const { return position_; }
  void seek(int64_t position) { position_ = position; }

 private:
  int64_t size_, start_, position_;
};

// One touched region that hands out its ranges round and round, so that by the time a range comes again everything else
// has passed through the caches. Not thread-safe.
class RollingBuffer {
 public:
  RollingBuffer(int64_t bytes, const std::string& what) : arena_(bytes, what), rounds_(arena_.bytes()) { fill(); }
  void* data() const { return arena_.data(); }
  int64_t bytes() const { return arena_.bytes(); }
  // The next range, at most bytes() long.
  void* next(int64_t bytes) { return static_cast<std::byte*>(arena_.data()) + rounds_.next(bytes); }

 private:
  // Any non-zero bytes: a page that was never written is not memory yet. 0x3c3c is a positive normal number of about
  // 0.01 both as bf16 and as fp32. By many threads, as one takes a second for a few GiB.
  void fill() {
    constexpr int64_t kLeast = int64_t{64} << 20;
    const int64_t parts = std::clamp<int64_t>(arena_.bytes() / kLeast, 1, usable_cores());
    const int64_t part = round_up(ceil_div(arena_.bytes(), parts), 4096);
    std::vector<std::jthread> threads;
    for (int64_t begin = 0; begin < arena_.bytes(); begin += part) {
      threads.emplace_back(
          [begin = static_cast<std::byte*>(arena_.data()) + begin, bytes = std::min(part, arena_.bytes() - begin)] {
            std::memset(begin, 0x3c, static_cast<size_t>(bytes));
          });
    }
  }

  Arena arena_;
  Rounds rounds_;
};

}  // namespace slidedp
