#include "model/calibration/prediction_errors.h"

#include <gtest/gtest.h>

#include <string>

#include "tests/support/synthetic_profile.h"

namespace slidedp {
namespace {

TEST(PredictionErrors, OfARunFromAKnownMachineAreItsNoise) {
  ProfileRun run = test::SyntheticProfile(test::true_machine(), {.repeat = 0.01}, 1).run();
  fit_profile(run, empty_profile(run.machine, run.backend, run.ranks));
  const PredictionErrors errors = prediction_errors(run);
  EXPECT_GE(errors.kernel.count, 9);
  EXPECT_GE(errors.transfer.count, 8);
  EXPECT_GE(errors.concurrent.count, 7);
  // Medians of many repeats with 1 % noise, and laws without the point that may carry most.
  EXPECT_LT(errors.kernel.median, 0.01);
  EXPECT_LT(errors.transfer.median, 0.01);
  EXPECT_LT(errors.concurrent.median, 0.05);
  EXPECT_GE(errors.kernel.p95, errors.kernel.median);
  EXPECT_EQ(named_errors(errors).size(), 6u);
  EXPECT_NE(errors_text(errors).find("concurrent_median_error 0.0"), std::string::npos);
  EXPECT_NE(profile_text(run).find("unseen_kernel_p95_error"), std::string::npos);
}

TEST(PredictionErrors, WithoutSamplesThereAreNone) {
  const PredictionErrors errors = prediction_errors(ProfileRun{});
  EXPECT_TRUE(named_errors(errors).empty());
  EXPECT_EQ(errors_text(errors), "");
}

}  // namespace
}  // namespace slidedp
