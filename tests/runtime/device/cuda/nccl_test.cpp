// NCCL: one rank, and two where there are two GPUs; abort ends what waits.
#include <gmock/gmock.h>

#include "runtime/comm/nccl/nccl_collective.h"
#include "tests/runtime/device/cuda/support.h"

namespace slidedp {
namespace {

using test::download;
using test::Errors;
using test::upload;
using testing::Each;
using testing::ElementsAre;
using testing::IsEmpty;

struct Ranks {
  explicit Ranks(int count) {
    std::vector<CudaDevice*> pointers;
    for (int r = 0; r < count; ++r) {
      devices.push_back(std::make_unique<CudaDevice>(CudaDeviceOptions{r, r, 0, false}));
      pointers.push_back(devices.back().get());
      errors.push_back(std::make_unique<Errors>(*devices.back()));
      streams.push_back(devices.back()->create_stream("comm"));
    }
    collective = std::make_unique<NcclCollective>(pointers);
  }
  void synchronize() {
    for (size_t r = 0; r < devices.size(); ++r) devices[r]->synchronize(*streams[r]);
  }
  void expect_no_errors() const {
    for (const auto& error : errors) EXPECT_THAT(error->messages(), IsEmpty());
  }

  std::vector<std::unique_ptr<CudaDevice>> devices;
  std::vector<std::unique_ptr<Errors>> errors;
  std::unique_ptr<NcclCollective> collective;  // goes before its devices
  std::vector<std::unique_ptr<Stream>> streams;
};

class Nccl : public test::NeedsGpu<testing::TestWithParam<int>> {
 protected:
  // More GPUs than one are not required: a machine may have one.
  void SetUp() override {
    NeedsGpu::SetUp();
    if (IsSkipped() || HasFatalFailure()) return;
    if (test::visible_gpus() < GetParam()) GTEST_SKIP() << "needs " << GetParam() << " GPUs";
  }
};
INSTANTIATE_TEST_SUITE_P(Ranks, Nccl, testing::Values(1, 2));

TEST_P(Nccl, CollectivesGiveWhatTheirNamesSay) {
  const int ranks = GetParam();
  constexpr int64_t kShard = 1024;
  Ranks group(ranks);
  EXPECT_EQ(group.collective->ranks(), ranks);
  std::vector<DeviceMemory> shard, full, sum, bf16_sum, bf16, cast;
  for (int r = 0; r < ranks; ++r) {
    CudaDevice& device = *group.devices[r];
    check_cuda(cudaSetDevice(device.ordinal()), "cudaSetDevice");
    shard.push_back(upload(device, std::vector<float>(kShard, static_cast<float>(r + 1))));
    full.push_back(device.allocate(ranks * kShard * 4, "full"));
    sum.push_back(device.allocate(kShard * 4, "sum"));
    bf16.push_back(upload(device, std::vector<uint16_t>(ranks * kShard, 0x3f80)));  // 1
    bf16_sum.push_back(device.allocate(kShard * 2, "sum"));
    cast.push_back(upload(device, std::vector<int32_t>(kShard, r + 10)));
  }
  for (int r = 0; r < ranks; ++r) {
    Stream& stream = *group.streams[r];
    group.collective->all_gather(r, stream, shard[r].data(), full[r].data(), kShard * 4);
    group.collective->reduce_scatter(r, stream, full[r].data(), sum[r].data(), kShard, DType::fp32);
    group.collective->reduce_scatter(r, stream, bf16[r].data(), bf16_sum[r].data(), kShard, DType::bf16);
    group.collective->broadcast(r, stream, cast[r].data(), kShard * 4, ranks - 1);
  }
  group.synchronize();
  group.expect_no_errors();
  for (int r = 0; r < ranks; ++r) {
    check_cuda(cudaSetDevice(group.devices[r]->ordinal()), "cudaSetDevice");
    const auto gathered = download<float>(full[r]);
    for (int64_t i = 0; i < ranks * kShard; ++i) ASSERT_EQ(gathered[i], static_cast<float>(i / kShard + 1)) << i;
    EXPECT_THAT(download<float>(sum[r]), Each(static_cast<float>(ranks * (r + 1))));
    EXPECT_THAT(download<uint16_t>(bf16_sum[r]), Each(ranks == 1 ? 0x3f80 : 0x4000));
    EXPECT_THAT(download<int32_t>(cast[r]), Each(ranks - 1 + 10));
  }
}

// With one rank nothing waits; with two, rank 1 never comes and rank 0's kernel runs until the abort.
TEST_P(Nccl, AbortEndsWhatWaitsAndLaterCallsDoNothing) {
  Ranks group(GetParam());
  check_cuda(cudaSetDevice(0), "cudaSetDevice");
  DeviceMemory data = group.devices[0]->allocate(1024, "data");
  group.collective->broadcast(0, *group.streams[0], data.data(), 1024, GetParam() - 1);
  std::thread aborter([&] {
    test::random_delay(3);
    group.collective->abort();
  });
  group.synchronize();
  aborter.join();
  group.collective->abort();
  int later = 0;
  group.collective->broadcast(0, *group.streams[0], data.data(), 1024, 0);
  group.devices[0]->launch(*group.streams[0], [&] { ++later; });
  group.synchronize();
  EXPECT_EQ(later, 0);
  EXPECT_TRUE(group.devices[0]->aborted());
  group.expect_no_errors();
}

// As in a run: the failure's handler aborts everything, from the thread that fails.
TEST_P(Nccl, ARankThatThrowsEndsTheOthers) {
  const int ranks = GetParam();
  Ranks group(ranks);
  std::atomic<int> reported = 0;
  for (const auto& device : group.devices) {
    device->set_error_handler([&](std::exception_ptr) {
      ++reported;
      for (const auto& other : group.devices) other->abort();
      group.collective->abort();
    });
  }
  check_cuda(cudaSetDevice(0), "cudaSetDevice");
  DeviceMemory data = group.devices[0]->allocate(1024, "data");
  if (ranks > 1) group.collective->broadcast(0, *group.streams[0], data.data(), 1024, 1);
  group.devices[ranks - 1]->launch(*group.streams[ranks - 1], [] { throw Error("broken"); });
  group.synchronize();
  EXPECT_EQ(reported, 1);
  for (const auto& device : group.devices) EXPECT_TRUE(device->aborted());
}

TEST_P(Nccl, MisuseIsRefusedAtOnce) {
  Ranks group(GetParam());
  char data = 0;
  EXPECT_THROW(group.collective->broadcast(9, *group.streams[0], &data, 1, 0), std::logic_error);
  EXPECT_THROW(group.collective->broadcast(0, *group.streams[0], &data, 1, 9), std::logic_error);
  EXPECT_THROW(group.collective->all_gather(0, *group.streams[0], &data, &data, -1), std::logic_error);
}

}  // namespace
}  // namespace slidedp
