#include "model/sim/fair_share.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>

namespace slidedp {
namespace {

std::vector<double> speeds_on(const std::vector<Resource>& resources, const std::vector<std::vector<Load>>& tasks) {
  FairShare sharing(resources);
  std::vector<std::span<const Load>> loads(tasks.begin(), tasks.end());
  std::vector<double> result(tasks.size());
  sharing.share(loads, result);
  return result;
}

std::vector<double> speeds(const std::vector<double>& capacities, const std::vector<std::vector<Load>>& tasks) {
  std::vector<Resource> resources;
  for (double capacity : capacities) resources.push_back({"", capacity});
  return speeds_on(resources, tasks);
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

TEST(FairShare, ALoadedResourceTakesCapacityFromAnother) {
  const std::vector<Resource> resources{{"link", 10, {{1, 0.4}, {2, 0.2}}}, {"a", 8}, {"b", 5}};
  const std::vector<Load> link{{0, 10}};
  EXPECT_EQ(speeds_on(resources, {link}), (std::vector<double>{1}));
  EXPECT_DOUBLE_EQ(speeds_on(resources, {link, {{1, 8}}})[0], 0.6);             // all of a is wanted
  EXPECT_DOUBLE_EQ(speeds_on(resources, {link, {{1, 6}}})[0], 1 - 0.4 * 0.75);  // three quarters of it
  EXPECT_DOUBLE_EQ(speeds_on(resources, {link, {{1, 8}}, {{1, 8}}})[0], 0.6);   // more than there is
  EXPECT_DOUBLE_EQ(speeds_on(resources, {link, {{1, 8}}, {{2, 5}}})[0], 0.4);   // losses add
  EXPECT_DOUBLE_EQ(speeds_on(resources, {link, link, {{1, 4}}})[1], 0.4);       // 8 of 10 for two that want 10 each
  EXPECT_EQ(speeds_on(resources, {link, {{1, 8}}})[1], 1);                      // nothing is lost the other way
  EXPECT_DOUBLE_EQ(resources[0].least_capacity(), 4);
  // What was lost is there again when the others have gone.
  FairShare sharing(resources);
  const std::vector<Load> busy{{1, 8}};
  const std::vector<std::span<const Load>> both{link, busy}, alone{link};
  std::vector<double> s(2);
  sharing.share(both, s);
  EXPECT_DOUBLE_EQ(s[0], 0.6);
  sharing.share(alone, std::span(s).first(1));
  EXPECT_EQ(s[0], 1);
}

TEST(FairShare, SpeedsOfAFullResourceAreInProportionToWeights) {
  const std::vector<Resource> resources{{"a", 10}, {"b", 3}};
  FairShare sharing(resources);
  const auto shared = [&](std::vector<std::vector<Load>> tasks, std::vector<double> weights) {
    std::vector<std::span<const Load>> loads(tasks.begin(), tasks.end());
    std::vector<double> speeds(tasks.size());
    sharing.share(loads, speeds, weights);
    return speeds;
  };
  // Level x: 12 x + 2 * 8 x = 10.
  const std::vector<double> two = shared({{{0, 12}}, {{0, 8}}}, {1, 2});
  EXPECT_DOUBLE_EQ(two[0], 10.0 / 28);
  EXPECT_DOUBLE_EQ(two[1], 20.0 / 28);
  // One that reaches full speed leaves the rest to the other.
  const std::vector<double> posted = shared({{{0, 12}}, {{0, 4}}}, {1, 5});
  EXPECT_DOUBLE_EQ(posted[0], 0.5);
  EXPECT_EQ(posted[1], 1);
  // With room for all, weights say nothing.
  EXPECT_EQ(shared({{{0, 4}}, {{0, 4}}, {{1, 1}}}, {0.5, 3, 7}), (std::vector<double>{1, 1, 1}));
  // A task that another resource stops does not hold back those that weigh less.
  const std::vector<double> stopped = shared({{{0, 12}}, {{0, 6}, {1, 6}}}, {1, 4});
  EXPECT_DOUBLE_EQ(stopped[1], 0.5);
  EXPECT_DOUBLE_EQ(stopped[0], 7.0 / 12);
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
    std::vector<Resource> resources(1 + random() % 6);
    for (Resource& resource : resources) {
      resource.capacity = 3 * amount(random);
      if (random() % 3 == 0) resource.losses = {{static_cast<ResourceId>(random() % resources.size()), 0.3}};
    }
    std::vector<std::vector<Load>> tasks(1 + random() % 12);
    for (std::vector<Load>& task : tasks) {
      for (int r = 0; r < static_cast<int>(resources.size()); ++r) {
        if (random() % 2 == 0) task.push_back({r, amount(random)});
      }
    }
    const std::vector<double> s = speeds_on(resources, tasks);
    std::vector<double> wanted(resources.size(), 0), capacities;
    for (const std::vector<Load>& task : tasks) {
      for (const Load& load : task) wanted[static_cast<size_t>(load.resource)] += load.rate;
    }
    for (const Resource& resource : resources) {
      double left = 1;
      for (const Loss& loss : resource.losses) {
        const auto beside = static_cast<size_t>(loss.beside);
        left -= loss.share * std::min(1.0, wanted[beside] / resources[beside].capacity);
      }
      capacities.push_back(left * resource.capacity);
    }
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
