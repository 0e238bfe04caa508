#include "runtime/host/arena.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <utility>
#include <vector>

#include "model/base/error.h"
#include "model/base/types.h"
#include "runtime/host/machine_facts.h"

namespace slidedp {
namespace {

TEST(Arena, HandsOutAlignedZeroedRanges) {
  EXPECT_EQ(Arena::footprint(1), 4096);
  EXPECT_EQ(Arena::footprint(4096), 4096);
  Arena arena(Arena::footprint(5000) + Arena::footprint(1) + 10, "Test memory");
  auto* first = static_cast<char*>(arena.take(5000));
  auto* second = static_cast<char*>(arena.take(1));
  auto* third = static_cast<char*>(arena.take(10));
  EXPECT_EQ(first, arena.data());
  EXPECT_EQ(second - first, 8192);
  EXPECT_EQ(third - second, 4096);
  EXPECT_TRUE(std::all_of(first, first + arena.bytes(), [](char byte) { return byte == 0; }));
  EXPECT_THROW(arena.take(1), std::logic_error);
}

TEST(Arena, Moves) {
  Arena from(8192, "Test memory");
  void* data = from.take(100);
  std::memset(data, 1, 100);
  Arena to(4096, "Test memory");
  to = std::move(from);
  EXPECT_EQ(to.data(), data);
  EXPECT_EQ(to.bytes(), 8192);
  EXPECT_EQ(static_cast<char*>(to.take(100)) - static_cast<char*>(data), 4096);
  const Arena last(std::move(to));
  EXPECT_EQ(static_cast<char*>(last.data())[99], 1);
}

TEST(Arena, IsAlignedToHugePagesAndExactlySized) {
  const int64_t bytes = 5 * (int64_t{1} << 20) + 100;
  const Arena arena(bytes, "Test memory");
  EXPECT_EQ(reinterpret_cast<uintptr_t>(arena.data()) % (2 << 20), 0u);
  EXPECT_EQ(arena.bytes(), bytes);
  // Nothing is mapped beyond: the pages on both sides can be mapped by others.
  const auto free_at = [](std::byte* page) {
    void* got = mmap(page, 4096, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
    if (got != MAP_FAILED) munmap(got, 4096);
    return got == page;
  };
  auto* end = static_cast<std::byte*>(arena.data()) + round_up(bytes, 4096);
  EXPECT_FALSE(free_at(end - 4096));
  EXPECT_TRUE(free_at(end) || free_at(static_cast<std::byte*>(arena.data()) - 4096));
}

// Pages of the range that are in memory.
int64_t resident_pages(const Arena& arena) {
  std::vector<unsigned char> present(static_cast<size_t>(ceil_div(arena.bytes(), 4096)));
  EXPECT_EQ(mincore(arena.data(), static_cast<size_t>(arena.bytes()), present.data()), 0);
  return std::count_if(present.begin(), present.end(), [](unsigned char page) { return (page & 1) != 0; });
}

TEST(Arena, TouchCommitsEveryPageOfEveryArena) {
  const Arena first(3 * (int64_t{64} << 20) + 5, "Test memory");
  const Arena second(10000, "Test memory");
  EXPECT_EQ(resident_pages(first), 0);
  const Arena* both[] = {&first, &second};
  int64_t last = 0, total = 0;
  touch(both, 3, [&](int64_t done, int64_t all) {
    EXPECT_GE(done, last);
    last = done;
    total = all;
  });
  EXPECT_EQ(last, total);
  EXPECT_GE(total, first.bytes() + second.bytes());
  EXPECT_EQ(resident_pages(first), ceil_div(first.bytes(), 4096));
  EXPECT_EQ(resident_pages(second), 3);
  const auto* bytes = static_cast<const char*>(first.data());
  EXPECT_TRUE(std::all_of(bytes, bytes + first.bytes(), [](char byte) { return byte == 0; }));
}

TEST(Numa, EveryAllowedCoreBelongsToOneNode) {
  std::vector<int> cores;
  for (const NumaNode& node : numa_nodes()) cores.insert(cores.end(), node.cores.begin(), node.cores.end());
  std::sort(cores.begin(), cores.end());
  EXPECT_EQ(std::adjacent_find(cores.begin(), cores.end()), cores.end());
  EXPECT_EQ(static_cast<int>(cores.size()), usable_cores());
}

TEST(Arena, RefusalNamesWhatAndHowMuch) {
  try {
    Arena arena(int64_t{1} << 50, "The landing buffers");
    FAIL() << "1 PiB was allocated";
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), testing::HasSubstr("The landing buffers"));
    EXPECT_THAT(error.what(), testing::HasSubstr("limit: "));
  }
}

}  // namespace
}  // namespace slidedp
