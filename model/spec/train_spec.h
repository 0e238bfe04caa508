// What the user wants to train: data shape, optimizer, seed. YAML, schema "slidedp.train/1".
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>

namespace slidedp {

struct AdamSpec {
  double learning_rate = 1e-5;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 0.0;  // decoupled; not applied to norms and biases
  bool operator==(const AdamSpec&) const = default;
};

struct TrainSpec {
  int64_t seq = 0;         // tokens per row
  int64_t batch_rows = 0;  // rows per step over all ranks, waves and micro-batches
  int64_t steps = 0;
  uint64_t seed = 0;
  AdamSpec adam;
  double max_grad_norm = 0.0;  // global-norm clip; 0 = no clipping
  // Share of the vocabulary's rows that one step's tokens touch (the simulator's input for row ranges).
  double touched_vocabulary_share = 0.06;
  bool operator==(const TrainSpec&) const = default;
  int64_t tokens_per_step() const { return seq * batch_rows; }
};

TrainSpec load_train_spec(const std::filesystem::path& file);  // throws Error with file:line
std::string to_yaml(const TrainSpec&);                         // round trip exact

}  // namespace slidedp
