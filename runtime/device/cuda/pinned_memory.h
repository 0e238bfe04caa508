// Host memory that the GPUs of this process may copy from and to directly.
//
// Registered in pieces, since some drivers refuse one huge range. A copy must not cross from one piece into the next
// (CUDA looks an address up as one registration), so copies are cut where pieces meet.
#pragma once

#include <cstdint>
#include <map>
#include <shared_mutex>

namespace slidedp {

class PinnedMemory {
 public:
  static PinnedMemory& process();  // registration is for every device of the process

  // Throws Error that says why the system refuses; nothing is then registered. `ordinal`: a GPU whose context exists.
  void add(void* data, int64_t bytes, int ordinal);
  void remove(void* data);  // ignores what is not registered

  // How many of the next `bytes` bytes at `host` one copy may move: up to where pieces meet. At least 1 for bytes > 0.
  int64_t bytes_in_piece(const void* host, int64_t bytes) const;

 private:
  mutable std::shared_mutex mutex_;
  std::map<const char*, int64_t> ranges_;  // begin -> bytes
};

// The end of the piece that `offset` lies in, in a range of `bytes` bytes that begins `skew` bytes behind a page.
int64_t end_of_piece(int64_t offset, int64_t bytes, int64_t skew);

}  // namespace slidedp
