// Flat layout of every unit: which tensor lies where in the unit's parameter vector, and its chunks.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "model/base/types.h"
#include "model/spec/model_spec.h"

namespace slidedp {

enum class TensorRole : uint8_t {
  embedding,
  input_norm,
  q_weight,
  k_weight,
  v_weight,
  q_bias,
  k_bias,
  v_bias,
  q_norm,
  k_norm,
  o_weight,
  o_bias,
  post_norm,
  gate_weight,
  up_weight,
  gate_bias,
  up_bias,
  down_weight,
  down_bias,
  final_norm,
  lm_head
};

struct TensorLayout {
  TensorRole role{};
  std::string name;            // Hugging Face name, e.g. "model.layers.3.self_attn.q_proj.weight"
  std::vector<int64_t> shape;  // as in the checkpoint; weights are [out, in], row-major
  int64_t offset = 0;          // elements from the start of the unit
  int64_t elements = 0;
  bool decay = true;  // false for norms and biases (Hugging Face's default)
};

// Slots of one class can hold any unit of that class.
//   embedding -> vocabulary; layer -> layer; head -> vocabulary, or final_norm when the head is tied (then the head
//   unit holds the final norm only, and its matrix is the embedding unit's, delivered to a vocabulary slot).
//   No unit is of class touched_rows: such a slot holds those rows of the embedding that a wave's tokens touch.
enum class SlotClass : uint8_t { layer, vocabulary, final_norm, touched_rows };
std::string_view name(SlotClass);

// A range of a unit's flat vector.
struct ElementRange {
  int64_t begin = 0, end = 0;
};

struct UnitLayout {
  int unit = 0;  // index in the model's order: 0 embedding, 1..layers the layers, layers + 1 the head
  UnitKind kind{};
  int layer = -1;  // for layers
  SlotClass slot_class{};
  std::string name;  // "embedding", "layer 3", "head"
  // In offset order. q, k, v weights are adjacent (one [q+k+v, hidden] matrix view), so are their biases, gate and up
  // weights, gate and up biases. Each group starts at a multiple of kBlockElements; inside a group there is no gap. A
  // layer's attention block comes before its MLP block, each with the norm that it begins with.
  std::vector<TensorLayout> tensors;
  int64_t elements = 0;  // whole unit with gaps; a multiple of kBlockElements

  // The tensor of that role; throws std::logic_error if the unit has none.
  const TensorLayout& at(TensorRole role) const;
  const TensorLayout* find(TensorRole role) const;  // nullptr if none
  // Where a layer's block has its tensors; the two meet at a multiple of kBlockElements.
  ElementRange range(LayerBlock block) const;
};

struct ModelLayout {
  std::vector<UnitLayout> units;  // embedding, layers, head
  int64_t elements = 0;           // sum over units
  int layers = 0;
  bool tied = false;
  const UnitLayout& embedding() const { return units.front(); }
  const UnitLayout& head() const { return units.back(); }
  // Largest unit of a class, in elements.
  int64_t class_elements(SlotClass) const;
};

ModelLayout make_layout(const ModelSpec& model);

// A chunk is a contiguous range of one unit's flat vector. `elements` is what exists on the host; `padded` is
// round_up(elements, ranks * kBlockElements), differing only for a unit's last chunk (tail space of the slot).
struct Chunk {
  int64_t begin = 0;  // elements from the start of the unit
  int64_t elements = 0;
  int64_t padded = 0;
  // Rank r owns the r-th equal part of the padded chunk; the part that exists on the host may be shorter or empty.
  int64_t shard_elements(int ranks) const { return padded / ranks; }
  int64_t shard_valid(int rank, int ranks) const;
};

// chunk_elements is rounded up to ranks * kBlockElements and capped at the (padded) unit.
std::vector<Chunk> make_chunks(const UnitLayout& unit, int64_t chunk_elements, int ranks);
// Slot capacity in elements: the unit with its last chunk padded.
int64_t padded_elements(const UnitLayout& unit, int64_t chunk_elements, int ranks);

}  // namespace slidedp
