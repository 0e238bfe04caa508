#include "model/spec/plan.h"

#include <functional>
#include <limits>

#include "tests/model/spec/support.h"

namespace slidedp {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

ModelSpec sample_model() {
  ModelSpec model;
  model.hidden = 64;
  model.intermediate = 128;
  model.layers = 5;
  model.heads = 4;
  model.kv_heads = 2;
  model.head_dim = 16;
  model.vocabulary = 100;
  model.max_position = 512;
  model.tied = true;
  return model;
}

TrainSpec sample_train() {
  TrainSpec train;
  train.seq = 256;
  train.batch_rows = 24;
  train.steps = 10;
  return train;
}

Plan sample_plan() {
  Plan plan;
  plan.model = sample_model().fingerprint();
  plan.backend = "cpu";
  plan.ranks = 4;
  plan.delivery = Delivery::sharded;
  plan.reduction = Reduction::gpu;
  plan.chunk_elements = 1 << 20;
  plan.activation = {ActivationPolicy::keep, ActivationPolicy::keep, ActivationPolicy::recompute,
                     ActivationPolicy::recompute, ActivationPolicy::keep};
  plan.update = UpdatePolicy::deferred;
  plan.seq = 256;
  plan.micro_batch_rows = 2;
  plan.micro_batches = 3;
  plan.head_chunk_tokens = 128;
  plan.vocabulary_kept = true;
  plan.threads = {2, 1};
  return plan;
}

PlanFile sample_file() {
  PlanFile file;
  file.plan = sample_plan();
  file.train = sample_train();
  file.hardware =
      load_hardware_spec(std::filesystem::path(SLIDEDP_SOURCE_DIR) / "configs" / "hardware" / "cpu-2rank.yaml");
  file.forecast = {{1.25}, 4915.2, "rank 0 compute", {0.1 + 0.2}, 123456789, 987654321, {"first: why", "second # why"}};
  return file;
}

class PlanYaml : public TempDir {
 protected:
  std::string refused(const std::string& from, const std::string& to) {
    return error_of([&] { load_plan(write("plan.yaml", replaced(to_yaml(sample_file()), from, to))); });
  }
};

void expect_equal(const PlanFile& a, const PlanFile& b) {
  EXPECT_EQ(a.plan, b.plan);
  EXPECT_EQ(a.train, b.train);
  EXPECT_EQ(a.hardware, b.hardware);
  EXPECT_EQ(a.forecast.step, b.forecast.step);
  EXPECT_EQ(a.forecast.tokens_per_second, b.forecast.tokens_per_second);
  EXPECT_EQ(a.forecast.bottleneck, b.forecast.bottleneck);
  EXPECT_EQ(a.forecast.exposed, b.forecast.exposed);
  EXPECT_EQ(a.forecast.device_bytes, b.forecast.device_bytes);
  EXPECT_EQ(a.forecast.host_bytes, b.forecast.host_bytes);
  EXPECT_EQ(a.forecast.why, b.forecast.why);
}

TEST_F(PlanYaml, RoundTripIsExact) {
  const std::string text = to_yaml(sample_file());
  const PlanFile loaded = load_plan(write("plan.yaml", text));
  expect_equal(loaded, sample_file());
  EXPECT_EQ(to_yaml(loaded), text);
}

TEST_F(PlanYaml, RoundTripOfEveryOtherValue) {
  PlanFile file = sample_file();
  file.plan.backend = "cuda";
  file.plan.delivery = Delivery::broadcast;
  file.plan.reduction = Reduction::cpu;
  file.plan.activation = {ActivationPolicy::offload, ActivationPolicy::selective};
  file.plan.update = UpdatePolicy::split;
  file.plan.wire = DType::fp32;
  file.plan.accumulator = DType::bf16;
  file.plan.compute = DType::bf16;
  file.plan.waves = 2;
  file.plan.layer_slots = 3;
  file.plan.gradient_slots = 4;
  file.plan.vocabulary_slots = 2;
  file.plan.vocabulary_kept = false;
  file.plan.vocabulary_rows = VocabularyRows::touched;
  file.plan.wire_slots = 5;
  file.plan.landing_slots = 6;
  file.plan.chunk_elements = std::numeric_limits<int64_t>::max();
  file.forecast = {};
  expect_equal(load_plan(write("plan.yaml", to_yaml(file))), file);
}

TEST_F(PlanYaml, ActivationIsRunLengthCoded) {
  const std::string text = to_yaml(sample_file());
  EXPECT_THAT(text, HasSubstr("  - {layers: 2, policy: keep}\n  - {layers: 2, policy: recompute}\n"
                              "  - {layers: 1, policy: keep}\n"));
}

TEST_F(PlanYaml, ErrorsNameFileLineAndKey) {
  EXPECT_THAT(refused("ranks: 4", "ranks: 0"), AllOf(HasSubstr("plan.yaml:4: "), HasSubstr("\"ranks\" is 0")));
  EXPECT_THAT(refused("ranks: 4", "rank: 4"), AllOf(HasSubstr("plan.yaml:4: "), HasSubstr("did you mean \"ranks\"")));
  EXPECT_THAT(refused("delivery: sharded", "delivery: shard"),
              AllOf(HasSubstr("plan.yaml:5: "), HasSubstr("replicated, sharded, broadcast")));
  EXPECT_THAT(refused("reduction: gpu", "reduction: 3"), HasSubstr("one of cpu, gpu"));
  EXPECT_THAT(refused("wire: bf16", "wire: fp16"), HasSubstr("one of bf16, fp32"));
  EXPECT_THAT(refused("update: deferred", "update: late"), HasSubstr("one of eager, deferred, split"));
  EXPECT_THAT(refused("vocabulary_rows: all", "vocabulary_rows: some"), HasSubstr("one of all, touched"));
  EXPECT_THAT(refused("backend: cpu\nranks", "backend: rocm\nranks"), HasSubstr("cpu or cuda"));
  EXPECT_THAT(refused("schema: slidedp.plan/1", "schema: slidedp.plan/9"), HasSubstr("slidedp.plan/1"));
  EXPECT_THAT(refused("{update: 2", "{update: 0"), HasSubstr("\"threads.update\" is 0"));
  EXPECT_THAT(refused("waves: 1\n", ""), HasSubstr("\"waves\" is missing"));
  EXPECT_THAT(refused("step_s: 1.25", "step_s: -1"), HasSubstr("\"forecast.step_s\" is -1"));
}

TEST_F(PlanYaml, ActivationErrors) {
  EXPECT_THAT(refused("{layers: 1, policy: keep}", "{layers: 1, policy: drop}"),
              AllOf(HasSubstr("plan.yaml:11: "), HasSubstr("keep, selective, recompute, offload")));
  EXPECT_THAT(refused("{layers: 1, policy: keep}", "{layers: 0, policy: keep}"),
              HasSubstr("\"activation.layers\" is 0"));
  EXPECT_THAT(refused("{layers: 1, policy: keep}", "{layer: 1, policy: keep}"),
              HasSubstr("\"activation.layer\" is unknown"));
  EXPECT_THAT(refused("{layers: 1, policy: keep}", "keep"), HasSubstr("must be a mapping"));
  EXPECT_THAT(refused("{layers: 1, policy: keep}", "{layers: 99999999999, policy: keep}"),
              HasSubstr("more than 65536"));
}

TEST_F(PlanYaml, SectionsKeepTheirRules) {
  EXPECT_THAT(refused("context_bytes: 0", "context_bytes: 5368709120"),
              AllOf(HasSubstr("\"hardware.device.context_bytes\""), HasSubstr("less than device.memory_bytes")));
  EXPECT_THAT(refused("batch_rows: 24", "batch_rows: 2147483648"), HasSubstr("\"train.batch_rows\" is 2147483648"));
  EXPECT_THAT(refused("beta1: 0.9", "beta1: 1"), HasSubstr("\"train.adam.beta1\" is 1"));
}

TEST_F(PlanYaml, ListsMustBeLists) {
  const std::string text = to_yaml(sample_file());
  const size_t why = text.find("  why:");
  EXPECT_THAT(error_of([&] { load_plan(write("plan.yaml", text.substr(0, why) + "  why: because\n")); }),
              HasSubstr("\"forecast.why\" must be a list"));
}

// ---- validate_plan

std::string refused(const std::function<void(Plan&, ModelSpec&, TrainSpec&)>& change) {
  Plan plan = sample_plan();
  ModelSpec model = sample_model();
  TrainSpec train = sample_train();
  change(plan, model, train);
  return error_of([&] { validate_plan(plan, model, train); });
}
std::string refused_plan(const std::function<void(Plan&)>& change) {
  return refused([&](Plan& plan, ModelSpec&, TrainSpec&) { change(plan); });
}
auto field(const char* name) { return HasSubstr("plan field \"" + std::string(name) + "\""); }

void expect_valid(const std::function<void(Plan&, TrainSpec&)>& change) {
  Plan plan = sample_plan();
  TrainSpec train = sample_train();
  change(plan, train);
  EXPECT_NO_THROW(validate_plan(plan, sample_model(), train));
}

TEST(ValidatePlan, AcceptsWhatRuns) {
  expect_valid([](Plan&, TrainSpec&) {});
  expect_valid([](Plan&, TrainSpec& train) { train.max_grad_norm = 1; });
  expect_valid([](Plan& plan, TrainSpec&) { plan.update = UpdatePolicy::eager; });
  expect_valid([](Plan& plan, TrainSpec&) { plan.wire = DType::fp32; });
  expect_valid([](Plan& plan, TrainSpec&) {
    plan.delivery = Delivery::replicated;
    plan.reduction = Reduction::cpu;
  });
  expect_valid([](Plan& plan, TrainSpec&) {
    plan.micro_batches = 1;
    plan.micro_batch_rows = 6;
    plan.accumulator = DType::bf16;
  });
  expect_valid([](Plan& plan, TrainSpec& train) {
    plan.ranks = 1;
    plan.delivery = Delivery::replicated;
    plan.reduction = Reduction::cpu;
    train.batch_rows = 6;
  });
  expect_valid([](Plan& plan, TrainSpec&) { plan.head_chunk_tokens = 512; });
  expect_valid([](Plan& plan, TrainSpec&) { plan.activation[3] = ActivationPolicy::selective; });
  expect_valid([](Plan& plan, TrainSpec&) {
    plan.update = UpdatePolicy::eager;
    plan.landing_slots = 3;
  });
  expect_valid([](Plan& plan, TrainSpec&) {
    plan.backend = "cuda";
    plan.compute = DType::bf16;
  });
}

TEST(ValidatePlan, BelongsToTheModel) {
  EXPECT_THAT(refused([](Plan&, ModelSpec& model, TrainSpec&) { model.intermediate = 129; }),
              AllOf(field("model"), HasSubstr(sample_plan().model)));
  EXPECT_THAT(refused_plan([](Plan& plan) { plan.activation.pop_back(); }),
              AllOf(field("activation"), HasSubstr("covers 4 layers, but the model has 5")));
  EXPECT_THAT(refused_plan([](Plan& plan) { plan.activation.push_back(ActivationPolicy::keep); }), field("activation"));
  EXPECT_THAT(refused([](Plan& plan, ModelSpec& model, TrainSpec&) {
                model.max_position = 255;
                plan.model = model.fingerprint();
              }),
              AllOf(field("seq"), HasSubstr("max_position_embeddings, 255")));
  EXPECT_THAT(refused([](Plan& plan, ModelSpec& model, TrainSpec&) {
                model.tied = false;
                plan.model = model.fingerprint();
              }),
              field("vocabulary_kept"));
  EXPECT_THAT(
      refused([](Plan& plan, ModelSpec& model, TrainSpec&) {
        plan.vocabulary_rows = VocabularyRows::touched;
        model.hidden = 96;
        plan.model = model.fingerprint();
      }),
      AllOf(field("vocabulary_rows"), HasSubstr("blocks of 64"), HasSubstr("has 96"), HasSubstr("set it to all")));
  expect_valid([](Plan& plan, TrainSpec&) { plan.vocabulary_rows = VocabularyRows::touched; });
}

TEST(ValidatePlan, BelongsToTheTrainingSpec) {
  EXPECT_THAT(refused([](Plan&, ModelSpec&, TrainSpec& train) { train.seq = 128; }),
              AllOf(field("seq"), HasSubstr("256"), HasSubstr("128")));
  EXPECT_THAT(refused([](Plan&, ModelSpec&, TrainSpec& train) { train.batch_rows = 25; }),
              AllOf(field("micro_batch_rows"), HasSubstr("4 ranks x 1 waves x 3 micro-batches x 2 rows"),
                    HasSubstr("batch_rows, 25")));
  EXPECT_THAT(refused_plan([](Plan& plan) { plan.micro_batch_rows = int64_t{1} << 62; }), field("micro_batch_rows"));
  EXPECT_THAT(refused([](Plan& plan, ModelSpec&, TrainSpec& train) {
                train.max_grad_norm = 1;
                plan.update = UpdatePolicy::eager;
              }),
              AllOf(field("update"), HasSubstr("cannot clip")));
}

TEST(ValidatePlan, Counts) {
  EXPECT_THAT(refused_plan([](Plan& plan) { plan.ranks = 0; }), field("ranks"));
  EXPECT_THAT(refused_plan([](Plan& plan) { plan.ranks = 9; }), AllOf(field("ranks"), HasSubstr("at most 8")));
  EXPECT_THAT(refused_plan([](Plan& plan) { plan.chunk_elements = 0; }), field("chunk_elements"));
  EXPECT_THAT(refused_plan([](Plan& plan) { plan.seq = 0; }), field("seq"));
  EXPECT_THAT(refused_plan([](Plan& plan) { plan.micro_batch_rows = 0; }), field("micro_batch_rows"));
  EXPECT_THAT(refused_plan([](Plan& plan) { plan.micro_batches = 0; }), field("micro_batches"));
  EXPECT_THAT(refused_plan([](Plan& plan) { plan.waves = 0; }), field("waves"));
  EXPECT_THAT(refused_plan([](Plan& plan) { plan.head_chunk_tokens = 0; }), field("head_chunk_tokens"));
  EXPECT_THAT(refused_plan([](Plan& plan) { plan.head_chunk_tokens = 513; }),
              AllOf(field("head_chunk_tokens"), HasSubstr("512 tokens")));
  EXPECT_THAT(refused_plan([](Plan& plan) { plan.layer_slots = 0; }), field("layer_slots"));
  EXPECT_THAT(refused_plan([](Plan& plan) { plan.gradient_slots = 0; }), field("gradient_slots"));
  EXPECT_THAT(refused_plan([](Plan& plan) { plan.vocabulary_slots = 0; }), field("vocabulary_slots"));
  EXPECT_THAT(refused_plan([](Plan& plan) { plan.wire_slots = 0; }), field("wire_slots"));
  EXPECT_THAT(refused_plan([](Plan& plan) { plan.landing_slots = -1; }), field("landing_slots"));
  EXPECT_THAT(refused_plan([](Plan& plan) { plan.threads.update = 0; }), field("threads.update"));
  EXPECT_THAT(refused_plan([](Plan& plan) { plan.threads.compute_per_rank = 0; }), field("threads.compute_per_rank"));
}

TEST(ValidatePlan, Combinations) {
  EXPECT_THAT(refused_plan([](Plan& plan) { plan.backend = "tpu"; }), field("backend"));
  EXPECT_THAT(refused_plan([](Plan& plan) { plan.compute = DType::bf16; }), AllOf(field("compute"), HasSubstr("fp32")));
  EXPECT_THAT(refused_plan([](Plan& plan) { plan.backend = "cuda"; }), AllOf(field("compute"), HasSubstr("bf16")));
  const auto one_rank = [](Delivery delivery, Reduction reduction) {
    return refused([=](Plan& plan, ModelSpec&, TrainSpec& train) {
      plan.ranks = 1;
      train.batch_rows = 6;
      plan.delivery = delivery;
      plan.reduction = reduction;
    });
  };
  EXPECT_THAT(one_rank(Delivery::sharded, Reduction::cpu), AllOf(field("delivery"), HasSubstr("at least 2 ranks")));
  EXPECT_THAT(one_rank(Delivery::replicated, Reduction::gpu), AllOf(field("reduction"), HasSubstr("at least 2 ranks")));
  EXPECT_THAT(refused_plan([](Plan& plan) { plan.accumulator = DType::bf16; }),
              AllOf(field("accumulator"), HasSubstr("3 micro-batches")));
  EXPECT_THAT(refused_plan([](Plan& plan) { plan.landing_slots = 1; }),
              AllOf(field("landing_slots"), HasSubstr("deferred")));
}

}  // namespace
}  // namespace slidedp
