#include "runtime/host/kernels.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "tests/runtime/host/adam_fixture.h"
#include "tests/runtime/host/forced_target.h"

namespace slidedp {
namespace {

// Not a multiple of any vector.
constexpr size_t kElements = 16 * kBlockElements + 37;
constexpr size_t kBlocks = kElements / kBlockElements + 1;
constexpr size_t kSlack = 3;  // elements before the range: moves it off any alignment

struct Case {
  int sources, group_size;
  DType type;
  bool accumulator;
};

std::string name_of(const Case& c) {
  return std::string(name(c.type)) + "_" + std::to_string(c.sources) + "in" + std::to_string(c.group_size) +
         (c.accumulator ? "_accumulator" : "");
}

class KernelsOf : public testing::TestWithParam<Case> {};

std::vector<Case> cases() {
  std::vector<Case> all{{0, 1, DType::bf16, true}};
  for (DType type : {DType::bf16, DType::fp32}) {
    for (int sources : {1, 2, 3, 4, 8}) {
      all.push_back({sources, sources, type, false});
      all.push_back({sources, sources, type, true});
      if (sources % 2 == 0) all.push_back({sources, sources / 2, type, false});
    }
  }
  return all;
}
INSTANTIATE_TEST_SUITE_P(Sources, KernelsOf, testing::ValuesIn(cases()),
                         [](const auto& info) { return name_of(info.param); });

// A copy that starts `offset` elements after an aligned address.
template <typename T>
class Shifted {
 public:
  Shifted(const std::vector<T>& values, size_t offset) : storage_(values.size() + offset + 64 / sizeof(T)) {
    const auto past = reinterpret_cast<uintptr_t>(storage_.data()) % 64;
    begin_ = storage_.data() + (past == 0 ? 0 : (64 - past) / sizeof(T)) + offset;
    count_ = values.size();
    std::copy(values.begin(), values.end(), begin_);
  }
  T* data() { return begin_; }
  std::vector<T> values() const { return {begin_, begin_ + count_}; }

 private:
  std::vector<T> storage_;
  T* begin_;
  size_t count_;
};

std::vector<uint32_t> bits_of(const std::vector<float>& values) {
  std::vector<uint32_t> bits;
  for (float value : values) bits.push_back(std::bit_cast<uint32_t>(value));
  return bits;
}

// What the kernels make of the same random inputs, which lie `offset` elements off any alignment.
struct Results {
  std::vector<TestState> states;                   // by UpdatePart
  std::vector<std::vector<uint32_t>> accumulated;  // first wave, a further one, and both with squares
  std::vector<std::vector<double>> sums;
};

Results run(const Case& c, size_t offset) {
  const TestGradient gradient(c.sources, c.group_size, c.type, kElements, 21);
  std::vector<Shifted<uint16_t>> narrow;
  std::vector<Shifted<float>> wide;
  std::vector<const void*> pointers;
  for (const void* source : gradient.sources().sources) {
    if (c.type == DType::bf16) {
      const auto* values = static_cast<const uint16_t*>(source);
      narrow.emplace_back(std::vector<uint16_t>(values, values + kElements), offset);
    } else {
      const auto* values = static_cast<const float*>(source);
      wide.emplace_back(std::vector<float>(values, values + kElements), offset);
    }
  }
  for (auto& values : narrow) pointers.push_back(values.data());
  for (auto& values : wide) pointers.push_back(values.data());
  Shifted<float> accumulator(random_state(kElements, 24).m, offset);
  const GradientSources wave{pointers, c.group_size, c.type};
  GradientSources sources = wave;
  if (c.accumulator) sources.accumulator = accumulator.data();

  Results results;
  const TestState before = random_state(kElements, 23);
  for (UpdatePart part : {UpdatePart::whole, UpdatePart::weights, UpdatePart::moments}) {
    Shifted<uint16_t> hi(before.hi, offset), lo(before.lo, offset);
    Shifted<float> m(before.m, offset), v(before.v, offset);
    kernels::update({hi.data(), lo.data(), m.data(), v.data()}, sources, kElements, test_scalars(),
                    test_scalars().decay, part);
    TestState& state = results.states.emplace_back(0);
    state.hi = hi.values();
    state.lo = lo.values();
    state.m = m.values();
    state.v = v.values();
  }
  const auto sums = [&] { return results.sums.emplace_back(kBlocks).data(); };
  kernels::square(sources, kElements, sums());
  if (c.accumulator) return results;
  for (bool first : {true, false}) {
    for (bool squares : {false, true}) {
      Shifted<float> sum(random_state(kElements, 25).m, offset);
      kernels::accumulate(sum.data(), wave, kElements, first, squares ? sums() : nullptr);
      results.accumulated.push_back(bits_of(sum.values()));
    }
  }
  return results;
}

// That the widest set is right is for the comparison with scalar code in cpu_adam_test.cpp.
TEST_P(KernelsOf, SameBitsOnEveryInstructionSetAndAtAnyAlignment) {
  const Results expected = run(GetParam(), 0);
  ASSERT_FALSE(expected.states[0] == random_state(kElements, 23));
  for (const int64_t target : kernel_targets()) {
    const ForcedTarget forced(target);
    for (size_t offset = 0; offset <= kSlack; ++offset) {
      const Results results = run(GetParam(), offset);
      EXPECT_TRUE(results.states == expected.states) << hwy::TargetName(target) << ", " << offset << " elements off";
      EXPECT_EQ(results.accumulated, expected.accumulated) << hwy::TargetName(target) << ", " << offset;
      EXPECT_EQ(results.sums, expected.sums) << hwy::TargetName(target) << ", " << offset;
    }
  }
}

#if defined(__GNUC__) && defined(__x86_64__)
TEST(Kernels, AreBuiltForTheSetsOfThisCpuAndTheWidestIsUsed) {
  std::vector<std::string> expected;
  if (__builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq")) expected.push_back("AVX3");
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) expected.push_back("AVX2");
  if (__builtin_cpu_supports("sse4.2")) expected.push_back("SSE4");
  EXPECT_EQ(kernels::target(), expected.front());
  std::vector<std::string> found;
  for (const int64_t target : kernel_targets()) found.emplace_back(hwy::TargetName(target));
  ASSERT_GT(found.size(), expected.size()) << "no baseline";
  EXPECT_EQ(std::vector(found.begin(), found.begin() + static_cast<std::ptrdiff_t>(expected.size())), expected);
}
#endif

}  // namespace
}  // namespace slidedp
