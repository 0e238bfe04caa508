#include "model/sim/fair_share.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>

namespace slidedp {
namespace {

std::vector<double> speeds(const std::vector<double>& capacities, const std::vector<std::vector<Load>>& tasks) {
  FairShare sharing(capacities);
  std::vector<std::span<const Load>> loads(tasks.begin(), tasks.end());
  std::vector<double> result(tasks.size());
  sharing.share(loads, result);
  return result;
}

TEST(FairShare, TasksThatFitRunAtFullSpeed) {
  EXPECT_EQ(speeds({10, 10}, {{{0, 6}}, {{0, 4}, {1, 10}}, {}}), (std::vector<double>{1, 1, 1}));
}

TEST(FairShare, TasksOfOneFullResourceSlowDownByTheSameFactor) {
  // 6 + 9 on a capacity of 10: both at 2/3, whatever each demands.
  const std::vector<double> s = speeds({10}, {{{0, 6}}, {{0, 9}}});
  EXPECT_DOUBLE_EQ(s[0], 2.0 / 3);
  EXPECT_DOUBLE_EQ(s[1], 2.0 / 3);
}

TEST(FairShare, WhatAStoppedTaskLeavesGoesToTheOthers) {
  // Resource 0 stops the first two at 1/4 each; the third has resource 1 (capacity 6) with the second, which takes
  // 4/4 = 1 there: (6 - 1) / 8 = 5/8.
  const std::vector<double> s = speeds({2, 6}, {{{0, 4}}, {{0, 4}, {1, 4}}, {{1, 8}}});
  EXPECT_DOUBLE_EQ(s[0], 0.25);
  EXPECT_DOUBLE_EQ(s[1], 0.25);
  EXPECT_DOUBLE_EQ(s[2], 0.625);
}

TEST(FairShare, TwoResourcesThatFillTogether) {
  const std::vector<double> s = speeds({0.3, 0.3}, {{{0, 0.1}, {1, 0.3}}, {{0, 0.3}, {1, 0.1}}, {{0, 0.2}, {1, 0.2}}});
  for (double speed : s) EXPECT_DOUBLE_EQ(speed, 0.5);
}

// Where resources fill together, what is left for the smallest demands is rounding error; nobody may starve on it.
TEST(FairShare, RoundingStarvesNobody) {
  std::mt19937 random(8);
  std::uniform_real_distribution<double> exponent(-3, 15);
  for (int round = 0; round < 2000; ++round) {
    std::vector<double> capacities(3, 0);
    std::vector<std::vector<Load>> tasks(5);
    for (std::vector<Load>& task : tasks) {
      for (int r = 0; r < 3; ++r) {
        if (random() % 3 == 0) continue;
        task.push_back({r, std::pow(10, exponent(random))});
        capacities[static_cast<size_t>(r)] += 0.3 * task.back().rate;
      }
    }
    // Every resource allows 0.3, and rounds its sums within 1e-12 of them.
    for (double speed : speeds(capacities, tasks)) ASSERT_GE(speed, 0.3 * (1 - 1e-12)) << "round " << round;
  }
}

// What makes an allocation max-min fair: no resource is overfull, and every task below full speed uses a full resource
// where no other user is faster.
TEST(FairShare, RandomLoadsAreMaxMinFair) {
  std::mt19937 random(7);
  std::uniform_real_distribution<double> amount(0.1, 10);
  int slowed = 0;
  for (int round = 0; round < 500; ++round) {
    std::vector<double> capacities(1 + random() % 6);
    for (double& capacity : capacities) capacity = 3 * amount(random);
    std::vector<std::vector<Load>> tasks(1 + random() % 12);
    for (std::vector<Load>& task : tasks) {
      for (int r = 0; r < static_cast<int>(capacities.size()); ++r) {
        if (random() % 2 == 0) task.push_back({r, amount(random)});
      }
    }
    const std::vector<double> s = speeds(capacities, tasks);
    std::vector<double> used(capacities.size(), 0), fastest(capacities.size(), 0);
    for (size_t i = 0; i < tasks.size(); ++i) {
      for (const Load& load : tasks[i]) {
        used[static_cast<size_t>(load.resource)] += load.rate * s[i];
        double& most = fastest[static_cast<size_t>(load.resource)];
        most = std::max(most, s[i]);
      }
    }
    constexpr double kRounding = 1e-9;  // sums of some dozen doubles
    for (size_t r = 0; r < capacities.size(); ++r) EXPECT_LE(used[r], capacities[r] * (1 + kRounding));
    for (size_t i = 0; i < tasks.size(); ++i) {
      ASSERT_GT(s[i], 0);
      if (s[i] == 1) continue;
      ++slowed;
      EXPECT_LT(s[i], 1);
      EXPECT_TRUE(std::any_of(tasks[i].begin(), tasks[i].end(), [&](const Load& load) {
        const auto r = static_cast<size_t>(load.resource);
        return used[r] >= capacities[r] * (1 - kRounding) && s[i] >= fastest[r] * (1 - kRounding);
      }));
    }
  }
  EXPECT_GT(slowed, 500);
}

}  // namespace
}  // namespace slidedp
