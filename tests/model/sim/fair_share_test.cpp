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

TEST(FairShare, ALoadedResourceSlowsTheUsersOfAnother) {
  // 0.05 more time for each unit a second that others would take of a, 0.1 for each of b.
  const std::vector<Resource> resources{{"link", 10, {1, 0, {{1, 0.05}, {2, 0.1}}}}, {"a", 8}, {"b", 5}};
  const std::vector<Load> link{{0, 10}};
  EXPECT_EQ(speeds_on(resources, {link}), (std::vector<double>{1}));
  EXPECT_DOUBLE_EQ(speeds_on(resources, {link, {{1, 8}}})[0], 1 / 1.4);
  EXPECT_DOUBLE_EQ(speeds_on(resources, {link, {{1, 6}}})[0], 1 / 1.3);
  EXPECT_DOUBLE_EQ(speeds_on(resources, {link, {{1, 8}}, {{1, 8}}})[0], 1 / 1.4) << "they take no more than there is";
  EXPECT_DOUBLE_EQ(speeds_on(resources, {link, {{1, 8}}, {{2, 5}}})[0], 1 / (1.4 * 1.5)) << "factors multiply";
  EXPECT_DOUBLE_EQ(speeds_on(resources, {link, link, {{1, 4}}})[1], 0.5 / 1.2) << "the capacity is less";
  EXPECT_DOUBLE_EQ(speeds_on(resources, {{{0, 2}}, {{1, 4}}})[0], 1 / 1.2) << "and so is one user's speed";
  EXPECT_EQ(speeds_on(resources, {link, {{1, 8}}})[1], 1) << "nothing is lost the other way";
  // What was lost is there again when the others have gone.
  FairShare sharing(resources);
  const std::vector<Load> busy{{1, 8}};
  const std::vector<std::span<const Load>> both{link, busy}, alone{link};
  std::vector<double> s(2);
  sharing.share(both, s);
  EXPECT_DOUBLE_EQ(s[0], 1 / 1.4);
  sharing.share(alone, std::span(s).first(1));
  EXPECT_EQ(s[0], 1);
}

TEST(FairShare, ContentionWithinTheHeadroomDoesNotShow) {
  const std::vector<Resource> resources{{"link", 10, {1.25, 0, {{1, 0.05}}}}, {"a", 20}};
  EXPECT_EQ(speeds_on(resources, {{{0, 10}}})[0], 1);
  EXPECT_EQ(speeds_on(resources, {{{0, 10}}, {{1, 4}}})[0], 1);
  EXPECT_DOUBLE_EQ(speeds_on(resources, {{{0, 10}}, {{1, 10}}})[0], 1.25 / 1.5);
}

// As threads that wait for memory: two take less than twice as much as one.
TEST(FairShare, UsersSlowEachOther) {
  const std::vector<Resource> resources{{"stream", 100, {1, 0.02, {}}}, {"link", 10, {1, 0, {{0, 0.05}}}}};
  const std::vector<Load> thread{{0, 10}}, copy{{1, 10}};
  EXPECT_DOUBLE_EQ(speeds_on(resources, {thread})[0], 1 / 1.2);
  EXPECT_DOUBLE_EQ(speeds_on(resources, {thread, thread})[1], 1 / 1.4);
  // Beside the copy they count as what they would take: 20 / 1.4.
  EXPECT_DOUBLE_EQ(speeds_on(resources, {thread, thread, copy})[2], 1 / (1 + 0.05 * 20 / 1.4));
  // The capacity holds all the same.
  const std::vector<std::vector<Load>> many(50, thread);
  EXPECT_DOUBLE_EQ(speeds_on({{"stream", 30, {1, 0.02, {}}}}, many)[0], 30.0 / 500);
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

// What makes an allocation max-min fair: no resource is overfull, and every task below its highest speed uses a full
// resource where no other user is faster.
TEST(FairShare, RandomLoadsAreMaxMinFair) {
  std::mt19937 random(7);
  std::uniform_real_distribution<double> amount(0.1, 10);
  int slowed = 0;
  for (int round = 0; round < 500; ++round) {
    std::vector<Resource> resources(1 + random() % 6);
    for (Resource& resource : resources) {
      resource.capacity = 3 * amount(random);
      if (random() % 3 == 0) {
        resource.contention = {1.1, 0.01, {{static_cast<ResourceId>(random() % resources.size()), 0.02}}};
      }
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
    const auto own = [&](size_t r) { return 1 + resources[r].contention.per_unit_of_own * wanted[r]; };
    std::vector<double> limits;
    for (size_t r = 0; r < resources.size(); ++r) {
      double left = resources[r].contention.headroom;
      for (const Beside& beside : resources[r].contention.beside) {
        const auto other = static_cast<size_t>(beside.other);
        left /= 1 + beside.per_unit * std::min(resources[other].capacity, wanted[other] / own(other));
      }
      capacities.push_back(std::min(left, 1.0) * resources[r].capacity);
      limits.push_back(std::min(left / own(r), 1.0));
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
      double limit = 1;
      for (const Load& load : tasks[i]) limit = std::min(limit, limits[static_cast<size_t>(load.resource)]);
      EXPECT_LE(s[i], limit * (1 + kRounding));
      if (s[i] >= limit * (1 - kRounding)) continue;
      ++slowed;
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
