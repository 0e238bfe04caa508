#include "tests/support/tiny_run.h"

#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>
#include <random>

#include "model/graph/step_graph.h"
#include "runtime/io/safetensors.h"

namespace slidedp::testing {
namespace {

constexpr int64_t kRows = 8, kSeq = 16;

// Rows of two documents and padding; some targets are ignored.
void write_data(const std::filesystem::path& file, int64_t vocabulary) {
  std::mt19937 random(7);
  std::vector<int32_t> ids, labels, positions;
  for (int64_t row = 0; row < kRows; ++row) {
    const int64_t first = 5 + row % 4, second = 6;
    for (int64_t t = 0; t < kSeq; ++t) {
      const int64_t start = t < first ? 0 : t < first + second ? first : first + second;
      const bool padding = start == first + second;
      ids.push_back(padding ? 0 : static_cast<int32_t>(random() % static_cast<uint32_t>(vocabulary)));
      positions.push_back(static_cast<int32_t>(t - start));
      labels.push_back(padding || t == start || random() % 4 == 0 ? -100 : ids.back());
    }
  }
  const auto tensor = [](const char* name, const std::vector<int32_t>& values) {
    return TensorToStore{name, StoredType::i32, {kRows, kSeq}, std::as_bytes(std::span(values))};
  };
  const std::vector<TensorToStore> tensors{tensor("input_ids", ids), tensor("labels", labels),
                                           tensor("position_ids", positions)};
  write_safetensors(posix_file_system(), file, tensors,
                    {{"format", "slidedp.packed"},
                     {"version", "1"},
                     {"seq", std::to_string(kSeq)},
                     {"vocabulary_size", std::to_string(vocabulary)},
                     {"tokenizer_hash", "sha256:" + std::string(64, '0')}});
}

StateCopy copy_state(HostState& state) {
  StateCopy copy;
  for (const UnitLayout& unit : state.layout().units) {
    const UnitState views = state.unit(unit.unit);
    copy.hi.insert(copy.hi.end(), views.hi.begin(), views.hi.end());
    copy.lo.insert(copy.lo.end(), views.lo.begin(), views.lo.end());
    copy.m.insert(copy.m.end(), views.m.begin(), views.m.end());
    copy.v.insert(copy.v.end(), views.v.begin(), views.v.end());
  }
  return copy;
}

}  // namespace

double relative_difference(const std::vector<float>& a, const std::vector<float>& b) {
  double difference = 0, norm = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    difference += std::pow(static_cast<double>(a[i]) - b[i], 2);
    norm += std::pow(static_cast<double>(b[i]), 2);
  }
  return std::sqrt(norm == 0 ? difference : difference / norm);
}

TinyTraining::TinyTraining(ModelSpec model, TinyBackend backend)
    : model_(std::move(model)), layout_(make_layout(model_)), backend_(std::move(backend)) {
  std::string pattern = (std::filesystem::temp_directory_path() / "slidedp-XXXXXX").string();
  if (mkdtemp(pattern.data()) == nullptr) throw std::runtime_error("mkdtemp failed");
  folder_ = pattern;
  write_data(data(), model_.vocabulary);
}

TinyTraining::~TinyTraining() { std::filesystem::remove_all(folder_); }

TrainSpec TinyTraining::train() const {
  TrainSpec train;
  train.seq = kSeq;
  train.batch_rows = kRows;
  train.steps = 5;
  train.adam.learning_rate = 1e-4;
  train.adam.weight_decay = 0.1;
  return train;
}

Plan TinyTraining::plan() const { return plan(1, 1); }

Plan TinyTraining::plan(int ranks, int micro_batches, int waves) const {
  Plan plan;
  plan.model = model_.fingerprint();
  plan.backend = "cpu";
  plan.ranks = ranks;
  plan.chunk_elements = 4096;
  plan.activation.assign(static_cast<size_t>(model_.layers), ActivationPolicy::keep);
  plan.wire = DType::fp32;
  plan.seq = kSeq;
  plan.waves = waves;
  plan.micro_batches = micro_batches;
  plan.micro_batch_rows = kRows / ranks / waves / micro_batches;
  plan.head_chunk_tokens = 7;
  return plan;
}

std::filesystem::path TinyTraining::write_checkpoint() const {
  const std::filesystem::path folder = folder_ / "model";
  std::filesystem::create_directory(folder);
  std::ofstream(folder / "config.json") << nlohmann::json{{"architectures", {"Qwen3ForCausalLM"}},
                                                          {"model_type", "qwen3"},
                                                          {"hidden_act", "silu"},
                                                          {"hidden_size", model_.hidden},
                                                          {"intermediate_size", model_.intermediate},
                                                          {"num_hidden_layers", model_.layers},
                                                          {"num_attention_heads", model_.heads},
                                                          {"num_key_value_heads", model_.kv_heads},
                                                          {"head_dim", model_.head_dim},
                                                          {"vocab_size", model_.vocabulary},
                                                          {"max_position_embeddings", model_.max_position},
                                                          {"rms_norm_eps", model_.rms_eps},
                                                          {"rope_theta", model_.rope.theta},
                                                          {"tie_word_embeddings", model_.tied},
                                                          {"dtype", "bfloat16"}};
  HostState state(layout_);
  initialise(state);
  std::vector<TensorToStore> tensors;
  for (const UnitLayout& unit : layout_.units) {
    const std::span<const uint16_t> hi = state.unit(unit.unit).hi;
    for (const TensorLayout& tensor : unit.tensors) {
      tensors.push_back(
          {tensor.name, StoredType::bf16, tensor.shape,
           std::as_bytes(hi.subspan(static_cast<size_t>(tensor.offset), static_cast<size_t>(tensor.elements)))});
    }
  }
  write_safetensors(posix_file_system(), folder / "model.safetensors", tensors, {{"format", "pt"}});
  return folder;
}

std::filesystem::path TinyTraining::write_plan(const Plan& plan, const TrainSpec& train,
                                               const std::string& name) const {
  PlanFile file;
  file.plan = plan;
  file.train = train;
  file.hardware = load_hardware_spec(std::filesystem::path(SLIDEDP_SOURCE_DIR) / "configs/hardware/cpu-2rank.yaml");
  const std::filesystem::path path = folder_ / name;
  std::ofstream(path) << to_yaml(file);
  return path;
}

void TinyTraining::initialise(HostState& state) const {
  std::mt19937 random(11);
  std::normal_distribution<float> normal(0.0F, 0.05F);
  for (const UnitLayout& unit : layout_.units) {
    const UnitState views = state.unit(unit.unit);
    for (const TensorLayout& tensor : unit.tensors) {
      for (int64_t i = 0; i < tensor.elements; ++i) {
        const float value = tensor.decay ? normal(random) : 1.0F + normal(random);
        // A checkpoint's weights are bf16: lo is zero.
        views.hi[static_cast<size_t>(tensor.offset + i)] = split_master(value).hi;
      }
    }
  }
}

RunResult TinyTraining::run(const Plan& plan, const TrainSpec& train, int64_t steps, const Prepare& prepare,
                            const PoolHook& before_pool_task, const std::function<StopRequest()>& stop) const {
  validate_plan(plan, model_, train);
  const StepGraph graph = build_step_graph(model_, train, plan);
  const PackedDataset data(this->data(), model_, plan.seq);
  HostState state(layout_);
  initialise(state);
  Backend backend = backend_.make(model_, layout_, plan);
  if (prepare) prepare(backend);
  RunResult result;
  backend_.reset_temporary_peak();
  {
    Executor executor(graph, backend, state, {.before_pool_task = before_pool_task});
    result.notes = executor.notes();
    TrainingHooks hooks;
    hooks.stop = stop;
    hooks.on_step = [&](const StepOutcome& outcome) {
      result.losses.push_back(outcome.loss);
      result.gradient_norms.push_back(outcome.gradient_norm);
      result.skipped.push_back(outcome.skipped);
      result.timelines.push_back(outcome.timeline);
    };
    run_training(executor, graph, data, train, 0, steps, hooks);
    result.temporary_peak = backend_.temporary_peak();
    for (const auto& device : backend.devices) {
      result.device_peak = std::max(result.device_peak, device->memory().peak);
      if (const auto* cpu = dynamic_cast<const CpuDevice*>(device.get())) {
        result.copied.to_device += cpu->copied().to_device;
        result.copied.to_host += cpu->copied().to_host;
      }
    }
  }
  result.state = copy_state(state);
  return result;
}

RunResult TinyTraining::first_step(const Plan& plan, const TrainSpec& train) const {
  RunResult result = run(plan, train, 1);
  int64_t unit_begin = 0;
  for (const UnitLayout& unit : layout_.units) {
    for (const TensorLayout& tensor : unit.tensors) {
      auto& gradient = result.first_gradients.emplace_back();
      for (int64_t i = 0; i < tensor.elements; ++i) {
        gradient.push_back(result.state.m[static_cast<size_t>(unit_begin + tensor.offset + i)] /
                           static_cast<float>(1 - train.adam.beta1));
      }
    }
    unit_begin += unit.elements;
  }
  return result;
}

}  // namespace slidedp::testing
