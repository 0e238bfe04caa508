#include "runtime/device/cuda/pinned_memory.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "model/base/format.h"
#include "runtime/device/cuda/cuda_error.h"

namespace slidedp {
namespace {

constexpr int64_t kPage = 4096;
constexpr int64_t kPieceBytes = int64_t{2} << 30;
constexpr int kThreads = 8;  // more do not help: the kernel's page tables are the limit

int64_t skew_of(const void* data) { return static_cast<int64_t>(reinterpret_cast<uintptr_t>(data) % kPage); }

struct Piece {
  char* data = nullptr;
  int64_t bytes = 0;
  cudaError_t status = cudaErrorNotReady;
};

std::vector<Piece> cut(void* data, int64_t bytes) {
  std::vector<Piece> pieces;
  for (int64_t begin = 0; begin < bytes;) {
    const int64_t end = end_of_piece(begin, bytes, skew_of(data));
    pieces.push_back({static_cast<char*>(data) + begin, end - begin});
    begin = end;
  }
  return pieces;
}

void register_all(std::vector<Piece>& pieces, int ordinal) {
  std::atomic<size_t> next = 0;
  std::atomic<bool> failed = false;
  const auto work = [&] {
    cudaSetDevice(ordinal);
    for (size_t i = next++; i < pieces.size() && !failed; i = next++) {
      Piece& piece = pieces[i];
      piece.status = cudaHostRegister(piece.data, static_cast<size_t>(piece.bytes),
                                      cudaHostRegisterPortable | cudaHostRegisterMapped);
      if (piece.status != cudaSuccess) failed = true;
    }
    cudaGetLastError();
  };
  std::vector<std::thread> threads;
  for (size_t i = 1; i < std::min<size_t>(kThreads, pieces.size()); ++i) threads.emplace_back(work);
  work();
  for (std::thread& thread : threads) thread.join();
}

}  // namespace

int64_t end_of_piece(int64_t offset, int64_t bytes, int64_t skew) {
  return std::min(bytes, ((offset + skew) / kPieceBytes + 1) * kPieceBytes - skew);
}

PinnedMemory& PinnedMemory::process() {
  static PinnedMemory memory;
  return memory;
}

void PinnedMemory::add(void* data, int64_t bytes, int ordinal) {
  if (bytes < 0) throw std::logic_error("negative size of host memory to register");
  if (bytes == 0) return;
  std::vector<Piece> pieces = cut(data, bytes);
  register_all(pieces, ordinal);
  const auto refused = std::find_if(pieces.begin(), pieces.end(), [](const Piece& piece) {
    return piece.status != cudaSuccess && piece.status != cudaErrorNotReady;
  });
  if (refused != pieces.end()) {
    for (const Piece& piece : pieces) {
      if (piece.status == cudaSuccess) cudaHostUnregister(piece.data);
    }
    failf(
        "The system refuses to pin {} of host memory for GPU copies: {}. Free host memory, raise the limit of locked "
        "memory (ulimit -l unlimited; in a container --ulimit memlock=-1), or use a smaller plan.",
        format_bytes(bytes), describe(refused->status));
  }
  const std::unique_lock lock(mutex_);
  ranges_[static_cast<const char*>(data)] = bytes;
}

void PinnedMemory::remove(void* data) {
  int64_t bytes = 0;
  {
    const std::unique_lock lock(mutex_);
    const auto range = ranges_.find(static_cast<const char*>(data));
    if (range == ranges_.end()) return;
    bytes = range->second;
    ranges_.erase(range);
  }
  // Fails only where the context is gone, and with it the registration.
  for (const Piece& piece : cut(data, bytes)) cudaHostUnregister(piece.data);
  cudaGetLastError();
}

int64_t PinnedMemory::bytes_in_piece(const void* host, int64_t bytes) const {
  const auto* begin = static_cast<const char*>(host);
  const std::shared_lock lock(mutex_);
  auto range = ranges_.upper_bound(begin);
  if (range == ranges_.begin()) return bytes;
  --range;
  const int64_t offset = begin - range->first;
  if (offset >= range->second) return bytes;
  return std::min(bytes, end_of_piece(offset, range->second, skew_of(range->first)) - offset);
}

}  // namespace slidedp
