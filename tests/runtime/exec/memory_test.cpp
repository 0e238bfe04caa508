// Measured high-water marks against the plan.
#include "model/graph/memory.h"

#include <gtest/gtest.h>

#include "model/cost/activations.h"
#include "tests/support/tiny_run.h"

namespace slidedp::testing {
namespace {

TEST(Memory, MeasuredPeaksStayWithinThePlan) {
  for (const bool tied : {true, false}) {
    const TinyTraining training(tied);
    for (const int ranks : {1, 2, 4}) {
      for (const ActivationPolicy policy : {ActivationPolicy::keep, ActivationPolicy::selective,
                                            ActivationPolicy::recompute, ActivationPolicy::offload}) {
        for (const UpdatePolicy update : {UpdatePolicy::eager, UpdatePolicy::deferred}) {
          Plan plan = training.plan(ranks, 2);
          if (ranks > 1) {
            plan.delivery = Delivery::sharded;
            plan.reduction = Reduction::gpu;
          }
          plan.wire = DType::bf16;
          plan.update = update;
          plan.activation.assign(plan.activation.size(), policy);
          const StepGraph graph = build_step_graph(training.model(), training.train(), plan);
          const MemoryTable table = memory_table(graph, training.model(), HardwareSpec{});
          const RunResult result = training.run(plan, training.train(), 2);
          // The executor allocates the graph's buffers once, and nothing else on the device.
          EXPECT_EQ(result.device_peak, table.device_buffer_bytes);
          EXPECT_LE(result.temporary_peak, table.temporary_bytes * ranks);
          EXPECT_GT(result.temporary_peak, 0);
        }
      }
    }
  }
}

// All inputs of the layers and the head's but for a ring of one more than micro-batches.
TEST(Memory, OffloadedInputsAreNotOnTheDevice) {
  const TinyTraining training(true);
  Plan plan = training.plan(2, 4);
  plan.activation.assign(plan.activation.size(), ActivationPolicy::recompute);
  const int64_t recompute = training.run(plan, training.train(), 1).device_peak;
  plan.activation.assign(plan.activation.size(), ActivationPolicy::offload);
  const int64_t inputs = 4 * (training.model().layers + 1), ring = 4 + 1;
  EXPECT_EQ(training.run(plan, training.train(), 1).device_peak,
            recompute - (inputs - ring) * hidden_bytes(training.model(), plan.micro_batch_tokens(), plan.compute));
}

}  // namespace
}  // namespace slidedp::testing
