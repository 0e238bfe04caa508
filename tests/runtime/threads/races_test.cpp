// What runs at the same time touches different bytes: plans from the whole plan space under random delays, on a compute
// that ThreadSanitizer can look into. Without it the results tell: same bits as a plan with nothing to reorder.
#include <gtest/gtest.h>

#include <cmath>
#include <map>

#include "tests/support/disturbance.h"
#include "tests/support/plain_compute.h"
#include "tests/support/plan_matrix.h"
#include "tests/support/tiny_run.h"

namespace slidedp::testing {
namespace {

// So many that two are under way, a third takes the first one's place, and every edge across steps is used.
constexpr int kSteps = 3;

class Races : public ::testing::Test {
 protected:
  const TinyTraining& training(bool tied) const { return tied ? tied_ : untied_; }

  // Shares with `plan` what decides the order and rounding of sums; whole units, nothing in small rings.
  static Plan quiet(Plan plan, const TrainSpec& train) {
    plan.delivery = Delivery::replicated;
    plan.update = train.max_grad_norm > 0 ? UpdatePolicy::deferred : UpdatePolicy::eager;
    plan.chunk_elements = 1 << 24;
    plan.activation.assign(plan.activation.size(), ActivationPolicy::keep);
    plan.layer_slots = plan.gradient_slots = plan.wire_slots = 4;
    plan.vocabulary_slots = 2;
    plan.vocabulary_kept = false;
    plan.landing_slots = 0;
    plan.threads = {};
    return plan;
  }

  TinyTraining tied_{plain_model(true), {make_plain_backend}}, untied_{plain_model(false), {make_plain_backend}};
};

TEST_F(Races, NoneInPlansThatCoverEveryPairOfValuesUnderRandomDelays) {
  const PlanMatrix matrix({tied_.model(), untied_.model(), untied_.train(), untied_.plan()}, 1);
  std::map<std::string, RunResult> expected;  // by what decides the order and rounding of sums
  uint32_t seed = 0;
  for (const MatrixPlan& plan : matrix.plans()) {
    const std::string what = matrix.describe(plan);
    SCOPED_TRACE(what);
    const Watchdog watchdog(what);
    const TinyTraining& training = this->training(plan.tied);
    const auto [reference, missing] = expected.try_emplace(matrix.group(plan));
    if (missing) reference->second = training.run(quiet(plan.plan, plan.train), plan.train, kSteps);
    Disturbance disturbance(++seed);
    const RunResult result = training.run(
        plan.plan, plan.train, kSteps, [&](Backend& backend) { disturbance.wrap(backend); }, disturbance.pool_hook());
    EXPECT_EQ(result.losses, reference->second.losses);
    EXPECT_EQ(result.gradient_norms, reference->second.gradient_norms);
    EXPECT_TRUE(result.state == reference->second.state);
    ASSERT_TRUE(std::isfinite(result.losses.back()));
  }
  RecordProperty("plans", static_cast<int>(matrix.plans().size()));
  RecordProperty("groups", static_cast<int>(expected.size()));
}

}  // namespace
}  // namespace slidedp::testing
