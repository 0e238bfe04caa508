// loop_probe: trains a checkpoint under a plan given by options and prints losses, gradient norms and step times as
// JSON; the parity tests compare them with transformers and with each other. First gradients (mean over target tokens,
// by Hugging Face name) go to a safetensors file.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "model/base/error.h"
#include "model/base/format.h"
#include "runtime/exec/trainer.h"
#include "runtime/io/checkpoint_hf.h"
#include "runtime/io/safetensors.h"

namespace slidedp {
namespace {

struct Options {
  std::string model, data, gradients, wire = "fp32", update = "eager", reduction = "cpu", delivery = "replicated",
                                      accumulator = "fp32", vocabulary_rows = "all";
  std::vector<std::string> activation{"recompute", "keep"};
  int64_t steps = 1;
  bool digest = false;
  TrainSpec train;
  Plan plan;  // the fields that are numbers
  BackendOptions backend;
};

void declare_plan(CLI::App& app, Options& options) {
  Plan& plan = options.plan;
  plan.backend = "cpu";
  plan.chunk_elements = 3000;
  plan.head_chunk_tokens = 10;
  app.add_option("--backend", plan.backend);
  app.add_option("--ranks", plan.ranks);
  app.add_option("--delivery", options.delivery);
  app.add_option("--reduction", options.reduction);
  app.add_option("--chunk", plan.chunk_elements, "elements");
  app.add_option("--activation", options.activation, "policies of the layers, taken in turn")->delimiter(',');
  app.add_option("--update", options.update);
  app.add_option("--wire", options.wire);
  app.add_option("--accumulator", options.accumulator);
  app.add_option("--micro-batches", plan.micro_batches);
  app.add_option("--waves", plan.waves);
  app.add_option("--head-chunk", plan.head_chunk_tokens, "tokens");
  app.add_option("--layer-slots", plan.layer_slots);
  app.add_option("--gradient-slots", plan.gradient_slots);
  app.add_option("--landing-slots", plan.landing_slots);
  app.add_flag("--vocabulary-kept", plan.vocabulary_kept);
  app.add_option("--vocabulary-rows", options.vocabulary_rows);
  app.add_option("--update-threads", plan.threads.update);
}

void declare(CLI::App& app, Options& options) {
  app.add_option("--model", options.model)->required();
  app.add_option("--data", options.data)->required();
  app.add_option("--gradients", options.gradients, "file to write");
  app.add_flag("--digest", options.digest, "also print a digest of the trained weights");
  app.add_option("--steps", options.steps)->check(CLI::PositiveNumber);
  app.add_option("--seq", options.train.seq)->required();
  app.add_option("--rows", options.train.batch_rows, "of the global batch")->required();
  app.add_option("--lr", options.train.adam.learning_rate);
  app.add_option("--weight-decay", options.train.adam.weight_decay);
  app.add_option("--max-grad-norm", options.train.max_grad_norm);
  app.add_flag("--share-gpu", options.backend.share_gpu);
  app.add_flag("--deterministic", options.backend.deterministic);
}

Options parse(int argc, char** argv) {
  Options options;
  CLI::App app{"Trains a checkpoint for the parity tests."};
  declare(app, options);
  declare_plan(app, options);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    std::exit(app.exit(error));
  }
  options.train.steps = options.steps;
  return options;
}

template <typename T>
T named(const std::string& value, std::optional<T> (*parse)(std::string_view)) {
  const std::optional<T> parsed = parse(value);
  if (!parsed) failf("\"{}\" is not a name that a plan knows", value);
  return *parsed;
}

Plan make_plan(const Options& options, const ModelSpec& model) {
  Plan plan = options.plan;
  plan.model = model.fingerprint();
  plan.compute = plan.backend == "cpu" ? DType::fp32 : DType::bf16;
  plan.delivery = named(options.delivery, parse_delivery);
  plan.reduction = named(options.reduction, parse_reduction);
  plan.wire = named(options.wire, parse_dtype);
  plan.accumulator = named(options.accumulator, parse_dtype);
  plan.update = named(options.update, parse_update);
  plan.vocabulary_rows = named(options.vocabulary_rows, parse_vocabulary_rows);
  for (int64_t layer = 0; layer < model.layers; ++layer) {
    const auto turn = static_cast<size_t>(layer) % options.activation.size();
    plan.activation.push_back(named(options.activation[turn], parse_activation));
  }
  plan.seq = options.train.seq;
  plan.micro_batch_rows =
      options.train.batch_rows / (static_cast<int64_t>(plan.ranks) * plan.waves * plan.micro_batches);
  plan.head_chunk_tokens = std::min(plan.head_chunk_tokens, plan.micro_batch_tokens());
  validate_plan(plan, model, options.train);
  return plan;
}

// After the first step m = (1 - beta1) * gradient (times the clip factor).
void write_gradients(const Options& options, HostState& state) {
  std::vector<std::vector<float>> values;
  std::vector<TensorToStore> tensors;
  const auto scale = static_cast<float>(1 - options.train.adam.beta1);
  for (const UnitLayout& unit : state.layout().units) {
    const std::span<const float> m = state.unit(unit.unit).m;
    for (const TensorLayout& tensor : unit.tensors) {
      const auto moments = m.subspan(static_cast<size_t>(tensor.offset), static_cast<size_t>(tensor.elements));
      std::vector<float>& gradient = values.emplace_back(moments.size());
      std::ranges::transform(moments, gradient.begin(), [scale](float moment) { return moment / scale; });
      tensors.push_back({tensor.name, StoredType::f32, tensor.shape, std::as_bytes(std::span(gradient))});
    }
  }
  write_safetensors(posix_file_system(), options.gradients, tensors, {});
}

// FNV-1a over the master weights, hi and lo: equal for equal bits.
std::string digest(HostState& state) {
  uint64_t hash = 14695981039346656037U;
  const auto add = [&hash](std::span<const uint16_t> values) {
    for (const uint16_t value : values) hash = (hash ^ value) * 1099511628211U;
  };
  for (const UnitLayout& unit : state.layout().units) {
    const UnitState views = state.unit(unit.unit);
    add(views.hi);
    add(views.lo);
  }
  return fmt::format("{:016x}", hash);
}

int probe(int argc, char** argv) {
  const Options options = parse(argc, argv);
  const ModelSpec model = load_model_spec(options.model);
  const Plan plan = make_plan(options, model);
  const StepGraph graph = build_step_graph(model, options.train, plan);
  const PackedDataset data(options.data, model, options.train.seq);
  HostState state(graph.layout);
  load_hf_checkpoint(options.model, state, plan.threads.update);
  Backend backend = make_backend(model, graph.layout, plan, options.backend);
  Executor executor(graph, backend, state);
  nlohmann::json result{
      {"losses", nlohmann::json::array()}, {"norms", nlohmann::json::array()}, {"step_s", nlohmann::json::array()}};
  TrainingHooks hooks;
  hooks.on_step = [&](const StepOutcome& outcome) {
    result["losses"].push_back(outcome.loss);
    result["norms"].push_back(outcome.gradient_norm);
    result["step_s"].push_back(outcome.timeline.step_s);
  };
  // Gradients are read off the state after one step, so training pauses there.
  const int64_t before = options.gradients.empty() ? 0 : 1;
  if (before > 0) {
    run_training(executor, graph, data, options.train, 0, before, hooks);
    write_gradients(options, state);
  }
  run_training(executor, graph, data, options.train, before, options.steps - before, hooks);
  if (options.digest) result["digest"] = digest(state);
  std::printf("%s\n", result.dump().c_str());
  return 0;
}

}  // namespace
}  // namespace slidedp

int main(int argc, char** argv) { return slidedp::run_program("loop_probe", slidedp::probe, argc, argv); }
