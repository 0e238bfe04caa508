// A plan: everything that changes time and memory of a step, and nothing that changes its result (beyond the order and
// rounding of sums). YAML, schema "slidedp.plan/1".
#pragma once

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "model/base/types.h"
#include "model/spec/hardware_spec.h"
#include "model/spec/model_spec.h"
#include "model/spec/train_spec.h"

namespace slidedp {

struct ThreadSplit {
  int update = 1;            // workers of the update pool
  int compute_per_rank = 1;  // CPU backend: intra-op threads of one rank's compute lane
  bool operator==(const ThreadSplit&) const = default;
};

struct Plan {
  std::string model;    // ModelSpec::fingerprint()
  std::string backend;  // "cpu" or "cuda": the device backend that this plan was made for
  int ranks = 1;
  Delivery delivery = Delivery::replicated;
  Reduction reduction = Reduction::cpu;
  int64_t chunk_elements = 0;                // parameters per chunk, before rounding to ranks * 64
  std::vector<ActivationPolicy> activation;  // one per layer; YAML: list of {layers, policy}, run-length
  UpdatePolicy update = UpdatePolicy::eager;
  DType wire = DType::bf16;         // gradients on the link and in the reduction
  DType accumulator = DType::fp32;  // gradient slots on the device
  DType compute = DType::fp32;      // activations: fp32 on the CPU backend, bf16 on CUDA
  int64_t seq = 0;
  int64_t micro_batch_rows = 1;  // rows of one micro-batch
  int micro_batches = 1;         // per wave and rank
  int waves = 1;
  int64_t head_chunk_tokens = 0;  // tokens whose logits exist at once
  int layer_slots = 2;            // weight slots of class layer (>= 1)
  int gradient_slots = 2;         // gradient slots of class layer (>= 1)
  int vocabulary_slots = 1;       // weight slots of class vocabulary
  bool vocabulary_kept = false;   // tied: the matrix stays on the device between its uses by lookup and head
  VocabularyRows vocabulary_rows = VocabularyRows::all;  // touched: hidden must be a multiple of kBlockElements
  int wire_slots = 2;     // chunk-sized staging buffers on the device for cast and reduce-scatter
  int landing_slots = 0;  // eager or several waves: chunk-sized landing buffers per source; 0 = one a chunk
  ThreadSplit threads;

  bool operator==(const Plan&) const = default;
  int64_t batch_rows() const { return static_cast<int64_t>(ranks) * waves * micro_batches * micro_batch_rows; }
  int64_t micro_batch_tokens() const { return micro_batch_rows * seq; }
  // Rows of a wave's list of touched rows at most: every token of every rank may touch another row.
  int64_t touched_rows_limit(int64_t vocabulary) const {
    return std::min(vocabulary, ranks * micro_batches * micro_batch_tokens());
  }
  // Of one rank, over all waves. Batch buffers are [micro_batches_per_step][batch_arrays][micro-batch tokens] int32:
  // ids, targets, positions and, for touched rows, each id's place in the wave's list; loss buffers one double a
  // micro-batch.
  int64_t batch_arrays() const { return vocabulary_rows == VocabularyRows::touched ? 4 : 3; }
  int64_t micro_batches_per_step() const { return static_cast<int64_t>(waves) * micro_batches; }
  int64_t micro_batch_bytes() const { return batch_arrays() * micro_batch_tokens() * 4; }
  int64_t batch_bytes() const { return micro_batches_per_step() * micro_batch_bytes(); }
  int64_t loss_bytes() const { return micro_batches_per_step() * 8; }
};

// What the planner predicted for a plan when it wrote it; informative, never read by the executor.
struct PlanForecast {
  PredictedSeconds step;
  double tokens_per_second = 0;
  std::string bottleneck;
  PredictedSeconds exposed;
  int64_t device_bytes = 0;  // per rank
  int64_t host_bytes = 0;
  std::vector<std::string> why;  // one sentence per choice
};

// A plan with what it was made for, so that slidedp-run needs nothing else: the training spec that it executes and the
// machine that it was priced on.
struct PlanFile {
  Plan plan;
  TrainSpec train;
  HardwareSpec hardware;
  PlanForecast forecast;
};

PlanFile load_plan(const std::filesystem::path& file);                    // strict; throws Error with file:line
PlanFile parse_plan(const std::string& yaml, const std::string& source);  // of a plan file's text; errors name `source`
std::string to_yaml(const PlanFile&);                                     // round trip exact

// Throws Error that names the plan's field if the plan cannot belong to this model and training spec, or its fields
// contradict each other.
void validate_plan(const Plan& plan, const ModelSpec& model, const TrainSpec& train);

}  // namespace slidedp
