// The space of plans: what it holds, pins, and memory without a graph.
#include "planner/space.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <functional>
#include <map>
#include <optional>
#include <random>
#include <set>

#include "model/base/format.h"
#include "planner/report.h"
#include "tests/planner/problems.h"

namespace slidedp {
namespace {

using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;

// A tied four-layer model, eight rows, four CUDA ranks: every dimension of the space has a choice.
struct Example {
  ModelSpec model;
  TrainSpec train;
  HardwareSpec hardware;
  Example() {
    std::mt19937 random(7);
    model = test::random_model(random);
    model.layers = 4;
    model.tied = true;
    train.seq = 512;
    train.batch_rows = 8;
    train.steps = 1;
    hardware = test::random_hardware(random);
    hardware.gpus = 4;
    hardware.device.backend = "cuda";
    hardware.host.cores = 16;
  }
  std::vector<Plan> plans(const Pins& pins = {}) const { return enumerate_plans(model, train, hardware, pins); }
  std::string error(const Pins& pins) const {
    try {
      plans(pins);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ExitCode::failure);
      return error.what();
    }
    return "";
  }
};

template <typename T>
std::set<T> values(const std::vector<Plan>& plans, T Plan::*field) {
  std::set<T> found;
  for (const Plan& plan : plans) found.insert(plan.*field);
  return found;
}

TEST(Space, HoldsTheDocumentedValues) {
  const Example example;
  const std::vector<Plan> plans = example.plans();
  EXPECT_THAT(values(plans, &Plan::ranks), ElementsAre(1, 2, 4));
  EXPECT_THAT(values(plans, &Plan::delivery),
              ElementsAre(Delivery::replicated, Delivery::sharded, Delivery::broadcast));
  EXPECT_THAT(values(plans, &Plan::reduction), ElementsAre(Reduction::cpu, Reduction::gpu));
  EXPECT_THAT(values(plans, &Plan::update), ElementsAre(UpdatePolicy::eager, UpdatePolicy::deferred));
  EXPECT_THAT(values(plans, &Plan::micro_batch_rows), ElementsAre(1, 2, 4, 8));
  EXPECT_THAT(values(plans, &Plan::micro_batches), ElementsAre(1, 2, 4, 8));
  EXPECT_THAT(values(plans, &Plan::waves), ElementsAre(1, 2, 4, 8));
  EXPECT_THAT(values(plans, &Plan::wire), ElementsAre(DType::bf16));
  EXPECT_THAT(values(plans, &Plan::accumulator), ElementsAre(DType::bf16, DType::fp32));
  EXPECT_THAT(values(plans, &Plan::layer_slots), ElementsAre(2, 3));
  EXPECT_THAT(values(plans, &Plan::vocabulary_kept), ElementsAre(false, true));
  EXPECT_THAT(values(plans, &Plan::head_chunk_tokens), ElementsAre(256, 512, 1024, 2048, 4096));
  std::set<std::string> seen;
  std::set<std::array<int, 3>> counts;
  for (const Plan& plan : plans) {
    EXPECT_NO_THROW(validate_plan(plan, example.model, example.train));
    EXPECT_TRUE(seen.insert(fmt::format("{}, head {}", summary(plan), plan.head_chunk_tokens)).second) << "twice";
    EXPECT_TRUE(std::is_sorted(plan.activation.rbegin(), plan.activation.rend()))
        << "offload, recompute, selective, keep";
    const ActivationCounts found = activation_counts(plan);
    counts.insert({found.offload, found.recompute, found.selective});
    const int64_t layer_chunks = ceil_div(make_layout(example.model).units[1].elements, plan.chunk_elements);
    EXPECT_EQ(plan.landing_slots, plan.waves == 1 ? 0 : 2 * layer_chunks);
    EXPECT_EQ(plan.threads.update, 16 - plan.ranks - 1);
  }
  EXPECT_EQ(counts.size(), 35u);  // all triples with a sum of at most 4
}

TEST(Space, ClippingLeavesUpdatesAfterTheNorm) {
  Example example;
  example.train.max_grad_norm = 1;
  EXPECT_THAT(values(example.plans(), &Plan::update), ElementsAre(UpdatePolicy::deferred, UpdatePolicy::split));
}

TEST(Space, ChunksSuitTheModel) {
  const Example example;
  const HardwareSpec& hardware = example.hardware;
  const auto ladder = [&](const char* name) {
    const ModelSpec model = load_model_spec(test::config(name));
    return chunk_ladder(SearchProblem(model, example.train, hardware, {}), 4);
  };
  const int64_t mib = 1 << 19;  // elements in a MiB of bf16
  // Chunks of 1 and 4 MiB would cut the 8B model into thousands; a layer of it has 218,112,000 elements with gaps.
  const auto large = ladder("model/Llama-3.1-8B.json");
  ASSERT_EQ(large.size(), 3u);
  EXPECT_EQ(large[0], 16 * mib);
  EXPECT_EQ(large[1], 64 * mib);
  EXPECT_GE(large[2], 218'112'000);
  const auto small = ladder("model/SmolLM2-135M.json");
  ASSERT_EQ(small.size(), 3u);
  EXPECT_EQ(small[0], mib);
  EXPECT_EQ(small[1], 4 * mib);
  EXPECT_GE(small[2], 3'540'096);
  const SearchProblem tiny(example.model, example.train, hardware, {});
  EXPECT_EQ(chunk_ladder(tiny, 4).size(), 2u);
}

// No choice within the host bytes needs less device memory than `smallest` says.
void expect_smallest(const CombinationMemory& memory, const std::vector<ActivationCounts>& choices, int64_t host) {
  const size_t last = memory.head_chunks().size() - 1;
  const ActivationCounts smallest = memory.smallest(host);
  EXPECT_LE(memory.host_bytes(smallest), host);
  for (const ActivationCounts counts : choices) {
    if (memory.host_bytes(counts) > host) continue;
    EXPECT_LE(memory.device_bytes(smallest, last), memory.device_bytes(counts, 0));
    EXPECT_LE(memory.device_bytes(smallest, last), memory.device_bytes(counts, last));
  }
}

// Of the choices that recompute as many layers as `counts`, in one way or the other, the first that fits.
void expect_least_offload(const CombinationMemory& memory, const std::vector<ActivationCounts>& choices,
                          ActivationCounts counts, std::mt19937& random) {
  const ActivationCounts resident{counts.recompute + counts.offload, counts.selective};
  const int64_t device = memory.device_bytes(counts, 0) - test::pick(random, std::vector<int64_t>{0, 0, 1, 100'000});
  std::optional<ActivationCounts> least;
  for (const ActivationCounts choice : choices) {
    const bool alike = choice.selective == counts.selective && choice.recompute + choice.offload == resident.recompute;
    if (alike && !least && memory.device_bytes(choice, 0) <= device) least = choice;
  }
  if (least == resident) least.reset();  // needs no offload
  EXPECT_EQ(memory.offloading(resident, 0, device), least);
}

TEST(Space, MemoryEqualsTheBuiltGraphs) {
  for (unsigned seed = 0; seed < 10; ++seed) {
    std::mt19937 random(seed);
    const ModelSpec model = test::random_model(random);
    const TrainSpec train = test::random_train(random);
    const HardwareSpec hardware = test::random_hardware(random);
    const SearchProblem problem(model, train, hardware, {});
    const std::vector<Plan> plans = enumerate_plans(model, train, hardware, {});
    for (int i = 0; i < 20; ++i) {
      const Plan& plan = test::pick(random, plans);
      const MemoryTable quick = plan_memory(problem, plan);
      const MemoryTable built = memory_table(build_step_graph(model, train, plan), model, hardware);
      EXPECT_EQ(quick.device_bytes(), built.device_bytes());
      EXPECT_EQ(quick.host_bytes(), built.host_bytes());
      EXPECT_EQ(quick.device_buffer_bytes, built.device_buffer_bytes);
      Combination combination = plan;
      combination.activation.clear();
      combination.head_chunk_tokens = 0;
      const CombinationMemory memory(problem, combination);
      const auto chunk = std::ranges::find(memory.head_chunks(), plan.head_chunk_tokens);
      EXPECT_EQ(memory.device_bytes(activation_counts(plan), chunk - memory.head_chunks().begin()),
                built.device_bytes());
      EXPECT_EQ(memory.host_bytes(activation_counts(plan)), built.host_bytes());
      expect_smallest(memory, activation_choices(problem), built.host_bytes());
      expect_least_offload(memory, activation_choices(problem), activation_counts(plan), random);
    }
  }
}

TEST(Pins, EveryFieldIsHonoured) {
  const Example example;
  const std::map<std::pair<std::string, std::string>, std::function<bool(const Plan&)>> checks{
      {{"ranks", "2"}, [](const Plan& p) { return p.ranks == 2; }},
      {{"delivery", "sharded"}, [](const Plan& p) { return p.delivery == Delivery::sharded; }},
      {{"reduction", "gpu"}, [](const Plan& p) { return p.reduction == Reduction::gpu; }},
      {{"chunk", "16KiB"}, [](const Plan& p) { return p.chunk_elements == 8192; }},
      {{"chunk_elements", "1000"}, [](const Plan& p) { return p.chunk_elements == 1000; }},
      {{"delivery", "broadcast"}, [](const Plan& p) { return p.delivery == Delivery::broadcast; }},
      {{"update", "split"}, [](const Plan& p) { return p.update == UpdatePolicy::split; }},
      {{"activation", "selective"},
       [](const Plan& p) { return p.activation == std::vector(4, ActivationPolicy::selective); }},
      {{"activation", "recompute:1,selective:2,keep:1"},
       [](const Plan& p) {
         using enum ActivationPolicy;
         return p.activation == std::vector{recompute, selective, selective, keep};
       }},
      {{"activation", "offload:2,keep:2"},
       [](const Plan& p) {
         using enum ActivationPolicy;
         return p.activation == std::vector{offload, offload, keep, keep};
       }},
      {{"activation", "recompute"},
       [](const Plan& p) { return p.activation == std::vector(4, ActivationPolicy::recompute); }},
      {{"activation", "keep:1,recompute:2,keep:1"},
       [](const Plan& p) {
         using enum ActivationPolicy;
         return p.activation == std::vector{keep, recompute, recompute, keep};
       }},
      {{"update", "deferred"}, [](const Plan& p) { return p.update == UpdatePolicy::deferred; }},
      {{"wire", "fp32"}, [](const Plan& p) { return p.wire == DType::fp32 && p.accumulator == DType::fp32; }},
      {{"accumulator", "fp32"}, [](const Plan& p) { return p.accumulator == DType::fp32; }},
      {{"micro_batch_rows", "2"}, [](const Plan& p) { return p.micro_batch_rows == 2; }},
      {{"micro_batches", "2"}, [](const Plan& p) { return p.micro_batches == 2; }},
      {{"waves", "1"}, [](const Plan& p) { return p.waves == 1; }},
      {{"wave", "2"}, [](const Plan& p) { return p.waves == 2 && p.landing_slots > 0; }},
      {{"head_chunk_tokens", "100"}, [](const Plan& p) { return p.head_chunk_tokens == 100; }},
      {{"layer_slots", "4"}, [](const Plan& p) { return p.layer_slots == 4; }},
      {{"gradient_slots", "3"}, [](const Plan& p) { return p.gradient_slots == 3; }},
      {{"vocabulary_slots", "2"}, [](const Plan& p) { return p.vocabulary_slots == 2; }},
      {{"vocabulary_kept", "true"}, [](const Plan& p) { return p.vocabulary_kept; }},
      {{"vocabulary_rows", "all"}, [](const Plan& p) { return p.vocabulary_rows == VocabularyRows::all; }},
      {{"wire_slots", "5"}, [](const Plan& p) { return p.wire_slots == 5; }},
      {{"threads.update", "7"}, [](const Plan& p) { return p.threads.update == 7; }},
      {{"threads.compute_per_rank", "3"}, [](const Plan& p) { return p.threads.compute_per_rank == 3; }},
  };
  for (const auto& [pin, honoured] : checks) {
    const std::vector<Plan> plans = example.plans({{pin.first, pin.second}});
    EXPECT_FALSE(plans.empty());
    EXPECT_TRUE(std::all_of(plans.begin(), plans.end(), honoured)) << pin.first << "=" << pin.second;
  }
  const std::vector<Plan> ring = example.plans({{"landing_slots", "4"}, {"update", "eager"}});
  EXPECT_TRUE(std::all_of(ring.begin(), ring.end(), [](const Plan& p) { return p.landing_slots == 4; }));
}

TEST(Pins, LeaveOutWhatDoesNotGoWithThem) {
  const Example example;
  EXPECT_THAT(values(example.plans({{"accumulator", "bf16"}}), &Plan::micro_batches), ElementsAre(1));
  EXPECT_THAT(values(example.plans({{"landing_slots", "4"}, {"update", "split"}}), &Plan::waves), ElementsAre(2, 4, 8));
}

TEST(Pins, BadOnesAreRefusedWithTheValidNames) {
  const Example example;
  EXPECT_THAT(example.error({{"devilery", "sharded"}}), AllOf(HasSubstr("devilery"), HasSubstr("delivery, reduction")));
  EXPECT_THAT(example.error({{"backend", "cuda"}}), HasSubstr("no field \"backend\" that can be pinned"));
  EXPECT_THAT(example.error({{"delivery", "pigeon"}}), AllOf(HasSubstr("pigeon"), HasSubstr("replicated, sharded")));
  EXPECT_THAT(example.error({{"update", "never"}}), HasSubstr("valid are eager, deferred, split"));
  EXPECT_THAT(example.error({{"activation", "keep:3"}}), HasSubstr("add up to 3, but the model has 4 layers"));
  EXPECT_THAT(example.error({{"activation", "keep:5"}}), HasSubstr("add up to the model's 4 layers"));
  EXPECT_THAT(example.error({{"activation", "discard"}}), HasSubstr("valid are keep, selective, recompute, offload"));
  EXPECT_THAT(example.error({{"activation", ""}}), HasSubstr("valid are keep, selective, recompute, offload"));
  EXPECT_THAT(example.error({{"chunk", "many"}}), HasSubstr("pin chunk"));
  EXPECT_THAT(example.error({{"chunk", "1"}}), HasSubstr("sizes from 2 B"));
  EXPECT_THAT(example.error({{"layer_slots", "0"}}), HasSubstr("whole numbers from 1"));
  EXPECT_THAT(example.error({{"layer_slots", "2x"}}), HasSubstr("whole numbers from 1"));
  EXPECT_THAT(example.error({{"layer_slots", "99999999999999999999"}}), HasSubstr("whole numbers from 1"));
  EXPECT_THAT(example.error({{"vocabulary_kept", "yes"}}), HasSubstr("true, false"));
  EXPECT_THAT(example.error({{"vocabulary_rows", "some"}}), HasSubstr("all, touched"));
  EXPECT_THAT(example.error({{"wave", "1"}, {"waves", "1"}}), HasSubstr("same plan field"));
}

TEST(Space, TouchedRowsWherePossibleAndFew) {
  Example example;
  const auto rows = [&] { return values(example.plans({{"ranks", "2"}, {"chunk", "1MiB"}}), &Plan::vocabulary_rows); };
  EXPECT_THAT(rows(), ElementsAre(VocabularyRows::touched));
  example.train.touched_vocabulary_share = 0.6;
  EXPECT_THAT(rows(), ElementsAre(VocabularyRows::all));
  example.train.touched_vocabulary_share = 0.06;
  example.model.hidden = 80;
  EXPECT_THAT(rows(), ElementsAre(VocabularyRows::all));
  EXPECT_THAT(example.error({{"vocabulary_rows", "touched"}}), AllOf(HasSubstr("vocabulary_rows"), HasSubstr("80")));
}

TEST(Pins, ContradictionsAreNamed) {
  Example example;
  EXPECT_THAT(example.error({{"ranks", "8"}}), HasSubstr("the hardware has 4 GPUs"));
  EXPECT_THAT(example.error({{"ranks", "3"}}), HasSubstr("batch_rows = 8 cannot be divided"));
  EXPECT_THAT(example.error({{"ranks", "1"}, {"delivery", "sharded"}}), HasSubstr("one rank can only be"));
  EXPECT_THAT(example.error({{"micro_batch_rows", "3"}}), HasSubstr("train.batch_rows = 8"));
  EXPECT_THAT(example.error({{"waves", "3"}}), HasSubstr("waves"));
  EXPECT_THAT(example.error({{"waves", "1"}, {"update", "split"}, {"landing_slots", "4"}}), HasSubstr("landing_slots"));
  EXPECT_THAT(example.error({{"accumulator", "bf16"}, {"micro_batches", "2"}}), HasSubstr("accumulator"));
  EXPECT_THAT(example.error({{"head_chunk_tokens", "100000"}}), HasSubstr("head_chunk_tokens"));
  example.train.max_grad_norm = 1;
  EXPECT_THAT(example.error({{"update", "eager"}}), AllOf(HasSubstr("max_grad_norm"), HasSubstr("update=deferred")));
}

TEST(Pins, AreReadFromAssignments) {
  Pins pins;
  add_pin("activation=recompute:1,keep:3", pins);
  EXPECT_EQ(pins.at("activation"), "recompute:1,keep:3");
  EXPECT_THROW(add_pin("activation=keep", pins), Error);
  EXPECT_THROW(add_pin("delivery", pins), Error);
  EXPECT_THROW(add_pin("=sharded", pins), Error);
}

}  // namespace
}  // namespace slidedp
