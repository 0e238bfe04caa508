// The update over ten million random states of all magnitudes, and its clipping over many steps.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "runtime/host/chunk_update.h"
#include "tests/runtime/host/adam_fixture.h"
#include "tests/runtime/host/forced_target.h"

namespace slidedp {
namespace {

// Any sign and mantissa, exponent in [low, high]; under -126 subnormal. One in 16 is zero.
float random_float(std::mt19937_64& random, int low, int high) {
  const uint64_t bits = random();
  if (bits % 16 == 0) return 0;
  const auto exponent = low + static_cast<int>((bits >> 4) % 1024) * (high - low + 1) / 1024;
  const auto mantissa = static_cast<float>((bits >> 32) | (uint64_t{1} << 32)) * 0x1p-32f;
  return std::ldexp(bits & 0x4000 ? -mantissa : mantissa, exponent);
}

// Masters, moments and sums of two bf16 gradients from subnormal to as large as overflows nothing: v up to 2^126, which
// does not belong to the gradients, and m up to 2^60 over a v of zero.
struct WildStates {
  WildStates(size_t elements, uint32_t seed) : state(elements), sources{std::vector<uint16_t>(elements), {}} {
    sources[1] = sources[0];
    std::mt19937_64 random(seed);
    for (size_t i = 0; i < elements; ++i) {
      state.set_master(i, random_float(random, -140, 60));
      state.m[i] = random_float(random, -149, 60);
      state.v[i] = std::fabs(random_float(random, -149, 126));
      for (auto& source : sources) source[i] = split_master(random_float(random, -140, 50)).hi;
      pointers = {sources[0].data(), sources[1].data()};
    }
  }
  float sum(size_t i) const {
    const auto widen = [](uint16_t value) { return std::bit_cast<float>(static_cast<uint32_t>(value) << 16); };
    return widen(sources[0][i]) + widen(sources[1][i]);
  }
  GradientSources gradient() const { return {pointers, 2, DType::bf16}; }

  TestState state;
  std::array<std::vector<uint16_t>, 2> sources;
  std::array<const void*, 2> pointers;
};

struct Case {
  const char* name;
  AdamSpec adam;
  double max_grad_norm;
  int64_t t;
  bool decay;
};

void PrintTo(const Case& c, std::ostream* out) { *out << c.name; }

const AdamSpec kUsual{.learning_rate = 1e-3, .beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8, .weight_decay = 0.1};
const AdamSpec kOther{.learning_rate = 1e-2, .beta1 = 0.8, .beta2 = 0.95, .eps = 1e-6, .weight_decay = 0.5};
const Case kCases[] = {
    {"FirstStep", kUsual, 0, 1, true},
    {"FirstStepClipped", kUsual, 1, 1, true},
    {"FirstStepNoDecay", kUsual, 0, 1, false},
    {"OtherFirstStep", kOther, 0, 1, true},
    {"LateStep", kUsual, 0, 1'000'000, true},
    {"LateStepClipped", kUsual, 1, 1'000'000, true},
    {"LateStepNoDecay", kUsual, 0, 1'000'000, false},
    {"OtherLateStep", kOther, 0, 1'000'000, true},
};

class WildAdam : public testing::TestWithParam<Case> {
 protected:
  // Of a gradient norm of 1000 over 16 tokens.
  AdamScalars scalars() const {
    return make_scalars(GetParam().adam, GetParam().max_grad_norm, 1000, 16, GetParam().t);
  }
};
INSTANTIATE_TEST_SUITE_P(Cases, WildAdam, testing::ValuesIn(kCases), [](const auto& info) { return info.param.name; });

// One element in long double, from the same fp32 inputs, and how far fp32 may be from it. u = 2^-24 is the most that
// one rounding moves a normal result, relative to it (half a unit in the last place); d = 2^-150 a subnormal one.
struct Exact {
  long double m, v, p, m_bound, v_bound, p_bound;

  Exact(float old_p, float old_m, float old_v, float sum, const AdamScalars& s, float decay) {
    constexpr long double u = 0x1p-24L, d = 0x1p-150L;
    const long double g = static_cast<long double>(sum) * s.gradient_scale;
    const long double difference = g - old_m;
    m = old_m + s.one_minus_beta1 * difference;
    // Roundings: g (carried on), the difference, its product, the sum.
    m_bound = u * std::fabs(m) + s.one_minus_beta1 * u * (std::fabs(g) + 2 * std::fabs(difference)) + 4 * d;
    v = static_cast<long double>(s.beta2) * old_v + s.one_minus_beta2 * g * g;
    // g twice, two products, one sum; or one product and one sum. The terms do not cancel.
    v_bound = 5 * u * v + 4 * d;
    const long double root = std::sqrt(v);
    const long double denominator = root / s.bias_correction2_sqrt + s.eps;
    // The root halves v's error, or has the root of it near zero; then root, quotient, sum.
    const long double root_bound = std::min(v_bound / std::max(root, 1e-40L), std::sqrt(2 * v_bound));
    const long double relative = (root_bound / s.bias_correction2_sqrt) / denominator + 3 * u;
    const long double step = s.step_size * m / denominator;
    const long double kept = static_cast<long double>(old_p) * decay;
    p = kept - step;
    // The step: the denominator, its own product and quotient, m's error; then the decayed weight and the difference.
    const long double step_bound = (relative + 2 * u) * std::fabs(step) + (s.step_size * m_bound + d) / denominator + d;
    p_bound = u * std::fabs(p) + u * std::fabs(kept) + step_bound + 3 * d;
    // Products of errors were left out.
    for (long double* bound : {&m_bound, &v_bound, &p_bound}) *bound *= 1 + 16 * u;
  }
};

TEST_P(WildAdam, TenMillionStatesAgreeWithLongDouble) {
  constexpr size_t kElements = 125'000;
  constexpr uint32_t kRounds = 10;  // x 8 cases x 125,000 = 10^7
  const AdamScalars s = scalars();
  const float decay = GetParam().decay ? s.decay : 1.0f;
  long double worst_m = 0, worst_v = 0, worst_p = 0;
  for (uint32_t round = 0; round < kRounds; ++round) {
    WildStates wild(kElements, 100 + round);
    const TestState before = wild.state;
    TestState& after = wild.state;
    adam_update(after.hi, after.lo, after.m, after.v, wild.gradient(), s, GetParam().decay);
    for (size_t i = 0; i < kElements; ++i) {
      const Exact exact(before.master(i), before.m[i], before.v[i], wild.sum(i), s, decay);
      const long double m = std::fabs(after.m[i] - exact.m) / exact.m_bound;
      const long double v = std::fabs(after.v[i] - exact.v) / exact.v_bound;
      const long double p = std::fabs(after.master(i) - exact.p) / exact.p_bound;
      ASSERT_TRUE(m <= 1 && v <= 1 && p <= 1)
          << "round " << round << " element " << i << ": p " << before.master(i) << " m " << before.m[i] << " v "
          << before.v[i] << " g " << wild.sum(i) << ": errors over bounds " << m << " " << v << " " << p;
      worst_m = std::max(worst_m, m);
      worst_v = std::max(worst_v, v);
      worst_p = std::max(worst_p, p);
    }
  }
  // A bound that nothing comes near would prove nothing.
  EXPECT_GT(worst_m, 0.25L);
  EXPECT_GT(worst_v, 0.25L);
  EXPECT_GT(worst_p, 0.25L);
}

// Every instruction set, against the same operations one element at a time.
TEST_P(WildAdam, BitsOfWildStatesAreThoseOfScalarCode) {
  constexpr size_t kElements = 20'011;
  const AdamScalars s = scalars();
  const WildStates wild(kElements, 7);
  TestState expected = wild.state;
  for (size_t i = 0; i < kElements; ++i) {
    update_in_scalar_code(expected, i, wild.sum(i), s, GetParam().decay ? s.decay : 1.0f);
  }
  ASSERT_FALSE(expected == wild.state);
  for (const int64_t target : kernel_targets()) {
    const ForcedTarget forced(target);
    TestState state = wild.state;
    adam_update(state.hi, state.lo, state.m, state.v, wild.gradient(), s, GetParam().decay);
    EXPECT_TRUE(state == expected) << hwy::TargetName(target);
    state = wild.state;
    for (UpdatePart part : {UpdatePart::weights, UpdatePart::moments}) {
      adam_update(state.hi, state.lo, state.m, state.v, wild.gradient(), s, GetParam().decay, part);
    }
    EXPECT_TRUE(state == expected) << "split, " << hwy::TargetName(target);
  }
}

// Thirty steps that clip always, never or now and then, some of them with a non-finite gradient.
class Clipping : public testing::TestWithParam<const char*> {
 protected:
  static constexpr size_t kElements = 3 * 1024 + 77;
  static constexpr int64_t kTokens = 23;

  static UnitLayout unit() {
    UnitLayout unit;
    unit.name = "layer 0";
    for (const auto& [elements, decay] : {std::pair<int64_t, bool>{100, false}, {2049, true}, {1000, false}}) {
      unit.tensors.push_back({{}, "tensor", {elements}, unit.elements, elements, decay});
      unit.elements += elements;
    }
    return unit;
  }
  static double norm_of(const TestGradient& gradient) {
    std::vector<double> sums(ceil_div(kElements, kBlockElements));
    block_square_sums(gradient.sources(), kElements, sums);
    return std::sqrt(combine_block_sums(sums));
  }
  // Of the mean gradient's norm: far over it, far under it, or random between.
  double limit(double norm, std::mt19937& random) const {
    const std::string how = GetParam();
    if (how == "never") return 100 * norm;
    if (how == "always") return 0.01 * norm;
    return norm * std::ldexp(1.0, static_cast<int>(random() % 9) - 4);
  }
};
INSTANTIATE_TEST_SUITE_P(Steps, Clipping, testing::Values("always", "never", "now_and_then"),
                         [](const auto& info) { return info.param; });

// A reference that scales and clips the gradient first, element by element, and hands Adam what is to be applied.
TEST_P(Clipping, EqualsAReferenceThatClipsFirst) {
  const UnitLayout unit = Clipping::unit();
  ASSERT_EQ(unit.elements, static_cast<int64_t>(kElements));
  std::mt19937 random(5);
  TestState state = random_state(kElements, 70), split = state, reference = state;
  int64_t updates = 0;
  int clipped = 0, skipped = 0;
  for (uint32_t step = 0; step < 30; ++step) {
    TestGradient gradient(2, 2, DType::bf16, kElements, 200 + step);
    const double limit = this->limit(norm_of(gradient) / kTokens, random);
    const bool bad = step % 7 == 4;
    if (bad) gradient.set(step % 2, random() % kElements, step % 3 == 0 ? std::nanf("") : INFINITY);
    const AdamScalars s = make_scalars(kUsual, limit, norm_of(gradient), kTokens, updates + 1);
    ASSERT_EQ(s.skip, bad);
    const TestState before = state;
    update_chunk(unit, state.view(), 0, unit.elements, gradient.sources(), s);
    update_chunk(unit, split.view(), 0, unit.elements, gradient.sources(), s, UpdatePart::weights);
    update_chunk(unit, split.view(), 0, unit.elements, gradient.sources(), s, UpdatePart::moments);
    if (bad) {
      ASSERT_TRUE(state == before && split == before) << "step " << step;
      ++skipped;
      continue;
    }
    ++updates;
    long double squares = 0;
    for (size_t i = 0; i < kElements; ++i) squares += static_cast<long double>(gradient.sum(i)) * gradient.sum(i);
    const long double norm = std::sqrt(squares) / kTokens;
    const double factor = static_cast<double>(std::min(1.0L, limit / (norm + 1e-6L)));
    EXPECT_NEAR(s.clip_factor, factor, 1e-14 * factor);  // sums of some 3000 doubles
    clipped += factor < 1;
    TestGradient mean(1, 1, DType::fp32, kElements, 0);
    for (size_t i = 0; i < kElements; ++i)
      mean.set(0, i, gradient.sum(i) * static_cast<float>(s.clip_factor / kTokens));
    AdamScalars unscaled = make_scalars(kUsual, 0, 0, 1, updates);
    ASSERT_EQ(unscaled.gradient_scale, 1.0f);
    update_chunk(unit, reference.view(), 0, unit.elements, mean.sources(), unscaled);
    ASSERT_TRUE(state == reference) << "step " << step;
    ASSERT_TRUE(split == reference) << "step " << step;
  }
  EXPECT_EQ(skipped, 4);
  const std::string how = GetParam();
  EXPECT_TRUE(how != "always" || clipped == 26);
  EXPECT_TRUE(how != "never" || clipped == 0);
  EXPECT_TRUE(how != "now_and_then" || (clipped > 5 && clipped < 21)) << clipped;
}

}  // namespace
}  // namespace slidedp
