#include "runtime/host/memory_limit.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <fstream>

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
    write("proc/meminfo", "MemTotal:       20000 kB\nMemFree:  10 kB\nMemAvailable:    1000 kB\n");
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

// Some virtual machines get their memory as they use it: MemTotal starts small.
TEST_F(HostMemoryTest, ACgroupThatMayHaveMoreThanTheMachineHasNowDecidesAlone) {
  write("proc/self/cgroup", "0::/job\n");
  write("sys/fs/cgroup/job/memory.max", "90000000\n");
  write("sys/fs/cgroup/job/memory.current", "10000000\n");
  EXPECT_EQ(available_host_memory(root_).bytes, 80'000'000);
}

TEST_F(HostMemoryTest, TheUsersWordWins) {
  declare_host_memory(12345);
  EXPECT_EQ(available_host_memory().bytes, 12345);
  EXPECT_EQ(available_host_memory().source, "--host-memory");
  declare_host_memory(0);
  EXPECT_NE(available_host_memory().source, "--host-memory");
}

TEST_F(HostMemoryTest, HugePagesAreMissedOnlyWhereTheyAreOff) {
  write("sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never\n");
  EXPECT_EQ(huge_page_note(root_), "");
  write("sys/kernel/mm/transparent_hugepage/enabled", "always madvise [never]\n");
  EXPECT_THAT(huge_page_note(root_), testing::HasSubstr("huge pages"));
}

TEST(LockedMemory, ANoteNamesBothNumbers) {
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_MEMLOCK, &before), 0);
  rlimit small = before;
  small.rlim_cur = 65536;
  ASSERT_EQ(setrlimit(RLIMIT_MEMLOCK, &small), 0);
  EXPECT_THAT(locked_memory_note(1 << 20),
              testing::AllOf(testing::HasSubstr("64.0 KiB"), testing::HasSubstr("1.0 MiB")));
  EXPECT_EQ(locked_memory_note(65536), "");
  ASSERT_EQ(setrlimit(RLIMIT_MEMLOCK, &before), 0);
}

}  // namespace
}  // namespace slidedp
