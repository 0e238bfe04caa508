// Two independent implementations of the decoder: the CPU backend's and the tests' plain loops.
#include "tests/support/plain_compute.h"

#include <gtest/gtest.h>

#include "tests/support/tiny_run.h"

namespace slidedp::testing {
namespace {

// Both round in fp32, in another order: about 1e-7 of a sum's size for each of the few sums that a gradient goes
// through, and exponentials of an ulp or two.
constexpr double kTolerance = 1e-5;

TEST(PlainCompute, AgreesWithTheCpuBackend) {
  const auto aten = [](const ModelSpec& model, const ModelLayout& layout, const Plan& plan) {
    return make_backend(model, layout, plan);
  };
  for (const bool tied : {true, false}) {
    const TinyTraining plain(plain_model(tied), {make_plain_backend}), other(plain_model(tied), {aten});
    for (const ActivationPolicy activation :
         {ActivationPolicy::keep, ActivationPolicy::selective, ActivationPolicy::recompute}) {
      SCOPED_TRACE(name(activation));
      Plan plan = plain.plan(2, 2);
      plan.activation.assign(plan.activation.size(), activation);
      const RunResult a = plain.first_step(plan, plain.train()), b = other.first_step(plan, other.train());
      EXPECT_NEAR(a.losses.front(), b.losses.front(), kTolerance * b.losses.front());
      ASSERT_EQ(a.first_gradients.size(), b.first_gradients.size());
      for (size_t t = 0; t < a.first_gradients.size(); ++t) {
        EXPECT_LE(relative_difference(a.first_gradients[t], b.first_gradients[t]), kTolerance) << "tensor " << t;
      }
    }
  }
}

}  // namespace
}  // namespace slidedp::testing
