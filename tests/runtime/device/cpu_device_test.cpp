#include "runtime/device/cpu/cpu_device.h"

#include <gmock/gmock.h>

#include <atomic>
#include <cstring>
#include <numeric>

#include "model/base/error.h"
#include "runtime/device/clock.h"
#include "tests/runtime/device/support.h"

namespace slidedp {
namespace {

using test::Gate;
using test::random_delay;
using testing::Each;
using testing::HasSubstr;

template <typename F>
std::string error_of(F&& function) {
  try {
    function();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

TEST(CpuStream, RunsWorkInOrderOnOneOtherThread) {
  CpuDevice device(0);
  auto stream = device.create_stream("compute");
  std::vector<int> order;
  std::vector<std::thread::id> threads;
  for (int i = 0; i < 500; ++i) {
    device.launch(*stream, [&, i] {
      order.push_back(i);
      threads.push_back(std::this_thread::get_id());
    });
  }
  device.synchronize(*stream);
  std::vector<int> expected(500);
  std::iota(expected.begin(), expected.end(), 0);
  EXPECT_EQ(order, expected);
  EXPECT_THAT(threads, Each(threads.front()));
  EXPECT_NE(threads.front(), std::this_thread::get_id());
}

TEST(CpuDeviceCopy, GathersRows) {
  CpuDevice device(0);
  auto stream = device.create_stream("h2d");
  std::vector<uint16_t> host(7 * 3);
  std::iota(host.begin(), host.end(), uint16_t{0});
  const std::vector<int32_t> rows{1, 2, 6};
  const DeviceMemory memory = device.allocate(4 * 3 * 2, "rows");
  device.copy_rows_to_device(*stream, memory.data(), host.data(), rows.data(), 3, 3 * 2);
  device.copy_rows_to_device(*stream, memory.data(), host.data(), rows.data(), 0, 3 * 2);
  device.synchronize(*stream);
  const auto* copied = static_cast<const uint16_t*>(memory.data());
  EXPECT_EQ(std::vector(copied, copied + 12), (std::vector<uint16_t>{3, 4, 5, 6, 7, 8, 18, 19, 20, 0, 0, 0}));
  EXPECT_EQ(device.copied().to_device, 3 * 3 * 2);
  EXPECT_THROW(device.copy_rows_to_device(*stream, memory.data(), host.data(), rows.data(), -1, 6), std::logic_error);
}

TEST(CpuStream, StreamsOfOneDeviceDoNotWaitForEachOther) {
  CpuDevice device(0);
  auto blocked = device.create_stream("blocked");
  auto free = device.create_stream("free");
  Gate gate;
  device.launch(*blocked, gate.work());
  bool ran = false;
  device.launch(*free, [&] { ran = true; });
  device.synchronize(*free);
  EXPECT_TRUE(ran);
  gate.open();
  device.synchronize(*blocked);
}

TEST(CpuStream, NotifyComesAfterEarlierWork) {
  CpuDevice device(0);
  auto stream = device.create_stream("d2h");
  int value = 0;
  std::promise<int> seen;
  device.launch(*stream, [&] {
    random_delay(1);
    value = 7;
  });
  device.notify(*stream, [&] { seen.set_value(value); });
  EXPECT_EQ(seen.get_future().get(), 7);
}

TEST(CpuStream, OfAnotherDeviceIsRefused) {
  CpuDevice device(0), other(1);
  auto stream = other.create_stream("compute");
  EXPECT_THROW(device.launch(*stream, [] {}), std::logic_error);
  EXPECT_THROW(device.synchronize(*stream), std::logic_error);
}

TEST(CpuEvent, NeverRecordedIsComplete) {
  CpuDevice device(0);
  auto stream = device.create_stream("compute");
  auto event = device.create_event();
  EXPECT_TRUE(event->complete());
  event->synchronize();
  bool ran = false;
  device.wait(*stream, *event);
  device.launch(*stream, [&] { ran = true; });
  device.synchronize(*stream);
  EXPECT_TRUE(ran);
  EXPECT_THROW(device.timestamp(*event), std::logic_error);
}

TEST(CpuEvent, CompletesWithTheWorkBeforeIt) {
  CpuDevice device(0);
  auto stream = device.create_stream("compute");
  auto event = device.create_event();
  Gate gate;
  int value = 0;
  device.launch(*stream, gate.work());
  device.launch(*stream, [&] { value = 1; });
  device.record(*stream, *event);
  EXPECT_FALSE(event->complete());
  EXPECT_THROW(device.timestamp(*event), std::logic_error);
  gate.open();
  event->synchronize();
  EXPECT_TRUE(event->complete());
  EXPECT_EQ(value, 1);
}

TEST(CpuEvent, WaitRefersToTheLastRecordBeforeIt) {
  CpuDevice device(0);
  auto a = device.create_stream("a");
  auto b = device.create_stream("b");
  auto event = device.create_event();
  Gate second;
  std::atomic<int> value = 0;
  int seen_first = 0, seen_second = 0;
  device.launch(*a, [&] {
    random_delay(3);
    value = 1;
  });
  device.record(*a, *event);
  device.wait(*b, *event);
  device.launch(*b, [&] { seen_first = value; });
  device.launch(*a, second.work());
  device.launch(*a, [&] { value = 2; });
  device.record(*a, *event);
  // Returns although the second record cannot be reached yet.
  device.synchronize(*b);
  EXPECT_EQ(seen_first, 1);
  EXPECT_FALSE(event->complete());
  device.wait(*b, *event);
  device.launch(*b, [&] { seen_second = value; });
  second.open();
  device.synchronize(*b);
  EXPECT_EQ(seen_second, 2);
}

TEST(CpuEvent, OutlivedByItsWaits) {
  CpuDevice device(0);
  auto a = device.create_stream("a");
  auto b = device.create_stream("b");
  Gate gate;
  int value = 0, seen = 0;
  {
    auto event = device.create_event();
    device.launch(*a, gate.work());
    device.launch(*a, [&] { value = 5; });
    device.record(*a, *event);
    device.wait(*b, *event);
  }
  device.launch(*b, [&] { seen = value; });
  gate.open();
  device.synchronize(*b);
  EXPECT_EQ(seen, 5);
}

TEST(CpuEvent, OrdersWorkOfTwoDevices) {
  CpuDevice first(0), second(1);
  auto a = first.create_stream("comm");
  auto b = second.create_stream("comm");
  auto ping = first.create_event();
  auto pong = second.create_event();
  // Unsynchronized on purpose: only the events keep the two workers apart.
  int64_t value = 0;
  bool ordered = true;
  for (uint32_t i = 0; i < 300; ++i) {
    first.wait(*a, *pong);
    first.launch(*a, [&, i] {
      ordered = ordered && value == 2 * i;
      random_delay(i);
      ++value;
    });
    first.record(*a, *ping);
    second.wait(*b, *ping);
    second.launch(*b, [&, i] {
      ordered = ordered && value == 2 * i + 1;
      random_delay(i + 1000);
      ++value;
    });
    second.record(*b, *pong);
  }
  pong->synchronize();
  EXPECT_TRUE(pong->complete());
  EXPECT_TRUE(ordered);
  EXPECT_EQ(value, 600);
}

TEST(CpuEvent, TimestampsShareTheProcessClock) {
  CpuDevice first(0), second(1);
  auto a = first.create_stream("a");
  auto b = second.create_stream("b");
  auto start = first.create_event(), middle = first.create_event(), end = second.create_event();
  const double before = process_seconds();
  first.record(*a, *start);
  first.launch(*a, [] { std::this_thread::sleep_for(std::chrono::milliseconds(2)); });
  first.record(*a, *middle);
  second.wait(*b, *middle);
  second.record(*b, *end);
  end->synchronize();
  const double after = process_seconds();
  EXPECT_LE(before, first.timestamp(*start));
  EXPECT_LE(first.timestamp(*start) + 2e-3, first.timestamp(*middle));
  EXPECT_LE(first.timestamp(*middle), second.timestamp(*end));
  EXPECT_LE(second.timestamp(*end), after);
}

TEST(CpuDevice, CopiesInStreamOrderAndCountsTheirBytes) {
  CpuDevice device(0);
  auto stream = device.create_stream("h2d");
  std::vector<int32_t> source(1000), target(1000, -1);
  std::iota(source.begin(), source.end(), 0);
  const int64_t bytes = 4000;
  DeviceMemory memory = device.allocate(bytes, "slot");
  auto* data = static_cast<int32_t*>(memory.data());
  device.copy_to_device(*stream, data, source.data(), bytes);
  device.launch(*stream, [data] {
    for (int i = 0; i < 1000; ++i) data[i] *= 3;
  });
  device.copy_to_host(*stream, target.data(), data, bytes / 2);
  device.copy_to_host(*stream, target.data(), data, 0);
  device.synchronize(*stream);
  for (int i = 0; i < 1000; ++i) EXPECT_EQ(target[i], i < 500 ? 3 * i : -1) << i;
  EXPECT_EQ(device.copied().to_device, bytes);
  EXPECT_EQ(device.copied().to_host, bytes / 2);
}

TEST(CpuDevice, MemoryIsZeroedAndAligned) {
  CpuDevice device(0);
  for (int64_t bytes : {1, 255, 256, 257, 100'000, 5'000'000}) {
    for (int turn = 0; turn < 2; ++turn) {  // the second may get the first one's memory back
      DeviceMemory memory = device.allocate(bytes, "buffer");
      EXPECT_EQ(memory.bytes(), bytes);
      EXPECT_EQ(reinterpret_cast<uintptr_t>(memory.data()) % 256, 0u);
      const auto* data = static_cast<const uint8_t*>(memory.data());
      EXPECT_TRUE(std::all_of(data, data + bytes, [](uint8_t byte) { return byte == 0; })) << bytes;
      std::memset(memory.data(), 0xff, static_cast<size_t>(bytes));
    }
  }
}

TEST(CpuDevice, CountsMemoryAsAskedFor) {
  CpuDevice device(3, 1000);
  EXPECT_EQ(device.memory().budget, 1000);
  DeviceMemory a = device.allocate(600, "a");
  {
    DeviceMemory b = device.allocate(400, "b");  // exactly full
    EXPECT_EQ(device.memory().in_use, 1000);
  }
  EXPECT_EQ(device.memory().in_use, 600);
  EXPECT_EQ(device.memory().peak, 1000);
  DeviceMemory moved = std::move(a);
  EXPECT_EQ(device.memory().in_use, 600);
  moved = device.allocate(100, "c");  // the new one first, then the old one goes
  EXPECT_EQ(device.memory().in_use, 100);
  moved = DeviceMemory();
  EXPECT_EQ(device.memory().in_use, 0);
  EXPECT_EQ(device.memory().peak, 1000);
}

TEST(CpuDevice, RefusesWhatTheBudgetCannotHold) {
  CpuDevice device(3, 3 << 20);
  DeviceMemory held = device.allocate(2 << 20, "rank 3 weight slot layer[0]");
  const std::string message = error_of([&] { device.allocate((1 << 20) + 1, "rank 3 weight slot layer[1]"); });
  EXPECT_THAT(message, HasSubstr("weight slot layer[1]"));
  EXPECT_THAT(message, HasSubstr("1048577"));
  EXPECT_THAT(message, HasSubstr("2.0 MiB"));
  EXPECT_THAT(message, HasSubstr("3.0 MiB"));
  EXPECT_EQ(device.memory().in_use, 2 << 20);
  EXPECT_EQ(device.memory().peak, 2 << 20);
  EXPECT_NO_THROW(device.allocate(1 << 20, "rank 3 weight slot layer[1]"));
}

TEST(CpuDevice, ReportsAHostWithoutMemory) {
  CpuDevice device(0);  // no budget
  const std::string message = error_of([&] { device.allocate(int64_t{1} << 60, "an absurd buffer"); });
  EXPECT_THAT(message, HasSubstr("an absurd buffer"));
  EXPECT_EQ(device.memory().in_use, 0);
  EXPECT_EQ(device.memory().peak, 0);
}

}  // namespace
}  // namespace slidedp
