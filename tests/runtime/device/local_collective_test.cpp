#include "runtime/comm/local/local_collective.h"

#include <gmock/gmock.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>

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

struct Ranks {
  explicit Ranks(int count) {
    std::vector<Device*> pointers;
    for (int r = 0; r < count; ++r) {
      devices.push_back(std::make_unique<CpuDevice>(r));
      pointers.push_back(devices.back().get());
      errors.push_back(std::make_unique<Errors>(*devices.back()));
    }
    collective = std::make_unique<LocalCollective>(pointers);
    for (auto& device : devices) streams.push_back(device->create_stream("comm"));
  }
  void synchronize() {
    for (size_t r = 0; r < devices.size(); ++r) devices[r]->synchronize(*streams[r]);
  }
  void expect_no_errors() const {
    for (const auto& error : errors) EXPECT_THAT(error->messages(), IsEmpty());
  }

  std::vector<std::unique_ptr<CpuDevice>> devices;
  std::vector<std::unique_ptr<Errors>> errors;
  std::unique_ptr<LocalCollective> collective;
  std::vector<std::unique_ptr<Stream>> streams;
};

using Bytes = std::vector<uint8_t>;
Bytes random_bytes(int64_t count, uint32_t seed) {
  std::minstd_rand random(seed + 1);
  Bytes bytes(static_cast<size_t>(count));
  for (auto& byte : bytes) byte = static_cast<uint8_t>(random() >> 8);
  return bytes;
}

float from_bf16(uint16_t value) { return std::bit_cast<float>(static_cast<uint32_t>(value) << 16); }

// Round to nearest even by its definition: of the two bf16 neighbours the closer one, at a tie the even one.
// Beyond the largest finite value the next neighbour stands for 2^128, which is written as infinity.
uint16_t rounded_to_bf16(float value) {
  const auto down = static_cast<uint16_t>(std::bit_cast<uint32_t>(value) >> 16);  // toward zero
  if (std::isinf(value)) return down;
  const auto up = static_cast<uint16_t>(down + 1);
  const auto magnitude = [](uint16_t bits) {
    return (bits & 0x7fff) == 0x7f80 ? std::ldexp(1.0, 128) : std::fabs(static_cast<double>(from_bf16(bits)));
  };
  const double below = std::fabs(static_cast<double>(value)) - magnitude(down);
  const double above = magnitude(up) - std::fabs(static_cast<double>(value));
  if (below != above) return below < above ? down : up;
  return down % 2 == 0 ? down : up;
}

TEST(LocalCollective, AllGatherJoinsTheShards) {
  for (int ranks = 1; ranks <= 8; ++ranks) {
    for (int64_t shard : {0, 1, 128, 5003}) {
      Ranks group(ranks);
      std::vector<Bytes> shards, full(ranks, Bytes(static_cast<size_t>(ranks * shard), 0xaa));
      Bytes expected;
      for (int r = 0; r < ranks; ++r) {
        shards.push_back(random_bytes(shard, static_cast<uint32_t>(100 * ranks + r)));
        expected.insert(expected.end(), shards[r].begin(), shards[r].end());
      }
      for (int r = 0; r < ranks; ++r) {
        group.collective->all_gather(r, *group.streams[r], shards[r].data(), full[r].data(), shard);
      }
      group.synchronize();
      for (int r = 0; r < ranks; ++r) EXPECT_EQ(full[r], expected) << ranks << " ranks, " << shard << " bytes";
      group.expect_no_errors();
    }
  }
}

TEST(LocalCollective, AllGatherInPlace) {
  const int ranks = 3;
  const int64_t shard = 640;
  Ranks group(ranks);
  const Bytes expected = random_bytes(ranks * shard, 5);
  std::vector<Bytes> full;
  for (int r = 0; r < ranks; ++r) {
    full.emplace_back(expected.size(), 0xaa);
    std::copy_n(expected.begin() + r * shard, shard, full[r].begin() + r * shard);
  }
  for (int r = 0; r < ranks; ++r) {
    group.collective->all_gather(r, *group.streams[r], full[r].data() + r * shard, full[r].data(), shard);
  }
  group.synchronize();
  for (int r = 0; r < ranks; ++r) EXPECT_EQ(full[r], expected);
}

TEST(LocalCollective, BroadcastCopiesTheRootsData) {
  for (int ranks = 1; ranks <= 8; ++ranks) {
    const int root = ranks / 2;
    Ranks group(ranks);
    std::vector<Bytes> data;
    for (int r = 0; r < ranks; ++r) data.push_back(random_bytes(4097, static_cast<uint32_t>(r)));
    const Bytes expected = data[root];
    for (int r = 0; r < ranks; ++r) {
      group.collective->broadcast(r, *group.streams[r], data[r].data(), 4097, root);
    }
    group.synchronize();
    for (int r = 0; r < ranks; ++r) EXPECT_EQ(data[r], expected);
  }
}

// Values of very different size, so that another order of the sum or a rounding between its terms shows.
std::vector<float> wide_values(int64_t count, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> values(static_cast<size_t>(count));
  for (float& value : values) value = std::ldexp(normal(random), static_cast<int>(random() % 24));
  return values;
}

TEST(LocalCollective, ReduceScatterSumsInRankOrderFp32) {
  for (int ranks = 1; ranks <= 8; ++ranks) {
    const int64_t shard = 1500;  // not a multiple of the implementation's block
    Ranks group(ranks);
    std::vector<std::vector<float>> full, sums(ranks, std::vector<float>(shard));
    for (int r = 0; r < ranks; ++r) full.push_back(wide_values(ranks * shard, static_cast<uint32_t>(ranks * 10 + r)));
    for (int r = 0; r < ranks; ++r) {
      group.collective->reduce_scatter(r, *group.streams[r], full[r].data(), sums[r].data(), shard, DType::fp32);
    }
    group.synchronize();
    for (int r = 0; r < ranks; ++r) {
      for (int64_t i = 0; i < shard; ++i) {
        float expected = full[0][r * shard + i];
        for (int other = 1; other < ranks; ++other) expected += full[other][r * shard + i];
        ASSERT_EQ(std::bit_cast<uint32_t>(sums[r][i]), std::bit_cast<uint32_t>(expected))
            << ranks << " " << r << " " << i;
      }
    }
  }
}

TEST(LocalCollective, ReduceScatterRoundsBf16Once) {
  for (int ranks = 1; ranks <= 8; ++ranks) {
    const int64_t shard = 1500;
    Ranks group(ranks);
    std::vector<std::vector<uint16_t>> full(ranks), sums(ranks, std::vector<uint16_t>(shard));
    for (int r = 0; r < ranks; ++r) {
      for (float value : wide_values(ranks * shard, static_cast<uint32_t>(ranks * 20 + r))) {
        full[r].push_back(static_cast<uint16_t>(std::bit_cast<uint32_t>(value) >> 16));
      }
    }
    for (int r = 0; r < ranks; ++r) {
      group.collective->reduce_scatter(r, *group.streams[r], full[r].data(), sums[r].data(), shard, DType::bf16);
    }
    group.synchronize();
    for (int r = 0; r < ranks; ++r) {
      for (int64_t i = 0; i < shard; ++i) {
        float expected = from_bf16(full[0][r * shard + i]);
        for (int other = 1; other < ranks; ++other) expected += from_bf16(full[other][r * shard + i]);
        ASSERT_EQ(sums[r][i], rounded_to_bf16(expected)) << ranks << " " << r << " " << i;
      }
    }
  }
}

TEST(LocalCollective, Bf16TiesInfinitiesAndNan) {
  Ranks group(2);
  const auto bf16 = [](float value) { return static_cast<uint16_t>(std::bit_cast<uint32_t>(value) >> 16); };
  const float infinity = std::numeric_limits<float>::infinity(), nan = std::numeric_limits<float>::quiet_NaN();
  const float largest = from_bf16(0x7f7f);
  // 1 + 2^-8 lies between 1 and 1 + 2^-7 (goes to even 1), 1 + 2^-7 + 2^-8 rounds up to even.
  const std::vector<std::pair<float, float>> terms = {{1.0f, 0x1p-8f},    {1.0f + 0x1p-7f, 0x1p-8f}, {-0.0f, -0.0f},
                                                      {infinity, 1.0f},   {infinity, -infinity},     {nan, 1.0f},
                                                      {largest, largest}, {0x1p-133f, 0x1p-133f}};
  const int64_t shard = static_cast<int64_t>(terms.size());
  std::vector<uint16_t> full[2], sums[2];
  for (int part = 0; part < 2; ++part) {
    for (auto [a, b] : terms) {
      full[0].push_back(bf16(a));
      full[1].push_back(bf16(b));
    }
    sums[part].resize(terms.size());
  }
  for (int r = 0; r < 2; ++r) {
    group.collective->reduce_scatter(r, *group.streams[r], full[r].data(), sums[r].data(), shard, DType::bf16);
  }
  group.synchronize();
  for (const auto& sum : sums) {
    EXPECT_EQ(sum[0], bf16(1.0f));
    EXPECT_EQ(sum[1], bf16(1.0f + 0x1p-6f));
    EXPECT_EQ(sum[2], 0x8000);
    EXPECT_EQ(sum[3], bf16(infinity));
    EXPECT_TRUE(std::isnan(from_bf16(sum[4])));
    EXPECT_TRUE(std::isnan(from_bf16(sum[5])));
    EXPECT_EQ(sum[6], bf16(infinity));
    EXPECT_EQ(from_bf16(sum[7]), 0x1p-132f);  // denormals are not flushed
  }
}

// Each rank overwrites its input right behind the call, and every rank is slow at random: a rank that reads too late
// or too early gets wrong values.
TEST(LocalCollective, InputsMayBeOverwrittenAfterwards) {
  const int ranks = 4, rounds = 120;
  const int64_t shard = 64;
  Ranks group(ranks);
  std::vector<std::vector<float>> input(ranks, std::vector<float>(ranks * shard));
  std::vector<std::vector<float>> sum(ranks, std::vector<float>(shard)), all(ranks, std::vector<float>(ranks * shard));
  std::atomic<int> wrong = 0;
  std::vector<std::thread> issuers;
  for (int r = 0; r < ranks; ++r) {
    issuers.emplace_back([&, r] {
      for (int round = 0; round < rounds; ++round) {
        CpuDevice& device = *group.devices[r];
        Stream& stream = *group.streams[r];
        device.launch(stream, [&, r, round] {
          random_delay(static_cast<uint32_t>(round * ranks + r));
          std::fill(input[r].begin(), input[r].end(), static_cast<float>(round * (r + 1)));
        });
        group.collective->reduce_scatter(r, stream, input[r].data(), sum[r].data(), shard, DType::fp32);
        device.launch(stream, [&, r] { std::fill(input[r].begin(), input[r].end(), -1e6f); });
        group.collective->all_gather(r, stream, sum[r].data(), all[r].data(), shard * 4);
        device.launch(stream, [&, r, round] {
          std::fill(sum[r].begin(), sum[r].end(), -1e6f);
          for (float value : all[r]) wrong += value != static_cast<float>(round * 10);  // 1 + 2 + 3 + 4
        });
      }
    });
  }
  for (auto& issuer : issuers) issuer.join();
  group.synchronize();
  EXPECT_EQ(wrong, 0);
  group.expect_no_errors();
}

TEST(LocalCollective, CallsOfARankMayUseSeveralStreams) {
  Ranks group(2);
  std::vector<std::unique_ptr<Stream>> second;
  for (auto& device : group.devices) second.push_back(device->create_stream("second"));
  Gate gate;
  int first_data[2] = {1, 2}, second_data[2] = {3, 4};
  group.devices[0]->launch(*group.streams[0], gate.work());
  for (int r = 0; r < 2; ++r) {
    group.collective->broadcast(r, *group.streams[r], &first_data[r], 4, 0);
    group.collective->broadcast(r, *second[r], &second_data[r], 4, 1);
  }
  for (int r = 0; r < 2; ++r) group.devices[r]->synchronize(*second[r]);
  EXPECT_THAT(second_data, ElementsAre(4, 4));  // although the first call is still held up
  gate.open();
  group.synchronize();
  EXPECT_THAT(first_data, ElementsAre(1, 1));
}

TEST(LocalCollective, DifferentCallsAreAnErrorOfEveryRank) {
  using Issue = std::function<void(LocalCollective&, int, Stream&, char*)>;
  const Issue gather = [](auto& c, int r, Stream& s, char* data) { c.all_gather(r, s, data, data + 512, 64); };
  const std::vector<std::pair<Issue, std::string>> others = {
      {[](auto& c, int r, Stream& s, char* data) { c.all_gather(r, s, data, data + 512, 32); }, "32 bytes"},
      {[](auto& c, int r, Stream& s, char* data) { c.broadcast(r, s, data, 64, 0); }, "broadcast"},
      {[](auto& c, int r, Stream& s, char* data) { c.reduce_scatter(r, s, data, data + 512, 64, DType::bf16); },
       "reduce_scatter"}};
  for (const auto& [other, text] : others) {
    Ranks group(3);
    std::vector<char> data(3 * 1024);
    for (int r = 0; r < 3; ++r) (r == 1 ? other : gather)(*group.collective, r, *group.streams[r], &data[r * 1024]);
    group.synchronize();
    for (const auto& errors : group.errors) {
      ASSERT_EQ(errors->messages().size(), 1u);
      EXPECT_THAT(errors->messages()[0], HasSubstr("all_gather of 64 bytes"));
      EXPECT_THAT(errors->messages()[0], HasSubstr(text));
      EXPECT_THAT(errors->messages()[0], HasSubstr("rank 1"));
    }
  }
}

TEST(LocalCollective, DifferentTypesOrRootsAreAnError) {
  float full[8] = {}, shard[8] = {};
  {
    Ranks group(2);
    group.collective->reduce_scatter(0, *group.streams[0], full, shard, 2, DType::fp32);
    group.collective->reduce_scatter(1, *group.streams[1], full, shard + 4, 2, DType::bf16);
    group.synchronize();
    for (const auto& errors : group.errors) EXPECT_EQ(errors->messages().size(), 1u);
  }
  Ranks group(2);
  group.collective->broadcast(0, *group.streams[0], full, 8, 0);
  group.collective->broadcast(1, *group.streams[1], shard, 8, 1);
  group.synchronize();
  for (const auto& errors : group.errors) EXPECT_EQ(errors->messages().size(), 1u);
}

TEST(LocalCollective, MisuseIsRefusedAtOnce) {
  Ranks group(2);
  char data[64] = {};
  EXPECT_THROW(group.collective->broadcast(2, *group.streams[0], data, 8, 0), std::logic_error);
  EXPECT_THROW(group.collective->broadcast(0, *group.streams[0], data, 8, 2), std::logic_error);
  EXPECT_THROW(group.collective->all_gather(0, *group.streams[0], data, data, -1), std::logic_error);
}

TEST(LocalCollective, AbortReleasesRanksThatWait) {
  for (uint32_t turn = 0; turn < 20; ++turn) {
    Ranks group(3);
    std::vector<int> data = {1, 2, 3};
    int later = 0;
    std::thread aborter([&] {
      random_delay(turn);
      group.collective->abort();
    });
    for (int r = 0; r < 2; ++r) {  // rank 2 never comes
      group.collective->broadcast(r, *group.streams[r], &data[r], 4, 0);
      group.devices[r]->launch(*group.streams[r], [&] { ++later; });
    }
    group.synchronize();
    aborter.join();
    group.collective->abort();
    group.collective->broadcast(2, *group.streams[2], &data[2], 4, 0);
    group.synchronize();
    EXPECT_THAT(data, ElementsAre(1, 2, 3));
    EXPECT_EQ(later, 0);
    group.expect_no_errors();
  }
}

TEST(LocalCollective, ARankThatFailsReleasesTheOthers) {
  Ranks group(3);
  std::vector<int> data = {1, 2, 3};
  std::atomic<int> later = 0;
  for (int r = 0; r < 3; ++r) {
    if (r == 1) group.devices[r]->launch(*group.streams[r], [] { throw Error("rank 1 broke"); });
    group.collective->broadcast(r, *group.streams[r], &data[r], 4, 0);
    group.devices[r]->launch(*group.streams[r], [&] { ++later; });
  }
  group.synchronize();
  EXPECT_THAT(data, ElementsAre(1, 2, 3));
  EXPECT_EQ(later, 0);
  EXPECT_THAT(group.errors[0]->messages(), IsEmpty());
  EXPECT_THAT(group.errors[1]->messages(), ElementsAre("rank 1 broke"));
  EXPECT_THAT(group.errors[2]->messages(), IsEmpty());
}

TEST(LocalCollective, DestructionReleasesRanksThatWait) {
  Ranks group(2);
  int data = 1;
  group.collective->broadcast(0, *group.streams[0], &data, 4, 0);
  group.collective.reset();
  group.synchronize();
  group.expect_no_errors();
}

}  // namespace
}  // namespace slidedp
