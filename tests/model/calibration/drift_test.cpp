#include "model/calibration/drift.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace slidedp {
namespace {

// Ten measurements, five repeats in each of three rounds; each later round takes `factor` times as long.
std::vector<Measurement> measured(double factor, double scatter, const char* unit = "s") {
  std::vector<Measurement> all;
  for (int i = 1; i <= 10; ++i) {
    Measurement m{"seconds", unit, {{"bytes", i}}, {}, true};
    double value = i;
    for (int round = 0; round < 3; ++round, value *= factor) {
      for (const double deviation : {-2, 1, 0, -1, 2}) {
        m.repeats.push_back(value * (1 + scatter * deviation));
        m.rounds.push_back(round);
      }
    }
    all.push_back(m);
  }
  return all;
}

TEST(Drift, ASlowingMachineIsSeen) {
  const Drift drift = drift_of(measured(1.05, 0.01));
  EXPECT_TRUE(drift.seen);
  EXPECT_NEAR(drift.ratio, 1.05 * 1.05, 1e-9);
  EXPECT_NE(drift_note("host.dram", drift).find("host.dram: the last round took 10 % longer"), std::string::npos);
  EXPECT_NE(drift_note("p", drift_of(measured(0.95, 0.01))).find("% less"), std::string::npos);
}

TEST(Drift, RatesGoTheOtherWay) {
  const Drift drift = drift_of(measured(1.05, 0.01, "GB/s"));
  EXPECT_NEAR(drift.ratio, 1 / (1.05 * 1.05), 1e-9);
}

TEST(Drift, NoiseAndSmallChangesAreNot) {
  EXPECT_FALSE(drift_of(measured(1, 0.01)).seen);
  EXPECT_FALSE(drift_of(measured(1.005, 0.001)).seen) << "1 % in all";
  EXPECT_FALSE(drift_of(measured(1.015, 0.2)).seen) << "3 % in all, within the scatter";
  EXPECT_EQ(drift_note("p", drift_of(measured(1, 0.01))), "");
}

TEST(Drift, OneRoundAndFactsSayNothing) {
  std::vector<Measurement> one = measured(1.5, 0);
  for (Measurement& m : one) m.rounds.clear();
  EXPECT_FALSE(drift_of(one).seen);
  EXPECT_FALSE(drift_of(measured(1.5, 0, "B")).seen);
  EXPECT_FALSE(drift_of({}).seen);
}

}  // namespace
}  // namespace slidedp
