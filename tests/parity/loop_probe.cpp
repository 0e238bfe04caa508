// loop_probe: trains a checkpoint and prints losses and gradient norms as JSON; the parity tests compare them with
// transformers. First gradients (mean over target tokens, by Hugging Face name) go to a safetensors file.
#include <CLI/CLI.hpp>
#include <cstdio>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "model/base/error.h"
#include "runtime/exec/trainer.h"
#include "runtime/io/checkpoint_hf.h"
#include "runtime/io/safetensors.h"

namespace slidedp {
namespace {

struct Options {
  std::string model, data, gradients, wire = "fp32", update = "eager", reduction = "cpu", delivery = "replicated";
  int64_t steps = 1, seq = 0, rows = 0;
  int ranks = 1, micro_batches = 1;
  TrainSpec train;
};

Options parse(int argc, char** argv) {
  Options options;
  CLI::App app{"Trains a checkpoint for the parity tests."};
  app.add_option("--model", options.model)->required();
  app.add_option("--data", options.data)->required();
  app.add_option("--gradients", options.gradients);
  app.add_option("--wire", options.wire);
  app.add_option("--update", options.update);
  app.add_option("--reduction", options.reduction);
  app.add_option("--delivery", options.delivery);
  app.add_option("--steps", options.steps);
  app.add_option("--seq", options.seq)->required();
  app.add_option("--rows", options.rows)->required();
  app.add_option("--ranks", options.ranks);
  app.add_option("--micro-batches", options.micro_batches);
  app.add_option("--lr", options.train.adam.learning_rate);
  app.add_option("--weight-decay", options.train.adam.weight_decay);
  app.add_option("--max-grad-norm", options.train.max_grad_norm);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    std::exit(app.exit(error));
  }
  options.train.seq = options.seq;
  options.train.batch_rows = options.rows;
  options.train.steps = options.steps;
  return options;
}

Plan make_plan(const Options& options, const ModelSpec& model) {
  Plan plan;
  plan.model = model.fingerprint();
  plan.backend = "cpu";
  plan.ranks = options.ranks;
  plan.delivery = parse_delivery(options.delivery).value();
  plan.reduction = parse_reduction(options.reduction).value();
  plan.wire = parse_dtype(options.wire).value();
  plan.update = parse_update(options.update).value();
  plan.chunk_elements = 3000;
  for (int64_t layer = 0; layer < model.layers; ++layer) {
    plan.activation.push_back(layer % 2 == 0 ? ActivationPolicy::recompute : ActivationPolicy::keep);
  }
  plan.seq = options.seq;
  plan.micro_batches = options.micro_batches;
  plan.micro_batch_rows = options.rows / options.ranks / options.micro_batches;
  plan.head_chunk_tokens = 10;
  validate_plan(plan, model, options.train);
  return plan;
}

// Trains from the checkpoint; the state is that after `steps` steps.
std::vector<StepOutcome> train(const Options& options, const ModelSpec& model, HostState& state, int64_t steps) {
  const Plan plan = make_plan(options, model);
  const StepGraph graph = build_step_graph(model, options.train, plan);
  const PackedDataset data(options.data, model, options.seq);
  load_hf_checkpoint(options.model, state, 1);
  Backend backend = make_backend(model, graph.layout, plan, 0);
  Executor executor(graph, backend, state);
  std::vector<StepOutcome> outcomes;
  TrainingHooks hooks;
  hooks.on_step = [&](const StepOutcome& outcome) { outcomes.push_back(outcome); };
  run_training(executor, graph, data, options.train, 0, steps, hooks);
  return outcomes;
}

// After one step m = (1 - beta1) * gradient (times the clip factor).
void write_gradients(const Options& options, HostState& state) {
  std::map<std::string, std::vector<float>> values;
  std::vector<TensorToStore> tensors;
  for (const UnitLayout& unit : state.layout().units) {
    const UnitState views = state.unit(unit.unit);
    for (const TensorLayout& tensor : unit.tensors) {
      auto& gradient = values[tensor.name];
      for (int64_t i = 0; i < tensor.elements; ++i) {
        gradient.push_back(views.m[static_cast<size_t>(tensor.offset + i)] /
                           static_cast<float>(1 - options.train.adam.beta1));
      }
      tensors.push_back({tensor.name, StoredType::f32, tensor.shape, std::as_bytes(std::span(gradient))});
    }
  }
  write_safetensors(posix_file_system(), options.gradients, tensors, {});
}

int probe(int argc, char** argv) {
  const Options options = parse(argc, argv);
  const ModelSpec model = load_model_spec(options.model);
  const ModelLayout layout = make_layout(model);
  if (!options.gradients.empty()) {
    HostState state(layout);
    train(options, model, state, 1);
    write_gradients(options, state);
  }
  HostState state(layout);
  nlohmann::json result{{"losses", nlohmann::json::array()}, {"norms", nlohmann::json::array()}};
  for (const StepOutcome& outcome : train(options, model, state, options.steps)) {
    result["losses"].push_back(outcome.loss);
    result["norms"].push_back(outcome.gradient_norm);
  }
  std::printf("%s\n", result.dump().c_str());
  return 0;
}

}  // namespace
}  // namespace slidedp

int main(int argc, char** argv) { return slidedp::run_program("loop_probe", slidedp::probe, argc, argv); }
