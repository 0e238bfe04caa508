// What happens when work throws, a device is aborted, or streams are destroyed: nobody hangs, nothing runs on results
// that are missing, the first error is told once. A hang would show as a timeout of the test program.
#include <gmock/gmock.h>

#include <atomic>
#include <optional>

#include "model/base/error.h"
#include "runtime/device/cpu/cpu_device.h"
#include "tests/runtime/device/support.h"

namespace slidedp {
namespace {

using test::Errors;
using test::Gate;
using test::random_delay;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

TEST(CpuFailure, FirstErrorIsReportedOnceAndLaterWorkSkipped) {
  CpuDevice device(0);
  Errors errors(device);
  auto stream = device.create_stream("compute");
  auto event = device.create_event();
  int before = 0, after = 0, notified = 0;
  int32_t source = 5, target = -1;
  device.launch(*stream, [&] { ++before; });
  device.launch(*stream, [] { throw Error("first"); });
  device.launch(*stream, [&] { ++after; });
  device.copy_to_host(*stream, &target, &source, 4);
  device.notify(*stream, [&] { ++notified; });
  device.record(*stream, *event);
  device.launch(*stream, [] { throw Error("second"); });
  device.synchronize(*stream);
  event->synchronize();
  EXPECT_EQ(before, 1);
  EXPECT_EQ(after, 0);
  EXPECT_EQ(target, -1);
  EXPECT_EQ(device.copied().to_host, 0);
  EXPECT_EQ(notified, 1);
  EXPECT_FALSE(event->complete());  // the work before it is not done
  EXPECT_THROW(device.timestamp(*event), std::logic_error);
  EXPECT_THAT(errors.messages(), ElementsAre("first"));
}

TEST(CpuFailure, InANotifyCallback) {
  CpuDevice device(0);
  Errors errors(device);
  auto stream = device.create_stream("d2h");
  int after = 0;
  device.notify(*stream, [] { throw std::runtime_error("callback"); });
  device.launch(*stream, [&] { ++after; });
  device.synchronize(*stream);
  EXPECT_EQ(after, 0);
  EXPECT_THAT(errors.messages(), ElementsAre("callback"));
}

TEST(CpuFailure, WithoutHandlerIsThrownBySynchronize) {
  CpuDevice device(0);
  auto stream = device.create_stream("compute");
  device.launch(*stream, [] { throw Error("nobody listens"); });
  EXPECT_THROW(device.synchronize(*stream), Error);
}

TEST(CpuFailure, StopsTheOtherStreamsAndNewOnes) {
  CpuDevice device(0);
  Errors errors(device);
  auto failing = device.create_stream("failing");
  auto other = device.create_stream("other");
  device.launch(*failing, [] { throw Error("failed"); });
  device.synchronize(*failing);
  int ran = 0, notified = 0;
  auto fresh = device.create_stream("fresh");
  for (Stream* stream : {other.get(), fresh.get()}) {
    device.launch(*stream, [&] { ++ran; });
    device.notify(*stream, [&] { ++notified; });
    device.synchronize(*stream);
  }
  EXPECT_EQ(ran, 0);
  EXPECT_EQ(notified, 2);
}

TEST(CpuFailure, SpreadsToDevicesThatWaitForItsResults) {
  CpuDevice failing(0), waiting(1);
  Errors failing_errors(failing), waiting_errors(waiting);
  auto a = failing.create_stream("a");
  auto b = waiting.create_stream("b");
  auto event = failing.create_event();
  Gate gate;
  failing.launch(*a, gate.work());
  failing.launch(*a, [] { throw Error("lost"); });
  failing.record(*a, *event);
  int ran = 0, notified = 0;
  waiting.wait(*b, *event);
  waiting.launch(*b, [&] { ++ran; });
  waiting.notify(*b, [&] { ++notified; });
  gate.open();
  waiting.synchronize(*b);
  EXPECT_EQ(ran, 0);
  EXPECT_EQ(notified, 1);
  EXPECT_THAT(failing_errors.messages(), ElementsAre("lost"));
  EXPECT_THAT(waiting_errors.messages(), IsEmpty());
}

TEST(CpuFailure, AfterAnAbortIsNotReported) {
  CpuDevice device(0);
  Errors errors(device);
  auto stream = device.create_stream("compute");
  Gate gate;
  std::promise<void> started;
  device.launch(*stream, [&, wait = gate.work()] {
    started.set_value();
    wait();
    throw Error("a consequence");
  });
  started.get_future().wait();
  device.abort();
  device.abort();
  gate.open();
  device.synchronize(*stream);
  EXPECT_THAT(errors.messages(), IsEmpty());
}

TEST(CpuFailure, HandlerMayAbortEveryDevice) {
  CpuDevice first(0), second(1);
  std::atomic<int> calls = 0;
  auto handler = [&](std::exception_ptr) {
    ++calls;
    first.abort();
    second.abort();
  };
  first.set_error_handler(handler);
  second.set_error_handler(handler);
  auto a = first.create_stream("a");
  auto b = second.create_stream("b");
  auto never = first.create_event();
  auto blocked = first.create_stream("blocked");
  Gate gate;
  first.launch(*blocked, gate.work());
  first.record(*blocked, *never);
  second.wait(*b, *never);
  first.launch(*a, [] { throw Error("stop"); });
  second.synchronize(*b);  // although `blocked` never got to its record
  EXPECT_EQ(calls, 1);
}

TEST(CpuAbort, WakesAStreamThatWaitsForAnotherDevice) {
  CpuDevice blocked(0), waiting(1);
  auto a = blocked.create_stream("a");
  auto b = waiting.create_stream("b");
  auto event = blocked.create_event();
  Gate gate;
  blocked.launch(*a, gate.work());
  blocked.record(*a, *event);
  int ran = 0;
  waiting.wait(*b, *event);
  waiting.launch(*b, [&] { ++ran; });
  std::thread aborter([&] {
    random_delay(11);
    waiting.abort();
  });
  waiting.synchronize(*b);
  aborter.join();
  EXPECT_EQ(ran, 0);
  EXPECT_FALSE(event->complete());
}

TEST(CpuAbort, WakesAHostThreadThatWaitsForAnEvent) {
  CpuDevice device(0);
  auto stream = device.create_stream("a");
  auto event = device.create_event();
  Gate gate;
  device.launch(*stream, gate.work());
  device.record(*stream, *event);
  std::thread waiter([&] { event->synchronize(); });
  random_delay(12);
  device.abort();
  waiter.join();  // although the work before the event still runs
  EXPECT_FALSE(event->complete());
}

TEST(CpuDestruction, OfAStreamSkipsQueuedWorkAndCallsBack) {
  CpuDevice blocked(1), device(0);
  auto other = blocked.create_stream("other");
  auto never = blocked.create_event();
  Gate gate;
  blocked.launch(*other, gate.work());
  blocked.record(*other, *never);
  std::atomic<int> ran = 0, notified = 0;
  {
    auto stream = device.create_stream("compute");
    device.wait(*stream, *never);
    for (int i = 0; i < 100; ++i) {
      device.launch(*stream, [&] { ++ran; });
      device.notify(*stream, [&] { ++notified; });
    }
  }
  EXPECT_EQ(ran, 0);
  EXPECT_EQ(notified, 100);
  // The device itself goes on.
  auto next = device.create_stream("next");
  device.launch(*next, [&] { ++ran; });
  device.synchronize(*next);
  EXPECT_EQ(ran, 1);
}

TEST(CpuDestruction, OfAStreamThatOthersWaitForIsAnError) {
  CpuDevice device(0), waiting(1);
  Errors errors(waiting);
  auto blocked = device.create_stream("blocked");
  auto gone = device.create_stream("gone");
  auto stream = waiting.create_stream("waits");
  auto never = device.create_event(), event = device.create_event();
  Gate gate;
  device.launch(*blocked, gate.work());
  device.record(*blocked, *never);
  device.wait(*gone, *never);
  device.record(*gone, *event);
  int ran = 0;
  waiting.wait(*stream, *event);
  waiting.launch(*stream, [&] { ++ran; });
  gone.reset();
  waiting.synchronize(*stream);
  EXPECT_EQ(ran, 0);
  ASSERT_EQ(errors.messages().size(), 1u);
  EXPECT_THAT(errors.messages()[0], HasSubstr("waits"));
  EXPECT_THAT(errors.messages()[0], HasSubstr("destroyed"));
}

TEST(CpuDestruction, OfADeviceJoinsItsStreams) {
  std::atomic<int> ran = 0, notified = 0;
  CpuDevice blocked(1);
  auto other = blocked.create_stream("other");
  auto never = blocked.create_event();
  Gate gate;
  blocked.launch(*other, gate.work());
  blocked.record(*other, *never);
  auto device = std::make_unique<CpuDevice>(0);
  auto stream = device->create_stream("outlives its device");
  device->wait(*stream, *never);
  device->launch(*stream, [&] { ++ran; });
  device->notify(*stream, [&] { ++notified; });
  device.reset();
  EXPECT_EQ(ran, 0);
  EXPECT_EQ(notified, 1);
}

// Random work on four devices with waits across all of them; in most turns one piece of work throws, or a thread
// aborts a device. Work checks that what it waited for was done.
struct Chaos {
  static constexpr int kDevices = 4, kStreams = 3, kItems = 150;
  explicit Chaos(uint32_t seed) : random(seed) {}

  void run() {
    for (int d = 0; d < kDevices; ++d) {
      devices.push_back(std::make_unique<CpuDevice>(d));
      errors.push_back(std::make_unique<Errors>(*devices.back()));
      for (int s = 0; s < kStreams; ++s) streams.push_back(devices.back()->create_stream("chaos"));
    }
    const int thrower = random() % 4 != 0 ? static_cast<int>(random() % kItems) : -1;
    const bool abort = random() % 4 == 0;
    for (int i = 0; i < kItems; ++i) issue(i, i == thrower);
    std::thread aborter([&] {
      random_delay(static_cast<uint32_t>(thrower));
      if (abort) devices[1]->abort();
    });
    for (size_t s = 0; s < streams.size(); ++s) devices[s / kStreams]->synchronize(*streams[s]);
    for (auto& event : events) event->synchronize();
    aborter.join();
    check(thrower, abort);
  }

  void issue(int i, bool throws) {
    const size_t s = random() % streams.size();
    CpuDevice& device = *devices[s / kStreams];
    std::vector<int> needs;
    for (int n = 0; n < 2 && i > 0; ++n) {
      needs.push_back(static_cast<int>(random() % i));
      device.wait(*streams[s], *events[needs.back()]);
    }
    device.launch(*streams[s], [this, i, needs, throws] {
      random_delay(static_cast<uint32_t>(i));
      for (int need : needs) ordered = ordered && done[need];
      if (throws) throw Error("item " + std::to_string(i));
      done[i] = true;
    });
    device.notify(*streams[s], [this] { ++notified; });
    events.push_back(device.create_event());
    device.record(*streams[s], *events.back());
  }

  void check(int thrower, bool abort) {
    EXPECT_TRUE(ordered);
    EXPECT_EQ(notified, kItems);
    size_t reported = 0;
    for (const auto& error : errors) reported += error->messages().size();
    EXPECT_LE(reported, thrower >= 0 ? 1u : 0u);
    if (!abort) {
      EXPECT_EQ(reported, thrower >= 0 ? 1u : 0u);
    }
    for (int i = 0; i < kItems; ++i) {
      const bool must_be_done = events[i]->complete() || (thrower < 0 && !abort);
      EXPECT_TRUE(done[i] || !must_be_done) << i;
    }
  }

  std::minstd_rand random;
  std::array<std::atomic<bool>, kItems> done{};
  std::atomic<bool> ordered = true;
  std::atomic<int> notified = 0;
  std::vector<std::unique_ptr<CpuDevice>> devices;
  std::vector<std::unique_ptr<Errors>> errors;
  std::vector<std::unique_ptr<Stream>> streams;
  std::vector<std::unique_ptr<Event>> events;
};

TEST(CpuChaos, RandomWorkWithFailures) {
  for (uint32_t seed = 1; seed <= 60; ++seed) {
    SCOPED_TRACE(seed);
    Chaos(seed * 7919).run();
  }
}

}  // namespace
}  // namespace slidedp
