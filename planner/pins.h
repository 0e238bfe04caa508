// `--pin field=value`: plan fields that the user fixes, by the plan's YAML names.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "model/base/types.h"
#include "planner/search.h"

namespace slidedp {

// Parsed pins; an empty field is the planner's to choose.
struct PinnedFields {
  std::optional<Delivery> delivery;
  std::optional<Reduction> reduction;
  std::optional<UpdatePolicy> update;
  std::optional<DType> wire, accumulator;
  std::optional<std::vector<ActivationPolicy>> activation;  // one per layer
  std::optional<int64_t> chunk_elements, micro_batch_rows, head_chunk_tokens;
  std::optional<int> ranks, micro_batches, waves;
  std::optional<int> layer_slots, gradient_slots, vocabulary_slots, wire_slots, landing_slots;
  std::optional<bool> vocabulary_kept;
  std::optional<VocabularyRows> vocabulary_rows;
  std::optional<int> update_threads, compute_threads;
};

// Throws Error that names the valid fields or values. `layers` is the model's number of layers.
PinnedFields parse_pins(const Pins& pins, int64_t layers);

// "field=value" to a pin; throws Error if there is no '=' or the field is given twice.
void add_pin(const std::string& assignment, Pins& pins);

}  // namespace slidedp
