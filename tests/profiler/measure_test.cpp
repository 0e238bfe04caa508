#include "profiler/measure.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>
#include <set>

#include "model/base/error.h"

namespace slidedp {
namespace {

// A clock that only moves when a repeat is taken.
struct FakeTime {
  double now = 100;
  Clock clock() {
    return [this] { return now; };
  }
};

Measurement named(const char* name) { return {name, "s", {{"bytes", 8}}, {}, true}; }

TEST(Statistics, MedianAndItsError) {
  EXPECT_EQ(median(std::vector<double>{3}), 3);
  EXPECT_EQ(median(std::vector<double>{4, 1, 3}), 3);
  EXPECT_EQ(median(std::vector<double>{4, 1, 3, 2}), 2.5);
  EXPECT_EQ(relative_error(std::vector<double>{2, 2, 2}), 0);
  // Quartiles of 1..9 are 3 and 7: 1.57 * 4 / sqrt(9) / 5.
  EXPECT_DOUBLE_EQ(relative_error(std::vector<double>{9, 8, 7, 6, 5, 4, 3, 2, 1}), 1.57 * 4 / 3 / 5);
  EXPECT_THROW(median(std::vector<double>{}), std::logic_error);
}

TEST(Harness, SteadyValuesEndAfterTheFewestRepeats) {
  FakeTime time;
  int calls = 0;
  const Harness harness({.warm_up = 2, .min_repeats = 5, .max_repeats = 25, .tolerance = 0.02, .time_limit_s = 100},
                        time.clock());
  // The first calls are slow, as cold code is: warm-up must keep them out.
  const Measurement m = harness.measure(named("seconds"), [&] { return ++calls <= 2 ? 50.0 : 1.0; });
  EXPECT_EQ(calls, 7);
  EXPECT_THAT(m.repeats, testing::ElementsAre(1, 1, 1, 1, 1));
  EXPECT_TRUE(m.steady);
  EXPECT_EQ(m.value_name, "seconds");
  EXPECT_EQ(m.parameters.at("bytes"), 8);
}

TEST(Harness, NoisyValuesTakeMoreRepeatsUntilSteady) {
  FakeTime time;
  std::mt19937 random(1);
  std::uniform_real_distribution<double> noise(0.95, 1.05);
  const Harness harness({.warm_up = 0, .min_repeats = 5, .max_repeats = 1000, .tolerance = 0.01, .time_limit_s = 1e9},
                        time.clock());
  const Measurement m = harness.measure(named("seconds"), [&] { return noise(random); });
  EXPECT_TRUE(m.steady);
  EXPECT_LT(relative_error(m.repeats), 0.01);
  // An interquartile range of 5 % needs about (1.57 * 0.05 / 0.01)^2 = 62 repeats; any five may look steadier.
  EXPECT_GT(m.repeats.size(), 5u);
  EXPECT_LT(m.repeats.size(), 200u);
}

TEST(Harness, MostRepeatsEndsWhatNeverSteadies) {
  FakeTime time;
  int calls = 0;
  const Harness harness({.warm_up = 0, .min_repeats = 3, .max_repeats = 11, .tolerance = 0.02, .time_limit_s = 1e9},
                        time.clock());
  const Measurement m = harness.measure(named("seconds"), [&] { return 1.0 + calls++ % 2; });
  EXPECT_EQ(m.repeats.size(), 11u);
  EXPECT_FALSE(m.steady);
}

TEST(Harness, TimeLimitEndsButNotBeforeTheFewestRepeats) {
  FakeTime time;
  int calls = 0;
  const auto slow = [&] {
    time.now += 1;
    return 1.0 + calls++ % 2;
  };
  const HarnessSettings settings{
      .warm_up = 1, .min_repeats = 3, .max_repeats = 100, .tolerance = 0.02, .time_limit_s = 6.5};
  const Measurement m = Harness(settings, time.clock()).measure(named("seconds"), slow);
  EXPECT_EQ(m.repeats.size(), 6u);  // with the warm-up seven seconds
  EXPECT_FALSE(m.steady);
  HarnessSettings no_time = settings;
  no_time.time_limit_s = 0;
  EXPECT_EQ(Harness(no_time, time.clock()).measure(named("seconds"), slow).repeats.size(), 3u);
}

TEST(Harness, SeveralValuesOfOneRepeatAreSteadyTogether) {
  FakeTime time;
  int calls = 0;
  const Harness harness({.warm_up = 0, .min_repeats = 3, .max_repeats = 9, .tolerance = 0.02, .time_limit_s = 1e9},
                        time.clock());
  const auto both = harness.measure({named("forward"), named("backward")}, [&] {
    return std::vector<double>{1.0, 1.0 + calls++ % 2};
  });
  ASSERT_EQ(both.size(), 2u);
  EXPECT_EQ(both[0].repeats.size(), 9u);
  EXPECT_TRUE(both[0].steady);
  EXPECT_FALSE(both[1].steady);
  EXPECT_THROW(harness.measure({named("forward"), named("backward")}, [] { return std::vector<double>{1.0}; }),
               std::logic_error);
}

TEST(Harness, StopEndsBetweenRepeats) {
  FakeTime time;
  std::atomic<bool> stop = false;
  int calls = 0;
  const Harness harness({.warm_up = 0, .min_repeats = 50, .max_repeats = 50}, time.clock(), &stop);
  try {
    harness.measure(named("seconds"), [&] {
      stop = ++calls == 4;
      return 1.0;
    });
    FAIL() << "was not stopped";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ExitCode::interrupted);
  }
  EXPECT_EQ(calls, 4);
}

}  // namespace
}  // namespace slidedp
