// The CUDA device, as the only rank of its GPU and as one of several that share it.
#include "runtime/device/cuda/cuda_device.h"

#include <gmock/gmock.h>

#include <algorithm>
#include <numeric>

#include "runtime/device/clock.h"
#include "runtime/device/cuda/pinned_memory.h"
#include "runtime/host/arena.h"
#include "tests/runtime/device/cuda/support.h"

namespace slidedp {
namespace {

using test::error_of;
using test::hold;
using test::PinnedFlag;
using test::PinnedVector;
using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;

class CudaDeviceTest : public test::NeedsGpu<testing::TestWithParam<bool>> {
 protected:
  static CudaDeviceOptions options(int rank = 0, int64_t budget = 0) { return {rank, 0, budget, GetParam()}; }
};
INSTANTIATE_TEST_SUITE_P(Sharing, CudaDeviceTest, testing::Bool(),
                         [](const auto& info) { return info.param ? "Shared" : "Alone"; });

TEST_P(CudaDeviceTest, MemoryIsZeroedAlignedAndCountedAsAskedFor) {
  CudaDevice device(options(3, 20'000'000));
  EXPECT_EQ(device.memory().budget, 20'000'000);
  for (const int64_t bytes : {1, 255, 257, 100'000, 5'000'000}) {
    for (int turn = 0; turn < 2; ++turn) {  // the second may get the first one's memory back
      DeviceMemory memory = device.allocate(bytes, "buffer");
      EXPECT_EQ(memory.bytes(), bytes);
      EXPECT_EQ(device.memory().in_use, bytes);
      EXPECT_EQ(reinterpret_cast<uintptr_t>(memory.data()) % 256, 0u);
      const auto values = test::download<uint8_t>(memory);
      EXPECT_TRUE(std::all_of(values.begin(), values.end(), [](uint8_t byte) { return byte == 0; })) << bytes;
      check_cuda(cudaMemset(memory.data(), 0xff, static_cast<size_t>(bytes)), "cudaMemset");
    }
  }
  EXPECT_EQ(device.memory().in_use, 0);
  EXPECT_EQ(device.memory().peak, 5'000'000);
}

TEST_P(CudaDeviceTest, RefusesWhatTheBudgetCannotHold) {
  CudaDevice device(options(3, 3 << 20));
  const DeviceMemory held = device.allocate(2 << 20, "rank 3 weight slot layer[0]");
  const std::string message = error_of([&] { device.allocate((1 << 20) + 1, "rank 3 weight slot layer[1]"); });
  EXPECT_THAT(message, AllOf(HasSubstr("weight slot layer[1]"), HasSubstr("1048577"), HasSubstr("2.0 MiB"),
                             HasSubstr("3.0 MiB")));
  EXPECT_EQ(device.memory().in_use, 2 << 20);
  EXPECT_NO_THROW(device.allocate(1 << 20, "rank 3 weight slot layer[1]"));
}

TEST_P(CudaDeviceTest, ReportsAGpuWithoutMemory) {
  CudaDevice device(options(0, int64_t{1} << 60));
  const std::string message = error_of([&] { device.allocate(int64_t{1} << 50, "an absurd slot"); });
  EXPECT_THAT(message,
              AllOf(HasSubstr("an absurd slot"), HasSubstr("budget"), HasSubstr("are free"), HasSubstr("nvidia-smi")));
  EXPECT_EQ(device.memory().in_use, 0);
  EXPECT_EQ(device.memory().peak, 0);
  EXPECT_NO_THROW(device.allocate(1 << 20, "a slot"));
}

TEST_P(CudaDeviceTest, ReservedMemoryIsOnePieceThatIsGivenBackWhole) {
  CudaDevice device(options(0, 100'000'000));
  const auto in_use = [] {
    size_t free = 0, total = 0;
    check_cuda(cudaMemGetInfo(&free, &total), "cudaMemGetInfo");
    return static_cast<int64_t>(total - free);
  };
  {  // what CUDA itself takes at the first calls
    const DeviceMemory first = device.allocate(1 << 20, "first");
    check_cuda(cudaMemset(first.data(), 0xff, 1 << 20), "cudaMemset");
    test::download<uint8_t>(first);
  }
  const int64_t before = in_use();
  // Each just above a multiple of 2 MiB, to which the system rounds.
  const std::vector<int64_t> sizes(20, (4 << 20) + 1);
  for (int turn = 0; turn < 2; ++turn) {
    device.reserve(sizes);
    std::vector<DeviceMemory> memory;
    for (const int64_t size : sizes) {
      memory.push_back(device.allocate(size, "slot"));
      if (memory.size() == 1) continue;
      EXPECT_EQ(static_cast<char*>(memory.back().data()) - static_cast<char*>(memory[memory.size() - 2].data()),
                (4 << 20) + 256);
    }
    const DeviceMemory more = device.allocate(1000, "more");  // beside it
    EXPECT_LE(in_use() - before, 20 * ((4 << 20) + 256) + (4 << 20));
    device.reserve(sizes);  // not while the first is in use
    const auto values = test::download<uint8_t>(memory[7]);
    EXPECT_TRUE(std::all_of(values.begin(), values.end(), [](uint8_t byte) { return byte == 0; }));
    for (const DeviceMemory& one : memory) check_cuda(cudaMemset(one.data(), 0xff, 1 << 20), "cudaMemset");
  }
  EXPECT_LE(in_use() - before, 4 << 20);
  EXPECT_EQ(device.memory().in_use, 0);
}

TEST_P(CudaDeviceTest, WhatAllUseOnTheGpuIncludesThis) {
  CudaDevice device(options());
  const DeviceMemory memory = device.allocate(int64_t{1} << 30, "buffer");
  size_t free = 0, total = 0;
  check_cuda(cudaMemGetInfo(&free, &total), "cudaMemGetInfo");
  EXPECT_GE(device.used_by_all(), memory.bytes());
  EXPECT_LE(device.used_by_all(), static_cast<int64_t>(total));
}

TEST_P(CudaDeviceTest, WithoutBudgetHasWhatIsFree) {
  CudaDevice device(options());
  size_t free = 0, total = 0;
  check_cuda(cudaMemGetInfo(&free, &total), "cudaMemGetInfo");
  // Others may take or give back a little meanwhile.
  EXPECT_GT(device.memory().budget, static_cast<int64_t>(free) - (int64_t{1} << 30));
  EXPECT_LE(device.memory().budget, static_cast<int64_t>(total));
}

TEST_P(CudaDeviceTest, CopiesAndKernelsInStreamOrder) {
  CudaDevice device(options());
  auto stream = device.create_stream("h2d");
  constexpr int64_t kCount = 1 << 20;
  PinnedVector<int32_t> source(device, kCount), target(device, kCount);
  std::iota(source.data(), source.data() + kCount, 0);
  DeviceMemory memory = device.allocate(kCount * 4, "slot");
  auto* data = static_cast<int32_t*>(memory.data());
  for (int turn = 0; turn < 10; ++turn) {
    std::fill_n(target.data(), kCount, -1);
    device.copy_to_device(*stream, data, source.data(), kCount * 4);
    device.launch(*stream, [data, turn] { test::scale(data, kCount, 3, turn, current_cuda_stream()); });
    device.copy_to_host(*stream, target.data(), data, kCount * 2);
    device.copy_to_host(*stream, target.data(), data, 0);
    device.synchronize(*stream);
    for (int64_t i = 0; i < kCount; ++i) ASSERT_EQ(target[i], i < kCount / 2 ? 3 * i + turn : -1) << i;
  }
}

TEST_P(CudaDeviceTest, ComputeStreamIsTheSameForAll) {
  CudaDevice device(options());
  cudaStream_t seen[3] = {};
  std::unique_ptr<Stream> streams[] = {device.create_stream("compute"), device.create_stream("compute"),
                                       device.create_stream("comm")};
  for (int i = 0; i < 3; ++i) {
    device.launch(*streams[i], [&seen, i] { seen[i] = current_cuda_stream(); });
    device.synchronize(*streams[i]);
  }
  EXPECT_EQ(seen[0], device.compute_stream());
  EXPECT_EQ(seen[1], device.compute_stream());
  EXPECT_NE(seen[2], device.compute_stream());
  EXPECT_NE(seen[2], nullptr);
  EXPECT_EQ(current_cuda_stream(), nullptr);
}

// Copies across the border between two registrations, from an address that is not aligned to a page.
TEST_P(CudaDeviceTest, RegistersInPiecesAndCopiesAcrossThem) {
  CudaDevice device(options());
  auto stream = device.create_stream("h2d");
  constexpr int64_t kPiece = int64_t{2} << 30, kSkew = 128, kCopy = 1 << 20;
  Arena arena(kPiece + (int64_t{8} << 20), "a range of two pieces");
  char* range = static_cast<char*>(arena.take(arena.bytes())) + kSkew;
  device.register_host(range, arena.bytes() - kSkew);
  EXPECT_EQ(PinnedMemory::process().bytes_in_piece(range, arena.bytes() - kSkew), kPiece - kSkew);
  char* border = range + kPiece - kSkew;
  auto* from = reinterpret_cast<int32_t*>(border - kCopy / 2);
  for (int64_t i = 0; i < kCopy / 4; ++i) from[i] = static_cast<int32_t>(i * 7);
  DeviceMemory memory = device.allocate(kCopy, "slot");
  auto* data = static_cast<int32_t*>(memory.data());
  device.copy_to_device(*stream, data, from, kCopy);
  device.launch(*stream, [data] { test::scale(data, kCopy / 4, 1, 1, current_cuda_stream()); });
  device.copy_to_host(*stream, from, data, kCopy);
  device.synchronize(*stream);
  for (int64_t i = 0; i < kCopy / 4; ++i) ASSERT_EQ(from[i], i * 7 + 1) << i;
  device.unregister_host(range);
  EXPECT_EQ(PinnedMemory::process().bytes_in_piece(range, kPiece * 2), kPiece * 2);
  EXPECT_NO_THROW(device.register_host(range, 1 << 20));  // it was given back
  device.unregister_host(range);
}

TEST_P(CudaDeviceTest, RefusedRegistrationSaysWhatToDo) {
  CudaDevice device(options());
  Arena arena(1 << 20, "a range");
  device.register_host(arena.data(), 1 << 20);
  EXPECT_THAT(error_of([&] { device.register_host(arena.data(), 1 << 20); }), HasSubstr("ulimit -l"));
  device.unregister_host(arena.data());
}

TEST_P(CudaDeviceTest, GathersRows) {
  CudaDevice device(options());
  auto stream = device.create_stream("h2d");
  for (const int64_t row_bytes : {16, 5120, 132, 10}) {  // by 16, 4 and 1 bytes
    constexpr int64_t kRows = 1000, kPicked = 333;
    PinnedVector<uint8_t> matrix(device, kRows * row_bytes);
    PinnedVector<int32_t> rows(device, kPicked);
    for (int64_t i = 0; i < kRows * row_bytes; ++i) matrix[i] = static_cast<uint8_t>(i * 31 / 7);
    for (int64_t i = 0; i < kPicked; ++i) rows[i] = static_cast<int32_t>(i * 757 % kRows);
    DeviceMemory memory = device.allocate(kPicked * row_bytes + 16, "rows");
    device.copy_rows_to_device(*stream, memory.data(), matrix.data(), rows.data(), kPicked, row_bytes);
    device.copy_rows_to_device(*stream, memory.data(), matrix.data(), rows.data(), 0, row_bytes);
    device.synchronize(*stream);
    const auto got = test::download<uint8_t>(memory);
    for (int64_t i = 0; i < kPicked; ++i) {
      const uint8_t* expected = matrix.data() + rows[i] * row_bytes;
      ASSERT_EQ(std::memcmp(got.data() + i * row_bytes, expected, static_cast<size_t>(row_bytes)), 0)
          << row_bytes << " " << i;
    }
    for (int64_t i = kPicked * row_bytes; i < memory.bytes(); ++i) ASSERT_EQ(got[static_cast<size_t>(i)], 0);
  }
}

TEST_P(CudaDeviceTest, GathersRowsOfMemoryThatIsNotPinned) {
  CudaDevice device(options());
  auto stream = device.create_stream("h2d");
  const std::vector<uint16_t> matrix{1, 2, 3, 4, 5, 6};
  const std::vector<int32_t> rows{2, 0};
  DeviceMemory memory = device.allocate(2 * 4, "rows");
  device.copy_rows_to_device(*stream, memory.data(), matrix.data(), rows.data(), 2, 4);
  device.synchronize(*stream);
  EXPECT_THAT(test::download<uint16_t>(memory), ElementsAre(5, 6, 1, 2));
}

TEST_P(CudaDeviceTest, EventNeverRecordedIsComplete) {
  CudaDevice device(options());
  auto stream = device.create_stream("compute");
  auto event = device.create_event();
  EXPECT_TRUE(event->complete());
  event->synchronize();
  device.wait(*stream, *event);
  device.synchronize(*stream);
  EXPECT_THROW(device.timestamp(*event), std::logic_error);
}

TEST_P(CudaDeviceTest, EventCompletesWithTheWorkBeforeIt) {
  CudaDevice device(options());
  auto stream = device.create_stream("compute");
  auto event = device.create_event();
  PinnedFlag flag;
  hold(device, *stream, flag);
  device.record(*stream, *event);
  EXPECT_FALSE(event->complete());
  EXPECT_THROW(device.timestamp(*event), std::logic_error);
  flag.set();
  event->synchronize();
  EXPECT_TRUE(event->complete());
}

TEST_P(CudaDeviceTest, WaitRefersToTheLastRecordBeforeIt) {
  CudaDevice device(options());
  auto a = device.create_stream("a"), b = device.create_stream("b");
  auto event = device.create_event();
  DeviceMemory memory = device.allocate(4, "value");
  PinnedVector<int32_t> seen(device, 2);
  auto* value = static_cast<int32_t*>(memory.data());
  PinnedFlag first, second;
  hold(device, *a, first);
  device.launch(*a, [value] { test::scale(value, 1, 0, 1, current_cuda_stream()); });
  device.record(*a, *event);
  device.wait(*b, *event);
  device.copy_to_host(*b, &seen[0], value, 4);
  hold(device, *a, second);
  device.record(*a, *event);
  first.set();
  device.synchronize(*b);  // although the second record is not reached
  EXPECT_EQ(seen[0], 1);
  EXPECT_FALSE(event->complete());
  second.set();
  device.wait(*b, *event);
  device.synchronize(*b);
  EXPECT_TRUE(event->complete());
}

TEST_P(CudaDeviceTest, EventsOrderTwoDevices) {
  CudaDevice first(options(0)), second(options(1));
  auto a = first.create_stream("comm"), b = second.create_stream("comm");
  auto ping = first.create_event(), pong = second.create_event();
  DeviceMemory memory = first.allocate(4, "value");
  auto* value = static_cast<int32_t*>(memory.data());
  int32_t expected = 0;
  for (int i = 0; i < 300; ++i) {
    first.wait(*a, *pong);
    first.launch(*a, [value] { test::scale(value, 1, 3, 1, current_cuda_stream()); });
    first.record(*a, *ping);
    second.wait(*b, *ping);
    second.launch(*b, [value] { test::scale(value, 1, -1, 2, current_cuda_stream()); });
    second.record(*b, *pong);
    expected = static_cast<int32_t>(2 - (3u * static_cast<uint32_t>(expected) + 1));
  }
  pong->synchronize();
  EXPECT_EQ(test::download<int32_t>(memory)[0], expected);
}

// The clocks are put together to some 10 us (half of the time that CUDA takes to answer); the tolerance allows for a
// busy machine's scheduling, and is far from what a wrong unit or origin would give.
constexpr double kClockTolerance = 2e-3;

TEST_P(CudaDeviceTest, TimestampsAreOnTheProcessClock) {
  CudaDevice first(options(0)), second(options(1));
  auto a = first.create_stream("a"), b = second.create_stream("b");
  // The second turn comes after the clocks' anchors have been renewed.
  for (int turn = 0; turn < 2; ++turn) {
    auto start = first.create_event(), middle = first.create_event(), end = second.create_event();
    PinnedFlag flag;
    const double before = process_seconds();
    first.record(*a, *start);
    hold(first, *a, flag);
    first.record(*a, *middle);
    second.wait(*b, *middle);
    second.record(*b, *end);
    if (turn == 0) std::this_thread::sleep_for(std::chrono::milliseconds(4500));
    const double released = process_seconds();
    flag.set();
    end->synchronize();
    const double after = process_seconds();
    EXPECT_GE(first.timestamp(*start), before - kClockTolerance);
    EXPECT_LE(first.timestamp(*start), released + kClockTolerance);
    EXPECT_GE(first.timestamp(*middle), released - kClockTolerance);
    EXPECT_GE(second.timestamp(*end), first.timestamp(*middle) - kClockTolerance);  // two clocks
    EXPECT_LE(second.timestamp(*end), after + kClockTolerance);
  }
}

TEST_P(CudaDeviceTest, TimestampsOfOneStreamKeepTheirOrder) {
  CudaDevice device(options());
  auto stream = device.create_stream("a");
  std::vector<std::unique_ptr<Event>> events;
  for (int i = 0; i < 2000; ++i) {
    events.push_back(device.create_event());
    device.record(*stream, *events.back());
  }
  device.synchronize(*stream);
  for (size_t i = 1; i < events.size(); ++i) {
    ASSERT_LE(device.timestamp(*events[i - 1]), device.timestamp(*events[i])) << i;
  }
}

TEST_P(CudaDeviceTest, NotifyComesAfterEarlierWork) {
  CudaDevice device(options());
  auto stream = device.create_stream("d2h");
  DeviceMemory memory = device.allocate(4, "value");
  PinnedVector<int32_t> landed(device, 1);
  auto* value = static_cast<int32_t*>(memory.data());
  PinnedFlag flag;
  std::promise<int> seen;
  hold(device, *stream, flag);
  device.launch(*stream, [value] { test::scale(value, 1, 0, 7, current_cuda_stream()); });
  device.copy_to_host(*stream, landed.data(), value, 4);
  device.notify(*stream, [&] { seen.set_value(landed[0]); });
  flag.set();
  EXPECT_EQ(seen.get_future().get(), 7);
}

TEST_P(CudaDeviceTest, StreamOfAnotherDeviceIsRefused) {
  CudaDevice device(options(0)), other(options(1));
  auto stream = other.create_stream("compute");
  EXPECT_THROW(device.launch(*stream, [] {}), std::logic_error);
  EXPECT_THROW(device.synchronize(*stream), std::logic_error);
}

TEST(PinnedPieces, EndOnPagesAndCoverTheRange) {
  constexpr int64_t kPiece = int64_t{2} << 30;
  EXPECT_EQ(end_of_piece(0, 100, 0), 100);
  EXPECT_EQ(end_of_piece(0, 3 * kPiece, 0), kPiece);
  EXPECT_EQ(end_of_piece(kPiece - 1, 3 * kPiece, 0), kPiece);
  EXPECT_EQ(end_of_piece(kPiece, 3 * kPiece, 0), 2 * kPiece);
  EXPECT_EQ(end_of_piece(0, 3 * kPiece, 100), kPiece - 100);
  EXPECT_EQ(end_of_piece(kPiece - 100, 3 * kPiece, 100), 2 * kPiece - 100);
  EXPECT_EQ(end_of_piece(2 * kPiece, 2 * kPiece + 5, 0), 2 * kPiece + 5);
}

}  // namespace
}  // namespace slidedp
