#include "model/spec/plan.h"

#include <algorithm>

#include "model/base/format.h"
#include "model/spec/spec_fields.h"

namespace slidedp {
namespace {

constexpr int kMaxRanks = 8;

template <typename... Args>
[[noreturn]] void refuse(const char* field, fmt::format_string<Args...> pattern, Args&&... args) {
  failf("plan field \"{}\": {}", field, fmt::format(pattern, std::forward<Args>(args)...));
}

void at_least(const char* field, int64_t value, int64_t least) {
  if (value < least) refuse(field, "{} is too small; it must be at least {}", value, least);
}

// ranks * waves * micro_batches * micro_batch_rows, or nothing if 64 bits do not hold it.
std::optional<int64_t> rows_of_step(const Plan& plan) {
  int64_t rows = plan.ranks;
  if (__builtin_mul_overflow(rows, plan.waves, &rows) || __builtin_mul_overflow(rows, plan.micro_batches, &rows) ||
      __builtin_mul_overflow(rows, plan.micro_batch_rows, &rows)) {
    return std::nullopt;
  }
  return rows;
}

void check_counts(const Plan& plan) {
  at_least("ranks", plan.ranks, 1);
  if (plan.ranks > kMaxRanks) refuse("ranks", "{} is too large; it must be at most {}", plan.ranks, kMaxRanks);
  at_least("chunk_elements", plan.chunk_elements, 1);
  at_least("seq", plan.seq, 1);
  at_least("micro_batch_rows", plan.micro_batch_rows, 1);
  at_least("micro_batches", plan.micro_batches, 1);
  at_least("waves", plan.waves, 1);
  at_least("head_chunk_tokens", plan.head_chunk_tokens, 1);
  at_least("layer_slots", plan.layer_slots, 1);
  at_least("gradient_slots", plan.gradient_slots, 1);
  at_least("vocabulary_slots", plan.vocabulary_slots, 1);
  at_least("wire_slots", plan.wire_slots, 1);
  at_least("landing_slots", plan.landing_slots, 0);
  at_least("threads.update", plan.threads.update, 1);
  at_least("threads.compute_per_rank", plan.threads.compute_per_rank, 1);
}

void check_model(const Plan& plan, const ModelSpec& model) {
  if (plan.model != model.fingerprint()) {
    refuse("model", "the plan was made for {}, but this model is {}; make a plan for it with slidedp-plan", plan.model,
           model.fingerprint());
  }
  if (static_cast<int64_t>(plan.activation.size()) != model.layers) {
    refuse("activation", "it covers {} layers, but the model has {}", plan.activation.size(), model.layers);
  }
  if (plan.seq > model.max_position) {
    refuse("seq", "{} tokens are more than the model's max_position_embeddings, {}", plan.seq, model.max_position);
  }
  if (plan.vocabulary_kept && !model.tied) {
    refuse("vocabulary_kept", "this model's head has a matrix of its own, so there is none to keep; set it to false");
  }
  if (plan.vocabulary_rows == VocabularyRows::touched && model.hidden % kBlockElements != 0) {
    refuse(
        "vocabulary_rows",
        "touched rows must be whole blocks of {} elements, but a row of this model's embedding has {}; set it to all",
        kBlockElements, model.hidden);
  }
}

void check_train_spec(const Plan& plan, const TrainSpec& train) {
  if (plan.seq != train.seq) {
    refuse("seq", "the plan has {} tokens a row, but the training spec {}", plan.seq, train.seq);
  }
  const std::optional<int64_t> rows = rows_of_step(plan);
  if (!rows || *rows != train.batch_rows) {
    refuse("micro_batch_rows",
           "{} ranks x {} waves x {} micro-batches x {} rows must be the training spec's batch_rows, {}", plan.ranks,
           plan.waves, plan.micro_batches, plan.micro_batch_rows, train.batch_rows);
  }
  if (plan.head_chunk_tokens > plan.micro_batch_tokens()) {
    refuse("head_chunk_tokens", "{} is more than a micro-batch's {} tokens", plan.head_chunk_tokens,
           plan.micro_batch_tokens());
  }
  if (train.max_grad_norm > 0 && plan.update == UpdatePolicy::eager) {
    refuse("update",
           "eager updates before the gradient norm is known and cannot clip; set update to deferred, or the training "
           "spec's max_grad_norm to 0");
  }
}

void check_combinations(const Plan& plan) {
  if (plan.backend != "cpu" && plan.backend != "cuda") {
    refuse("backend", "\"{}\" is unknown; it must be cpu or cuda", plan.backend);
  }
  const DType compute = plan.backend == "cpu" ? DType::fp32 : DType::bf16;
  if (plan.compute != compute) {
    refuse("compute", "the {} backend computes in {}, not in {}", plan.backend, name(compute), name(plan.compute));
  }
  if (plan.ranks == 1 && plan.delivery != Delivery::replicated) {
    refuse("delivery", "{} needs at least 2 ranks; with one it must be replicated", name(plan.delivery));
  }
  if (plan.ranks == 1 && plan.reduction != Reduction::cpu) {
    refuse("reduction", "{} needs at least 2 ranks; with one it must be cpu", name(plan.reduction));
  }
  if (plan.accumulator == DType::bf16 && plan.micro_batches > 1) {
    refuse("accumulator", "bf16 loses sums over the {} micro-batches of a wave; set it to fp32", plan.micro_batches);
  }
  if (plan.landing_slots > 0 && plan.update != UpdatePolicy::eager && plan.waves == 1) {
    refuse("landing_slots", "{} updates of one wave hold every gradient until the update, so it must be 0, not {}",
           name(plan.update), plan.landing_slots);
  }
}

// The sections' own rules. What depends on the model is validate_plan's.
std::optional<Problem> check_plan_file(const PlanFile& file) {
  std::optional<Problem> problem = check_train(file.train);
  if (problem) return Problem{"train." + problem->key, problem->message};
  problem = check_hardware(file.hardware);
  if (problem) return Problem{"hardware." + problem->key, problem->message};
  return std::nullopt;
}

}  // namespace

PlanFile load_plan(const std::filesystem::path& file) {
  return read_yaml<PlanFile>(file, kPlanSchema, check_plan_file);
}

PlanFile parse_plan(const std::string& yaml, const std::string& source) {
  return read_yaml<PlanFile>(parse_yaml(yaml, source, kPlanSchema), source, check_plan_file);
}

std::string to_yaml(const PlanFile& plan) { return write_yaml(plan, kPlanSchema); }

void validate_plan(const Plan& plan, const ModelSpec& model, const TrainSpec& train) {
  check_counts(plan);
  check_model(plan, model);
  check_train_spec(plan, train);
  check_combinations(plan);
}

}  // namespace slidedp
