// What happens on a GPU when work throws, a launch or the GPU itself fails, or a device is aborted: nobody hangs,
// nothing more is issued, the first error is told once, and what notify() promised is called.
#include <gmock/gmock.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>

#include "runtime/device/cuda/callbacks.h"
#include "tests/runtime/device/cuda/support.h"

namespace slidedp {
namespace {

using test::Errors;
using test::hold;
using test::PinnedFlag;
using test::PinnedVector;
using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

class CudaFailureTest : public test::NeedsGpu<testing::TestWithParam<bool>> {
 protected:
  static CudaDeviceOptions options(int rank = 0) { return {rank, 0, 0, GetParam()}; }
};
INSTANTIATE_TEST_SUITE_P(Sharing, CudaFailureTest, testing::Bool(),
                         [](const auto& info) { return info.param ? "Shared" : "Alone"; });

TEST_P(CudaFailureTest, FirstErrorIsReportedOnceAndLaterWorkSkipped) {
  CudaDevice device(options());
  Errors errors(device);
  auto stream = device.create_stream("compute");
  auto event = device.create_event();
  DeviceMemory memory = device.allocate(4, "value");
  PinnedVector<int32_t> target(device, 1);
  target[0] = -1;
  int before = 0, after = 0;
  std::atomic<int> notified = 0;
  device.launch(*stream, [&] { ++before; });
  device.launch(*stream, [] { throw Error("first"); });
  device.launch(*stream, [&] { ++after; });
  device.copy_to_host(*stream, target.data(), memory.data(), 4);
  device.notify(*stream, [&] { ++notified; });
  device.record(*stream, *event);
  device.launch(*stream, [] { throw Error("second"); });
  device.synchronize(*stream);
  event->synchronize();
  EXPECT_EQ(before, 1);
  EXPECT_EQ(after, 0);
  EXPECT_EQ(target[0], -1);
  EXPECT_EQ(notified, 1);
  EXPECT_FALSE(event->complete());
  EXPECT_THROW(device.timestamp(*event), std::logic_error);
  EXPECT_THAT(errors.messages(), ElementsAre("first"));
}

TEST_P(CudaFailureTest, LaunchThatCudaRefusesNamesTheTask) {
  CudaDevice device(options(2));
  Errors errors(device);
  auto stream = device.create_stream("compute");
  device.begin_task(*stream, "fwd of layer 7");
  device.launch(*stream, [] { test::launch_badly(current_cuda_stream()); });
  device.end_task(*stream);
  device.synchronize(*stream);
  ASSERT_EQ(errors.messages().size(), 1u);
  EXPECT_THAT(errors.messages()[0],
              AllOf(HasSubstr("fwd of layer 7"), HasSubstr("Rank 2"), HasSubstr("cudaErrorInvalid")));
}

TEST_P(CudaFailureTest, InANotifyCallback) {
  CudaDevice device(options());
  Errors errors(device);
  auto stream = device.create_stream("d2h");
  int after = 0;
  device.notify(*stream, [] { throw std::runtime_error("callback"); });
  device.synchronize(*stream);
  device.launch(*stream, [&] { ++after; });
  device.synchronize(*stream);
  EXPECT_EQ(after, 0);
  EXPECT_THAT(errors.messages(), ElementsAre("callback"));
}

TEST_P(CudaFailureTest, WithoutHandlerIsThrownBySynchronize) {
  CudaDevice device(options());
  auto stream = device.create_stream("compute");
  device.launch(*stream, [] { throw Error("nobody listens"); });
  EXPECT_THROW(device.synchronize(*stream), Error);
}

TEST_P(CudaFailureTest, SpreadsToDevicesThatWaitForItsResults) {
  CudaDevice failing(options(0)), waiting(options(1));
  Errors failing_errors(failing), waiting_errors(waiting);
  auto a = failing.create_stream("a");
  auto b = waiting.create_stream("b");
  auto event = failing.create_event();
  failing.launch(*a, [] { throw Error("lost"); });
  failing.record(*a, *event);
  int ran = 0;
  std::atomic<int> notified = 0;
  waiting.wait(*b, *event);
  waiting.launch(*b, [&] { ++ran; });
  waiting.notify(*b, [&] { ++notified; });
  waiting.synchronize(*b);
  EXPECT_EQ(ran, 0);
  EXPECT_EQ(notified, 1);
  EXPECT_THAT(failing_errors.messages(), ElementsAre("lost"));
  EXPECT_THAT(waiting_errors.messages(), IsEmpty());
}

TEST_P(CudaFailureTest, AbortWakesAHostThreadThatWaitsForAnEvent) {
  CudaDevice device(options());
  auto stream = device.create_stream("a");
  auto event = device.create_event();
  PinnedFlag flag;
  hold(device, *stream, flag);
  device.record(*stream, *event);
  std::thread waiter([&] { event->synchronize(); });
  test::random_delay(12);
  device.abort();
  device.abort();
  waiter.join();  // although the work before the event still runs
  flag.set();
  device.synchronize(*stream);
}

TEST_P(CudaFailureTest, AfterAnAbortWhatCudaHasIsFinishedAndCalledBack) {
  CudaDevice device(options());
  Errors errors(device);
  auto stream = device.create_stream("d2h");
  auto started = device.create_event();
  PinnedFlag flag;
  std::atomic<int> notified = 0;
  int ran = 0;
  device.record(*stream, *started);
  hold(device, *stream, flag);
  device.notify(*stream, [&] { ++notified; });
  started->synchronize();
  device.abort();
  device.launch(*stream, [&] { ++ran; });
  device.notify(*stream, [&] { ++notified; });
  flag.set();
  device.synchronize(*stream);
  EXPECT_EQ(ran, 0);
  EXPECT_EQ(notified, 2);
  EXPECT_THAT(errors.messages(), IsEmpty());
}

TEST_P(CudaFailureTest, DestructionOfADeviceFinishesAndCallsBack) {
  std::atomic<int> notified = 0;
  auto device = std::make_unique<CudaDevice>(options());
  auto stream = device->create_stream("outlives its device");
  for (int i = 0; i < 100; ++i) device->notify(*stream, [&] { ++notified; });
  device.reset();
  EXPECT_EQ(notified, 100);
}

// In a process of its own (EXPECT_EXIT): the context does not work again. Ends with 0 if all was as promised.
[[noreturn]] void fail_the_gpu(bool shared) {
  const auto require = [](bool met, const char* what) {
    if (met) return;
    std::fprintf(stderr, "not met: %s\n", what);
    std::_Exit(1);
  };
  CudaDevice device({0, 0, 0, shared}), other({1, 0, 0, shared});
  Errors errors(device), other_errors(other);
  auto compute = device.create_stream("compute"), d2h = device.create_stream("d2h"), its = other.create_stream("d2h");
  auto event = device.create_event();
  std::atomic<int> notified = 0;
  PinnedFlag flag;
  device.begin_task(*compute, "fwd of layer 2");
  device.end_task(*compute);
  device.begin_task(*compute, "bwd of layer 3");
  hold(device, *compute, flag);
  device.launch(*compute, [] { test::write_nowhere(current_cuda_stream()); });
  device.record(*compute, *event);
  device.end_task(*compute);
  device.notify(*compute, [&] { ++notified; });
  device.wait(*d2h, *event);
  for (int i = 0; i < 10; ++i) device.notify(*d2h, [&] { ++notified; });
  other.wait(*its, *event);
  other.notify(*its, [&] { ++notified; });
  flag.set();
  // Nobody calls CUDA now: the watch finds the failure.
  while (notified < 12) std::this_thread::yield();
  event->synchronize();
  device.synchronize(*compute);
  device.synchronize(*d2h);
  other.synchronize(*its);
  device.notify(*d2h, [&] { ++notified; });
  device.synchronize(*d2h);
  require(notified == 13, "each callback once");
  require(!event->complete(), "the event is not complete");
  require(errors.messages().size() == 1, "one error");
  const std::string message = errors.messages()[0];
  std::fprintf(stderr, "%s\n", message.c_str());
  require(message.find("GPU 0 failed") != std::string::npos, "the GPU is named");
  require(message.find("bwd of layer 3") != std::string::npos, "the task is named");
  require(message.find("fwd of layer 2") == std::string::npos, "a task that is done is not named");
  std::_Exit(0);  // without destructors: what they give back is gone
}

TEST_P(CudaFailureTest, AsynchronousOneIsFoundNamedAndCalledBack) {
  testing::FLAGS_gtest_death_test_style = "threadsafe";
  EXPECT_EXIT(fail_the_gpu(GetParam()), testing::ExitedWithCode(0), "bwd of layer 3");
}

TEST(Callbacks, EachIsCalledOnceByWhoeverComesFirst) {
  Callbacks callbacks;
  std::vector<int> order;
  int64_t numbers[4];
  for (int i = 0; i < 4; ++i) numbers[i] = callbacks.add([&order, i] { order.push_back(i); });
  callbacks.call(numbers[2]);
  callbacks.call(numbers[2]);
  callbacks.call_all();
  callbacks.call_all();
  callbacks.call(numbers[0]);
  EXPECT_THAT(order, ElementsAre(2, 0, 1, 3));
  callbacks.wait_until_idle();
}

TEST(Callbacks, FirstExceptionIsKept) {
  Callbacks callbacks;
  for (const char* text : {"one", "two"}) {
    callbacks.add([text] { throw Error(text); });
  }
  callbacks.call_all();
  const auto thrown = callbacks.take_exception();
  ASSERT_NE(thrown, nullptr);
  EXPECT_EQ(test::error_of([&] { std::rethrow_exception(thrown); }), "one");
  EXPECT_EQ(callbacks.take_exception(), nullptr);
}

TEST(Callbacks, IdleMeansThatTheOneThatRanHasReturned) {
  Callbacks callbacks;
  test::Gate gate;
  std::promise<void> started;
  std::atomic<bool> returned = false;
  const int64_t number = callbacks.add([&, wait = gate.work()] {
    started.set_value();
    wait();
    returned = true;
  });
  std::thread caller([&] { callbacks.call(number); });
  started.get_future().wait();
  std::thread opener([&] {
    test::random_delay(5);
    gate.open();
  });
  callbacks.wait_until_idle();
  EXPECT_TRUE(returned);
  caller.join();
  opener.join();
}

}  // namespace
}  // namespace slidedp
