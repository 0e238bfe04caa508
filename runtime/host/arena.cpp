#include "runtime/host/arena.h"

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <exception>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

#include "model/base/format.h"
#include "model/base/types.h"

namespace slidedp {
namespace {

constexpr int64_t kPage = 4096;
constexpr int64_t kHugePage = int64_t{2} << 20;

// Maps exactly `bytes` at a multiple of the huge page size: a longer range is reserved and its ends given back.
void* map_aligned(int64_t bytes, const std::string& what) {
  const int64_t wanted = round_up(bytes, kPage);
  void* range = mmap(nullptr, static_cast<size_t>(wanted + kHugePage), PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (range == MAP_FAILED) {
    failf("{} needs {} of host memory, but the system refuses them: {}.", what, format_bytes(bytes),
          std::strerror(errno));
  }
  auto* begin = static_cast<std::byte*>(range);
  const auto address = reinterpret_cast<uintptr_t>(range);
  const auto before = static_cast<int64_t>((kHugePage - address % kHugePage) % kHugePage);
  if (before > 0) munmap(begin, static_cast<size_t>(before));
  if (before < kHugePage) munmap(begin + before + wanted, static_cast<size_t>(kHugePage - before));
  return begin + before;
}

// Commits a page-aligned range. Linux before 5.14 has no call for it: a write to each page does the same.
void commit(std::byte* data, int64_t bytes) {
  if (madvise(data, static_cast<size_t>(bytes), MADV_POPULATE_WRITE) == 0) return;
  if (errno == ENOMEM) fail("The system ran out of memory while the training state was allocated.");
  for (int64_t at = 0; at < bytes; at += kPage) {
    auto* byte = reinterpret_cast<volatile char*>(data + at);
    *byte = *byte;
  }
}

struct Piece {
  std::byte* data = nullptr;
  int64_t bytes = 0;
};

// Pieces of all arenas, those of one node together.
std::vector<Piece> pieces_of(std::span<const Arena* const> arenas, int node) {
  constexpr int64_t kPiece = 32 * kHugePage;
  std::vector<Piece> pieces;
  for (const Arena* arena : arenas) {
    if (arena->node().id != node) continue;
    for (int64_t at = 0; at < arena->bytes(); at += kPiece) {
      pieces.push_back(
          {static_cast<std::byte*>(arena->data()) + at, round_up(std::min(kPiece, arena->bytes() - at), kPage)});
    }
  }
  return pieces;
}

// Threads that commit pieces, and the one that waits for them and tells of their progress.
class Touching {
 public:
  void start(std::vector<Piece> pieces, const NumaNode& node, int threads) {
    auto& group = groups_.emplace_back(std::make_unique<Group>());
    group->pieces = std::move(pieces);
    for (const Piece& piece : group->pieces) total_ += piece.bytes;
    {
      const std::lock_guard lock(mutex_);
      running_ += threads;
    }
    for (int i = 0; i < threads; ++i) {
      threads_.emplace_back([this, cores = node.cores, &group = *group] { work(group, cores); });
    }
  }

  void wait(const TouchProgress& progress) {
    std::unique_lock lock(mutex_);
    while (!ended_.wait_for(lock, std::chrono::seconds(1), [this] { return running_ == 0; })) {
      lock.unlock();
      if (progress) progress(done_, total_);
      lock.lock();
    }
    lock.unlock();
    threads_.clear();
    if (error_) std::rethrow_exception(error_);
    if (progress) progress(done_, total_);
  }

 private:
  struct Group {
    std::vector<Piece> pieces;
    std::atomic<size_t> next = 0;
  };

  void work(Group& group, const std::vector<int>& cores) {
    try {
      run_on_cores(cores);
      for (size_t i = group.next++; i < group.pieces.size(); i = group.next++) {
        commit(group.pieces[i].data, group.pieces[i].bytes);
        done_ += group.pieces[i].bytes;
      }
    } catch (...) {
      const std::lock_guard lock(mutex_);
      if (!error_) error_ = std::current_exception();
    }
    const std::lock_guard lock(mutex_);
    --running_;
    ended_.notify_all();
  }

  std::vector<std::unique_ptr<Group>> groups_;
  std::atomic<int64_t> done_ = 0;
  int64_t total_ = 0;
  std::mutex mutex_;
  std::condition_variable ended_;
  int running_ = 0;
  std::exception_ptr error_;
  std::vector<std::jthread> threads_;
};

}  // namespace

Arena::Arena(int64_t bytes, const std::string& what) : bytes_(bytes) {
  if (bytes < 0) throw std::logic_error("Arena: negative size for " + what);
  if (bytes == 0) return;
  const HostMemoryLimit limit = available_host_memory();
  if (bytes > limit.bytes) {
    failf("{} needs {} of host memory, but only {} are available (limit: {}). Free memory or choose a smaller plan.",
          what, format_bytes(bytes), format_bytes(limit.bytes), limit.source);
  }
  data_ = map_aligned(bytes, what);
  madvise(data_, static_cast<size_t>(bytes), MADV_HUGEPAGE);  // a wish: small pages work, too
}

Arena::Arena(int64_t bytes, const std::string& what, const NumaNode& node) : Arena(bytes, what) {
  node_ = node;
  if (bytes > 0) prefer_node(data_, bytes, node.id);
}

Arena::Arena(Arena&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)),
      bytes_(std::exchange(other.bytes_, 0)),
      used_(std::exchange(other.used_, 0)),
      node_(std::move(other.node_)) {}

Arena& Arena::operator=(Arena&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  std::swap(used_, other.used_);
  std::swap(node_, other.node_);
  return *this;
}

Arena::~Arena() {
  if (data_ != nullptr) munmap(data_, static_cast<size_t>(round_up(bytes_, kPage)));
}

int64_t Arena::footprint(int64_t bytes) { return round_up(bytes, kPage); }

void* Arena::take(int64_t bytes) {
  if (bytes < 0 || used_ + bytes > bytes_) {
    throw std::logic_error("Arena: " + std::to_string(bytes) + " bytes wanted at " + std::to_string(used_) + " of " +
                           std::to_string(bytes_));
  }
  void* range = static_cast<std::byte*>(data_) + used_;
  // The last range need not be padded: an arena of exactly that size has room for it.
  used_ = std::min(used_ + footprint(bytes), bytes_);
  return range;
}

void touch(std::span<const Arena* const> arenas, int threads, const TouchProgress& progress) {
  std::vector<NumaNode> nodes;
  for (const Arena* arena : arenas) {
    const auto same = [&](const NumaNode& node) { return node.id == arena->node().id; };
    if (arena->bytes() > 0 && std::none_of(nodes.begin(), nodes.end(), same)) nodes.push_back(arena->node());
  }
  Touching touching;
  for (const NumaNode& node : nodes) {
    std::vector<Piece> pieces = pieces_of(arenas, node.id);
    const int share = std::max(threads / static_cast<int>(nodes.size()), 1);
    const int useful = static_cast<int>(pieces.size());
    touching.start(std::move(pieces), node, std::min(share, useful));
  }
  touching.wait(progress);
}

}  // namespace slidedp
