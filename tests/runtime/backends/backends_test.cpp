#include "runtime/device/backends.h"

#include <gmock/gmock.h>

#include "model/base/error.h"

namespace slidedp {
namespace {

using testing::AllOf;
using testing::Contains;
using testing::HasSubstr;

TEST(Backends, CpuIsAlwaysThere) { EXPECT_THAT(backend_names(), Contains("cpu")); }

TEST(Backends, MakesOneDeviceARankWithTheBudget) {
  const Backend backend = make_backend("cpu", 3, {.memory_budget = 1000});
  ASSERT_EQ(backend.devices.size(), 3u);
  for (int rank = 0; rank < 3; ++rank) {
    EXPECT_EQ(backend.devices[rank]->rank(), rank);
    EXPECT_EQ(backend.devices[rank]->memory().budget, 1000);
  }
  EXPECT_EQ(backend.collective->ranks(), 3);
  EXPECT_TRUE(backend.compute.empty());
}

TEST(Backends, ZeroBudgetIsNoLimit) {
  const Backend backend = make_backend("cpu", 1);
  EXPECT_EQ(backend.devices[0]->allocate(1 << 20, "buffer").bytes(), 1 << 20);
}

TEST(Backends, UnknownOneIsNamedWithWhatThereIs) {
  try {
    make_backend("tpu", 1);
    FAIL();
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), AllOf(HasSubstr("tpu"), HasSubstr("available: cpu")));
  }
  EXPECT_THROW(temporary_memory("tpu"), Error);
  EXPECT_THROW(make_backend("cpu", 0), Error);
}

TEST(Backends, MakesComputeForAModelAndPlan) {
  ModelSpec model;
  model.hidden = model.intermediate = model.vocabulary = model.max_position = 64;
  model.layers = model.heads = model.kv_heads = 1;
  model.head_dim = 64;
  Plan plan;
  plan.backend = "cpu";
  plan.ranks = 2;
  plan.activation = {ActivationPolicy::keep};
  plan.seq = plan.head_chunk_tokens = 8;
  const ModelLayout layout = make_layout(model);
  const Backend backend = make_backend(model, layout, plan, {.memory_budget = 1 << 20});
  ASSERT_EQ(backend.devices.size(), 2u);
  EXPECT_EQ(backend.devices[1]->memory().budget, 1 << 20);
  ASSERT_EQ(backend.compute.size(), 2u);
  EXPECT_NE(backend.compute[0], nullptr);
  EXPECT_NE(backend.compute[1], nullptr);
  plan.backend = "tpu";
  EXPECT_THROW(make_backend(model, layout, plan), Error);
}

}  // namespace
}  // namespace slidedp
