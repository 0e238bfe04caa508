#include "runtime/host/host_state.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>
#include <random>

#include "model/base/error.h"

namespace slidedp {
namespace {

// bf16 bits of `value` rounded to nearest, ties away from zero, by arithmetic on the value instead of its bits.
uint16_t reference_hi(float value) {
  constexpr int kFraction = 7, kMinExponent = -126;
  if (std::isinf(value) || value == 0) return static_cast<uint16_t>(std::bit_cast<uint32_t>(value) >> 16);
  int exponent = 0;
  std::frexp(std::fabs(static_cast<double>(value)), &exponent);  // in [0.5, 1) * 2^exponent
  const double spacing = std::ldexp(1.0, std::max(exponent - 1, kMinExponent) - kFraction);
  const double rounded = std::floor(std::fabs(static_cast<double>(value)) / spacing + 0.5) * spacing;
  const auto bits = std::bit_cast<uint32_t>(std::copysign(static_cast<float>(rounded), value));
  return static_cast<uint16_t>(bits >> 16);
}

void expect_exact(uint32_t bits) {
  const auto value = std::bit_cast<float>(bits);
  const HiLo parts = split_master(value);
  ASSERT_EQ(std::bit_cast<uint32_t>(join_master(parts)), bits);
  ASSERT_EQ(parts.lo, bits & 0xffff);
  if (std::isnan(value)) return;  // hi need not be a NaN; the pair is exact all the same
  ASSERT_EQ(parts.hi, reference_hi(value)) << std::hexfloat << value;
}

TEST(HiLo, EveryBf16ValueWithEveryKindOfLowBits) {
  for (uint32_t high = 0; high < 0x10000; ++high) {
    ASSERT_EQ(split_master(std::bit_cast<float>(high << 16)).hi, high);
    for (uint32_t low : {0x0000u, 0x0001u, 0x7fffu, 0x8000u, 0x8001u, 0xffffu}) expect_exact(high << 16 | low);
  }
}

TEST(HiLo, RandomBitPatterns) {
  std::mt19937 random(1);
  for (int i = 0; i < 10'000'000; ++i) {
    // Every fourth is a tie, every fourth subnormal.
    uint32_t bits = static_cast<uint32_t>(random());
    if (i % 4 == 1) bits = (bits & 0xffff0000u) | 0x8000u;
    if (i % 4 == 2) bits &= 0x807fffffu;
    expect_exact(bits);
    if (HasFatalFailure()) return;
  }
}

TEST(HiLo, NamedCases) {
  const float infinity = std::numeric_limits<float>::infinity();
  EXPECT_EQ(split_master(infinity).hi, 0x7f80);
  EXPECT_EQ(split_master(-infinity).hi, 0xff80);
  EXPECT_EQ(split_master(-0.0f).hi, 0x8000);
  EXPECT_EQ(split_master(0x1.01p0f).hi, 0x3f81) << "a tie goes away from zero";
  EXPECT_EQ(split_master(-0x1.01p0f).hi, 0xbf81) << "a tie goes away from zero";
  EXPECT_EQ(split_master(0x1.00fffep0f).hi, 0x3f80) << "just below a tie";
  EXPECT_EQ(split_master(std::numeric_limits<float>::max()).hi, 0x7f80) << "overflows to infinity";
  EXPECT_EQ(split_master(0x1p-149f).hi, 0) << "the smallest subnormal rounds to zero and keeps its bits in lo";
  EXPECT_EQ(join_master(split_master(0x1p-149f)), 0x1p-149f);
}

ModelLayout two_units() {
  ModelLayout layout;
  for (int unit = 0; unit < 2; ++unit) {
    UnitLayout& added = layout.units.emplace_back();
    added.unit = unit;
    added.elements = unit == 0 ? 128 : 6400;
    layout.elements += added.elements;
  }
  return layout;
}

TEST(HostState, ViewsAreZeroDisjointAndExact) {
  HostState state(two_units());
  EXPECT_GE(state.bytes(), 12 * 6528);
  EXPECT_LT(state.bytes(), 12 * 6528 + 4 * 4096);
  for (int unit = 0; unit < 2; ++unit) {
    const UnitState view = state.unit(unit);
    const auto elements = static_cast<size_t>(state.layout().units[static_cast<size_t>(unit)].elements);
    ASSERT_EQ(view.hi.size(), elements);
    ASSERT_EQ(view.lo.size(), elements);
    ASSERT_EQ(view.m.size(), elements);
    ASSERT_EQ(view.v.size(), elements);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(view.hi.data()) % 128, 0u);
    for (size_t i = 0; i < elements; ++i) {
      ASSERT_TRUE(view.hi[i] == 0 && view.lo[i] == 0 && view.m[i] == 0 && view.v[i] == 0);
      view.hi[i] = view.lo[i] = static_cast<uint16_t>(unit + 1);
      view.m[i] = view.v[i] = static_cast<float>(unit + 1);
    }
  }
  for (int unit = 0; unit < 2; ++unit) {
    const UnitState view = state.unit(unit);
    EXPECT_THAT(view.hi, testing::Each(unit + 1));
    EXPECT_THAT(view.lo, testing::Each(unit + 1));
    EXPECT_THAT(view.m, testing::Each(static_cast<float>(unit + 1)));
    EXPECT_THAT(view.v, testing::Each(static_cast<float>(unit + 1)));
  }
}

TEST(HostState, UnitsAreSpreadOverTheMemoryNodes) {
  ModelLayout layout = two_units();
  layout.units.push_back(layout.units[0]);
  layout.units[2].unit = 2;
  layout.elements += layout.units[2].elements;
  HostState state(layout, {{0, {}}, {0, {}}});  // two regions, both on the node that every machine has
  ASSERT_EQ(state.arenas().size(), 2u);
  EXPECT_NE(state.node(1), state.node(0)) << "the two largest are apart";
  for (int unit = 0; unit < 3; ++unit) {
    const UnitState view = state.unit(unit);
    const Arena& arena = state.arenas()[static_cast<size_t>(state.node(unit))];
    const auto* begin = static_cast<const std::byte*>(arena.data());
    for (const auto* data : {static_cast<const void*>(view.hi.data()), static_cast<const void*>(view.v.data())}) {
      EXPECT_GE(data, begin);
      EXPECT_LT(data, begin + arena.bytes());
    }
    EXPECT_EQ(view.lo.size(), static_cast<size_t>(layout.units[static_cast<size_t>(unit)].elements));
    std::fill(view.m.begin(), view.m.end(), static_cast<float>(unit + 1));
  }
  for (int unit = 0; unit < 3; ++unit) EXPECT_THAT(state.unit(unit).m, testing::Each(static_cast<float>(unit + 1)));
  state.touch(2, nullptr);
}

TEST(HostState, RefusesMoreThanTheHostHas) {
  ModelLayout layout = two_units();
  layout.units[1].elements = int64_t{1} << 44;
  layout.elements = layout.units[0].elements + layout.units[1].elements;
  try {
    HostState state(layout);
    FAIL() << "a state of 192 TiB was allocated";
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), testing::HasSubstr("training state"));
    EXPECT_THAT(error.what(), testing::HasSubstr("available"));
  }
}

}  // namespace
}  // namespace slidedp
