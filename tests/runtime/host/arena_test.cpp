#include "runtime/host/arena.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <stdexcept>
#include <utility>

#include "model/base/error.h"

namespace slidedp {
namespace {

namespace fs = std::filesystem;

// A made-up /proc and /sys.
class HostMemoryTest : public testing::Test {
 protected:
  HostMemoryTest()
      : root_(fs::path(testing::TempDir()) / testing::UnitTest::GetInstance()->current_test_info()->name()) {
    fs::remove_all(root_);
    write("proc/meminfo", "MemTotal:       2000 kB\nMemFree:  10 kB\nMemAvailable:    1000 kB\n");
  }
  ~HostMemoryTest() override { fs::remove_all(root_); }
  void write(const std::string& file, const std::string& text) {
    fs::create_directories((root_ / file).parent_path());
    std::ofstream(root_ / file) << text;
  }
  fs::path root_;
};

TEST_F(HostMemoryTest, WithoutLimitsItIsMemAvailable) {
  const HostMemoryLimit limit = available_host_memory(root_);
  EXPECT_EQ(limit.bytes, 1000 * 1024);
  EXPECT_EQ(limit.source, "MemAvailable");
}

TEST_F(HostMemoryTest, Version2LimitMinusUsePlusFileCache) {
  write("proc/self/cgroup", "0::/job\n");
  write("sys/fs/cgroup/job/memory.max", "600000\n");
  write("sys/fs/cgroup/job/memory.current", "200000\n");
  write("sys/fs/cgroup/job/memory.stat", "anon 1\nfile 99999\ninactive_file 3000\nactive_file 400\nslab 7\n");
  const HostMemoryLimit limit = available_host_memory(root_);
  EXPECT_EQ(limit.bytes, 600000 - 200000 + 3400);
  EXPECT_THAT(limit.source, testing::EndsWith("sys/fs/cgroup/job"));
}

TEST_F(HostMemoryTest, AParentsLimitBindsToo) {
  write("proc/self/cgroup", "0::/slice/job\n");
  write("sys/fs/cgroup/slice/job/memory.max", "max\n");
  write("sys/fs/cgroup/slice/job/memory.current", "5\n");
  write("sys/fs/cgroup/slice/memory.max", "300000\n");
  write("sys/fs/cgroup/slice/memory.current", "100000\n");
  EXPECT_EQ(available_host_memory(root_).bytes, 200000);
}

TEST_F(HostMemoryTest, AContainersOwnGroupIsTheMountsRoot) {
  write("proc/self/cgroup", "0::/outside/name\n");
  write("sys/fs/cgroup/memory.max", "50000\n");
  write("sys/fs/cgroup/memory.current", "60000\n");
  EXPECT_EQ(available_host_memory(root_).bytes, 0) << "use beyond the limit leaves nothing, not less";
}

TEST_F(HostMemoryTest, Version1) {
  write("proc/self/cgroup", "5:cpu,cpuacct:/elsewhere\n4:hugetlb,memory:/box\n");
  write("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
  write("sys/fs/cgroup/memory/memory.usage_in_bytes", "1000\n");
  write("sys/fs/cgroup/memory/box/memory.limit_in_bytes", "500000\n");
  write("sys/fs/cgroup/memory/box/memory.usage_in_bytes", "100000\n");
  write("sys/fs/cgroup/memory/box/memory.stat", "inactive_file 1\ntotal_inactive_file 20\ntotal_active_file 30\n");
  EXPECT_EQ(available_host_memory(root_).bytes, 400050);
}

TEST_F(HostMemoryTest, NoMeminfoIsAnError) {
  fs::remove(root_ / "proc/meminfo");
  EXPECT_THROW(available_host_memory(root_), Error);
}

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
