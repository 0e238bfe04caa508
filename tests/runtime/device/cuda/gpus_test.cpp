// Which machines are refused, in words. Needs no GPU.
#include "runtime/device/cuda/gpus.h"

#include <gmock/gmock.h>

#include "model/base/error.h"
#include "runtime/comm/nccl/nccl_api.h"
#include "runtime/device/backends.h"
#include "tests/support/gpu.h"

namespace slidedp {
namespace {

using testing::AllOf;
using testing::AnyOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::Not;

constexpr int64_t kGiB = int64_t{1} << 30;

CudaMachine machine(int gpus) {
  CudaMachine machine;
  machine.driver_version = machine.runtime_version = 13000;
  machine.visible = gpus;
  for (int i = 0; i < gpus; ++i) machine.gpus.push_back({"NVIDIA H200", 9, 0, 139 * kGiB, 140 * kGiB});
  return machine;
}

std::string refusal(const CudaMachine& machine, const GpuRequest& request) {
  try {
    choose_gpus(machine, request);
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), Not(HasSubstr("\n")));
    return error.what();
  }
  return "";
}

TEST(ChooseGpus, OneARankOrOneForAll) {
  EXPECT_THAT(choose_gpus(machine(4), {3, 139 * kGiB, false}), ElementsAre(0, 1, 2));
  EXPECT_THAT(choose_gpus(machine(1), {4, 34 * kGiB, true}), ElementsAre(0, 0, 0, 0));
}

TEST(ChooseGpus, WithoutDriver) {
  CudaMachine none = machine(0);
  none.driver_version = 0;
  none.problem = "no CUDA-capable device is detected";
  EXPECT_THAT(refusal(none, {}), HasSubstr("No NVIDIA driver"));
}

TEST(ChooseGpus, DriverOlderThanTheRuntime) {
  CudaMachine old = machine(1);
  old.driver_version = 12040;
  EXPECT_THAT(refusal(old, {}), AllOf(HasSubstr("up to 12.4"), HasSubstr("built with CUDA 13.0")));
  old.driver_version = 12999;  // within a major version an older driver will do
  old.runtime_version = 12090;
  EXPECT_EQ(refusal(old, {}), "");
}

TEST(ChooseGpus, NoneVisible) {
  CudaMachine hidden = machine(0);
  hidden.visible_devices = "";
  hidden.problem = "no CUDA-capable device is detected (cudaErrorNoDevice)";
  EXPECT_THAT(refusal(hidden, {}), AllOf(HasSubstr("no GPU"), HasSubstr("CUDA_VISIBLE_DEVICES is \"\"")));
}

TEST(ChooseGpus, FewerThanRanks) {
  CudaMachine two = machine(2);
  two.visible_devices = "0,1";
  EXPECT_THAT(refusal(two, {4, 0, false}), AllOf(HasSubstr("4 ranks"), HasSubstr("2 GPUs"), HasSubstr("\"0,1\""),
                                                 HasSubstr("ranks=2"), HasSubstr("--share-gpu")));
  EXPECT_EQ(refusal(two, {4, 0, true}), "");
}

TEST(ChooseGpus, TooOldAGpu) {
  CudaMachine old = machine(2);
  old.gpus[1] = {"Tesla V100", 7, 0, 0, 0};
  EXPECT_THAT(refusal(old, {2, 0, false}), AllOf(HasSubstr("GPU 1 (Tesla V100)"), HasSubstr("7.0"), HasSubstr("8.0")));
  EXPECT_EQ(refusal(old, {1, 0, false}), "");
}

TEST(ChooseGpus, TooLittleFreeMemory) {
  CudaMachine busy = machine(1);
  busy.gpus[0].free_bytes = 20 * kGiB;
  EXPECT_THAT(refusal(busy, {1, 21 * kGiB, false}),
              AllOf(HasSubstr("20.0 GiB free of 140.0 GiB"), HasSubstr("21.0 GiB"), HasSubstr("another process")));
  EXPECT_EQ(refusal(busy, {1, 20 * kGiB, false}), "");
  EXPECT_THAT(refusal(busy, {4, 6 * kGiB, true}), AllOf(HasSubstr("24.0 GiB"), HasSubstr("4 ranks that share it")));
}

TEST(ChooseGpus, ThisMachineIsUsedOrSaysWhyNot) {
  std::string why;
  try {
    EXPECT_EQ(make_backend("cuda", 1, {.memory_budget = 1 << 20}).devices.size(), 1u);
  } catch (const Error& error) {
    why = error.what();
  }
  EXPECT_EQ(why.empty(), test::visible_gpus() > 0) << why;
  if (!why.empty()) {
    EXPECT_THAT(why, AnyOf(HasSubstr("No NVIDIA driver"), HasSubstr("sees no GPU")));
  }
}

TEST(NcclApi, MissingLibraryIsNamedWithWhatToDo) {
  try {
    nccl_api("libno-such-nccl.so.2");
    FAIL();
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), AllOf(HasSubstr("NCCL"), HasSubstr("libno-such-nccl.so.2"), HasSubstr("LD_LIBRARY_PATH"),
                                    Not(HasSubstr("\n"))));
  }
}

TEST(NcclApi, ALibraryThatIsNoNcclIsRefused) {
  try {
    nccl_api("libc.so.6");
    FAIL();
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), AllOf(HasSubstr("libc.so.6"), HasSubstr("ncclGetVersion")));
  }
}

}  // namespace
}  // namespace slidedp
