// Local collectives of several ranks on one GPU: the CPU backend's bits, and no hang when a rank fails or stops.
#include <gmock/gmock.h>

#include <atomic>
#include <bit>
#include <cmath>

#include "runtime/comm/local/cuda/cuda_operations.h"
#include "runtime/comm/local/local_collective.h"
#include "runtime/device/backends.h"
#include "runtime/device/cpu/cpu_device.h"
#include "tests/runtime/device/cuda/support.h"

namespace slidedp {
namespace {

using test::download;
using test::Errors;
using test::upload;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::SizeIs;

using Bytes = std::vector<uint8_t>;

struct Ranks {
  explicit Ranks(int count) {
    std::vector<Device*> pointers;
    for (int r = 0; r < count; ++r) {
      devices.push_back(std::make_unique<CudaDevice>(CudaDeviceOptions{r, 0, 0, true}));
      pointers.push_back(devices.back().get());
      errors.push_back(std::make_unique<Errors>(*devices.back()));
      streams.push_back(devices.back()->create_stream("comm"));
    }
    collective = std::make_unique<LocalCollective>(pointers, make_cuda_operations());
  }
  void synchronize() {
    for (size_t r = 0; r < devices.size(); ++r) devices[r]->synchronize(*streams[r]);
  }
  void expect_no_errors() const {
    for (const auto& error : errors) EXPECT_THAT(error->messages(), IsEmpty());
  }
  void launch_scale(int rank, void* data, int64_t count, int32_t factor, int32_t term) {
    devices[rank]->launch(
        *streams[rank], [=] { test::scale(static_cast<int32_t*>(data), count, factor, term, current_cuda_stream()); });
  }

  std::vector<std::unique_ptr<CudaDevice>> devices;
  std::vector<std::unique_ptr<Errors>> errors;
  std::unique_ptr<LocalCollective> collective;
  std::vector<std::unique_ptr<Stream>> streams;
};

// A collective by name, on any backend's memory.
using Issue = std::function<void(Collective&, int rank, Stream&, void* input, void* output)>;

// Outputs of all ranks on the CPU backend.
std::vector<Bytes> on_cpu(const Issue& issue, std::vector<Bytes> inputs, int64_t output_bytes) {
  const auto ranks = static_cast<int>(inputs.size());
  std::vector<std::unique_ptr<CpuDevice>> devices;
  std::vector<Device*> pointers;
  std::vector<std::unique_ptr<Stream>> streams;
  for (int r = 0; r < ranks; ++r) {
    devices.push_back(std::make_unique<CpuDevice>(r));
    pointers.push_back(devices.back().get());
    streams.push_back(devices.back()->create_stream("comm"));
  }
  LocalCollective collective(pointers);
  std::vector<Bytes> outputs(inputs.size(), Bytes(static_cast<size_t>(output_bytes), 0));
  for (int r = 0; r < ranks; ++r) issue(collective, r, *streams[r], inputs[r].data(), outputs[r].data());
  for (int r = 0; r < ranks; ++r) devices[r]->synchronize(*streams[r]);
  for (int r = 0; r < ranks; ++r) outputs[r].insert(outputs[r].end(), inputs[r].begin(), inputs[r].end());
  return outputs;
}

// The same on one GPU; outputs are followed by what is then in the inputs.
std::vector<Bytes> on_gpu(const Issue& issue, const std::vector<Bytes>& inputs, int64_t output_bytes) {
  const auto ranks = static_cast<int>(inputs.size());
  Ranks group(ranks);
  std::vector<DeviceMemory> in, out;
  for (int r = 0; r < ranks; ++r) {
    in.push_back(upload(*group.devices[r], inputs[r]));
    out.push_back(group.devices[r]->allocate(output_bytes, "output"));
  }
  for (int r = 0; r < ranks; ++r) issue(*group.collective, r, *group.streams[r], in[r].data(), out[r].data());
  group.synchronize();
  group.expect_no_errors();
  std::vector<Bytes> outputs;
  for (int r = 0; r < ranks; ++r) {
    outputs.push_back(download<uint8_t>(out[r]));
    const Bytes input = download<uint8_t>(in[r]);
    outputs.back().insert(outputs.back().end(), input.begin(), input.end());
  }
  return outputs;
}

// Values of very different size, so that another order of the sum or a rounding between its terms shows. Both as fp32
// and as pairs of bf16 they are finite: NaNs differ between the backends.
std::vector<Bytes> wide_values(int ranks, int64_t bytes) {
  std::mt19937 random(static_cast<uint32_t>(ranks));
  std::normal_distribution<float> normal;
  std::vector<Bytes> inputs;
  for (int r = 0; r < ranks; ++r) {
    Bytes& input = inputs.emplace_back();
    while (static_cast<int64_t>(input.size()) < bytes) {
      const auto high = std::bit_cast<uint32_t>(std::ldexp(normal(random), static_cast<int>(random() % 24)));
      const auto low = std::bit_cast<uint32_t>(std::ldexp(normal(random), static_cast<int>(random() % 24)));
      const uint32_t word = (high & 0xffff0000u) | low >> 16;
      for (int i = 0; i < 4; ++i) input.push_back(static_cast<uint8_t>(word >> 8 * i));
    }
  }
  return inputs;
}

class SharedGpuCollective : public test::NeedsGpu<> {};

TEST_F(SharedGpuCollective, HasTheCpuBackendsBits) {
  constexpr int64_t kShard = 1500;  // elements
  for (const int ranks : {1, 2, 4, 8}) {
    const std::vector<std::tuple<std::string, Issue, int64_t, int64_t>> cases = {
        {"all_gather", [](auto& c, int r, Stream& s, void* in, void* out) { c.all_gather(r, s, in, out, kShard); },
         kShard, ranks * kShard},
        {"all_gather in place",
         [](auto& c, int r, Stream& s, void* in, void*) {
           c.all_gather(r, s, static_cast<char*>(in) + r * kShard, in, kShard);
         },
         ranks * kShard, 4},
        {"reduce_scatter fp32",
         [](auto& c, int r, Stream& s, void* in, void* out) { c.reduce_scatter(r, s, in, out, kShard, DType::fp32); },
         ranks * kShard * 4, kShard * 4},
        {"reduce_scatter bf16",
         [](auto& c, int r, Stream& s, void* in, void* out) { c.reduce_scatter(r, s, in, out, kShard, DType::bf16); },
         ranks * kShard * 2, kShard * 2},
        {"broadcast", [=](auto& c, int r, Stream& s, void* in, void*) { c.broadcast(r, s, in, kShard, ranks / 2); },
         kShard, 4},
        {"nothing", [](auto& c, int r, Stream& s, void* in, void* out) { c.all_gather(r, s, in, out, 0); }, 4, 4}};
    for (const auto& [name, issue, input_bytes, output_bytes] : cases) {
      const auto inputs = wide_values(ranks, input_bytes);
      EXPECT_EQ(on_gpu(issue, inputs, output_bytes), on_cpu(issue, inputs, output_bytes)) << name << " " << ranks;
    }
  }
}

// Denormals, signed zeros, ties, overflow; NaN stays NaN.
TEST_F(SharedGpuCollective, Bf16TiesInfinitiesAndNan) {
  // 1 + 2^-8 lies between 1 and 1 + 2^-7 (goes to even 1), 1 + 2^-7 + 2^-8 rounds up to even.
  const std::vector<uint16_t> first = {0x3f80, 0x3f81, 0x8000, 0x7f80, 0x7f7f, 0x0001, 0x7f80, 0x7fc0};
  const std::vector<uint16_t> second = {0x3b80, 0x3b80, 0x8000, 0x3f80, 0x7f7f, 0x0001, 0xff80, 0x3f80};
  const std::vector<uint16_t> sums = {0x3f80, 0x3f82, 0x8000, 0x7f80, 0x7f80, 0x0002};
  Ranks group(2);
  std::vector<DeviceMemory> in, out;
  for (int r = 0; r < 2; ++r) {
    std::vector<uint16_t> full = r == 0 ? first : second;
    full.insert(full.end(), full.begin(), full.begin() + 8);
    in.push_back(upload(*group.devices[r], full));
    out.push_back(group.devices[r]->allocate(16, "sums"));
  }
  for (int r = 0; r < 2; ++r) {
    group.collective->reduce_scatter(r, *group.streams[r], in[r].data(), out[r].data(), 8, DType::bf16);
  }
  group.synchronize();
  for (int r = 0; r < 2; ++r) {
    const auto got = download<uint16_t>(out[r]);
    for (size_t i = 0; i < sums.size(); ++i) EXPECT_EQ(got[i], sums[i]) << i;
    for (size_t i = sums.size(); i < 8; ++i) {
      EXPECT_TRUE(std::isnan(std::bit_cast<float>(static_cast<uint32_t>(got[i]) << 16))) << i;
    }
  }
}

// Each rank overwrites its input right behind the call, and ranks are slow at random: a rank that reads too late or too
// early gets wrong values.
TEST_F(SharedGpuCollective, InputsMayBeOverwrittenAfterwards) {
  constexpr int kRanks = 4, kRounds = 60;
  constexpr int64_t kShard = 1 << 16;
  Ranks group(kRanks);
  std::vector<DeviceMemory> shard, full, wrong;
  for (int r = 0; r < kRanks; ++r) {
    shard.push_back(group.devices[r]->allocate(kShard * 4, "shard"));
    full.push_back(group.devices[r]->allocate(kRanks * kShard * 4, "full"));
    wrong.push_back(group.devices[r]->allocate(kRounds * kRanks * 4, "first of each part"));
  }
  std::vector<std::thread> issuers;
  for (int r = 0; r < kRanks; ++r) {
    issuers.emplace_back([&, r] {
      for (int round = 0; round < kRounds; ++round) {
        test::random_delay(static_cast<uint32_t>(round * kRanks + r));
        group.launch_scale(r, shard[r].data(), kShard, 0, 100 * round + r);
        group.collective->all_gather(r, *group.streams[r], shard[r].data(), full[r].data(), kShard * 4);
        group.launch_scale(r, shard[r].data(), kShard, 0, -1);
        group.devices[r]->launch(*group.streams[r], [&, r, round] {
          for (int part = 0; part < kRanks; ++part) {  // the last element of each part
            check_cuda(cudaMemcpyAsync(static_cast<int32_t*>(wrong[r].data()) + round * kRanks + part,
                                       static_cast<int32_t*>(full[r].data()) + (part + 1) * kShard - 1, 4,
                                       cudaMemcpyDeviceToDevice, current_cuda_stream()),
                       "cudaMemcpyAsync");
          }
        });
      }
    });
  }
  for (auto& issuer : issuers) issuer.join();
  group.synchronize();
  group.expect_no_errors();
  for (int r = 0; r < kRanks; ++r) {
    const auto seen = download<int32_t>(wrong[r]);
    for (int i = 0; i < kRounds * kRanks; ++i) ASSERT_EQ(seen[i], 100 * (i / kRanks) + i % kRanks) << r << " " << i;
  }
}

// A rank whose stream waits for another one holds up neither its other streams nor calls that wait for the whole GPU.
TEST_F(SharedGpuCollective, ARankThatWaitsHoldsNothingElseUp) {
  Ranks group(2);
  std::vector<DeviceMemory> data;
  for (int r = 0; r < 2; ++r) data.push_back(upload(*group.devices[r], std::vector<int32_t>(4, r + 1)));
  group.collective->broadcast(0, *group.streams[0], data[0].data(), 16, 1);  // rank 1 comes later
  auto other = group.devices[0]->create_stream("other");
  DeviceMemory memory = upload(*group.devices[0], std::vector<int32_t>(1, 5));
  group.devices[0]->launch(*other,
                           [&] { test::scale(static_cast<int32_t*>(memory.data()), 1, 2, 0, current_cuda_stream()); });
  group.devices[0]->synchronize(*other);
  check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  EXPECT_EQ(download<int32_t>(memory)[0], 10);
  memory = DeviceMemory();  // cudaFree waits for the whole GPU
  group.collective->broadcast(1, *group.streams[1], data[1].data(), 16, 1);
  group.synchronize();
  EXPECT_THAT(download<int32_t>(data[0]), ElementsAre(2, 2, 2, 2));
}

TEST_F(SharedGpuCollective, DifferentCallsAreAnErrorOfEveryRank) {
  Ranks group(2);
  DeviceMemory memory = group.devices[0]->allocate(4096, "data");
  group.collective->all_gather(0, *group.streams[0], memory.data(), memory.data(), 64);
  group.collective->broadcast(1, *group.streams[1], memory.data(), 64, 0);
  group.synchronize();
  for (const auto& errors : group.errors) {
    ASSERT_THAT(errors->messages(), SizeIs(1));
    EXPECT_THAT(errors->messages()[0], HasSubstr("all_gather of 64 bytes"));
  }
}

TEST_F(SharedGpuCollective, AbortReleasesRanksThatWait) {
  for (uint32_t turn = 0; turn < 10; ++turn) {
    Ranks group(4);
    DeviceMemory memory = group.devices[0]->allocate(4096, "data");
    std::atomic<int> later = 0;
    std::thread aborter([&] {
      test::random_delay(turn);
      group.collective->abort();
    });
    for (int r = 0; r < 3; ++r) {  // rank 3 never comes
      group.collective->broadcast(r, *group.streams[r], memory.data(), 4, 0);
      group.devices[r]->launch(*group.streams[r], [&] { ++later; });
    }
    group.synchronize();
    aborter.join();
    EXPECT_EQ(later, 0);
    group.expect_no_errors();
  }
}

TEST_F(SharedGpuCollective, ARankThatFailsReleasesTheOthers) {
  Ranks group(3);
  DeviceMemory memory = group.devices[0]->allocate(4096, "data");
  std::atomic<int> later = 0;
  for (int r = 0; r < 3; ++r) {
    if (r == 1) group.devices[r]->launch(*group.streams[r], [] { throw Error("rank 1 broke"); });
    group.collective->broadcast(r, *group.streams[r], memory.data(), 4, 0);
    group.devices[r]->launch(*group.streams[r], [&] { ++later; });
  }
  group.synchronize();
  EXPECT_EQ(later, 0);
  EXPECT_THAT(group.errors[0]->messages(), IsEmpty());
  EXPECT_THAT(group.errors[1]->messages(), ElementsAre("rank 1 broke"));
  EXPECT_THAT(group.errors[2]->messages(), IsEmpty());
}

TEST_F(SharedGpuCollective, BackendGivesEveryRankTheOneGpu) {
  const Backend backend =
      make_backend("cuda", 4, {.memory_budget = 1 << 20, .memory_needed = 1 << 20, .share_gpu = true});
  ASSERT_THAT(backend.devices, SizeIs(4));
  for (int r = 0; r < 4; ++r) {
    EXPECT_EQ(backend.devices[r]->rank(), r);
    EXPECT_EQ(backend.devices[r]->memory().budget, 1 << 20);
    EXPECT_EQ(dynamic_cast<CudaDevice&>(*backend.devices[r]).ordinal(), 0);
  }
  EXPECT_EQ(backend.collective->ranks(), 4);
  EXPECT_THAT(test::error_of([] { make_backend("cuda", 2, {.memory_needed = int64_t{1} << 50, .share_gpu = true}); }),
              HasSubstr("2 ranks that share it"));
}

}  // namespace
}  // namespace slidedp
