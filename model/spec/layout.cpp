#include "model/spec/layout.h"

#include <algorithm>
#include <initializer_list>
#include <stdexcept>
#include <utility>

namespace slidedp {
namespace {

// Appends tensors to a unit: one call is one group, which starts at a multiple of kBlockElements and has no gaps.
class UnitBuilder {
 public:
  struct Item {
    TensorRole role;
    std::string name;
    std::vector<int64_t> shape;
  };

  explicit UnitBuilder(UnitLayout& unit) : unit_(unit) {}

  // Norms and biases, the vectors, are not decayed; matrices are.
  void group(std::initializer_list<Item> items) {
    int64_t offset = round_up(end_, kBlockElements);
    for (const Item& item : items) {
      TensorLayout tensor{item.role, item.name, item.shape, offset, 1, item.shape.size() > 1};
      for (const int64_t size : item.shape) tensor.elements *= size;
      offset += tensor.elements;
      unit_.tensors.push_back(std::move(tensor));
    }
    end_ = offset;
    unit_.elements = round_up(end_, kBlockElements);
  }

 private:
  UnitLayout& unit_;
  int64_t end_ = 0;  // elements, after the last tensor
};

UnitLayout embedding_unit(const ModelSpec& model) {
  UnitLayout unit;
  unit.unit = 0;
  unit.kind = UnitKind::embedding;
  unit.slot_class = SlotClass::vocabulary;
  unit.name = "embedding";
  UnitBuilder(unit).group({{TensorRole::embedding, "model.embed_tokens.weight", {model.vocabulary, model.hidden}}});
  return unit;
}

void add_attention(UnitBuilder& builder, const ModelSpec& model, const std::string& prefix) {
  const int64_t q = model.heads * model.head_dim;
  const int64_t kv = model.kv_heads * model.head_dim;
  builder.group({{TensorRole::q_weight, prefix + "q_proj.weight", {q, model.hidden}},
                 {TensorRole::k_weight, prefix + "k_proj.weight", {kv, model.hidden}},
                 {TensorRole::v_weight, prefix + "v_proj.weight", {kv, model.hidden}}});
  if (model.qkv_bias) {
    builder.group({{TensorRole::q_bias, prefix + "q_proj.bias", {q}},
                   {TensorRole::k_bias, prefix + "k_proj.bias", {kv}},
                   {TensorRole::v_bias, prefix + "v_proj.bias", {kv}}});
  }
  if (model.qk_norm) {
    builder.group({{TensorRole::q_norm, prefix + "q_norm.weight", {model.head_dim}}});
    builder.group({{TensorRole::k_norm, prefix + "k_norm.weight", {model.head_dim}}});
  }
  builder.group({{TensorRole::o_weight, prefix + "o_proj.weight", {model.hidden, q}}});
  if (model.o_bias) builder.group({{TensorRole::o_bias, prefix + "o_proj.bias", {model.hidden}}});
}

void add_mlp(UnitBuilder& builder, const ModelSpec& model, const std::string& prefix) {
  builder.group({{TensorRole::gate_weight, prefix + "gate_proj.weight", {model.intermediate, model.hidden}},
                 {TensorRole::up_weight, prefix + "up_proj.weight", {model.intermediate, model.hidden}}});
  if (model.mlp_bias) {
    builder.group({{TensorRole::gate_bias, prefix + "gate_proj.bias", {model.intermediate}},
                   {TensorRole::up_bias, prefix + "up_proj.bias", {model.intermediate}}});
  }
  builder.group({{TensorRole::down_weight, prefix + "down_proj.weight", {model.hidden, model.intermediate}}});
  if (model.mlp_bias) builder.group({{TensorRole::down_bias, prefix + "down_proj.bias", {model.hidden}}});
}

UnitLayout layer_unit(const ModelSpec& model, int layer) {
  UnitLayout unit;
  unit.unit = layer + 1;
  unit.kind = UnitKind::layer;
  unit.layer = layer;
  unit.slot_class = SlotClass::layer;
  unit.name = "layer " + std::to_string(layer);
  const std::string prefix = "model.layers." + std::to_string(layer) + ".";
  UnitBuilder builder(unit);
  builder.group({{TensorRole::input_norm, prefix + "input_layernorm.weight", {model.hidden}}});
  add_attention(builder, model, prefix + "self_attn.");
  builder.group({{TensorRole::post_norm, prefix + "post_attention_layernorm.weight", {model.hidden}}});
  add_mlp(builder, model, prefix + "mlp.");
  return unit;
}

UnitLayout head_unit(const ModelSpec& model) {
  UnitLayout unit;
  unit.unit = static_cast<int>(model.layers) + 1;
  unit.kind = UnitKind::head;
  unit.slot_class = model.tied ? SlotClass::final_norm : SlotClass::vocabulary;
  unit.name = "head";
  UnitBuilder builder(unit);
  builder.group({{TensorRole::final_norm, "model.norm.weight", {model.hidden}}});
  if (!model.tied) builder.group({{TensorRole::lm_head, "lm_head.weight", {model.vocabulary, model.hidden}}});
  return unit;
}

}  // namespace

std::string_view name(SlotClass slot_class) {
  switch (slot_class) {
    case SlotClass::layer:
      return "layer";
    case SlotClass::vocabulary:
      return "vocabulary";
    case SlotClass::final_norm:
      return "final_norm";
    case SlotClass::touched_rows:
      return "touched_rows";
  }
  throw std::logic_error("unknown SlotClass");
}

const TensorLayout* UnitLayout::find(TensorRole role) const {
  const auto found = std::find_if(tensors.begin(), tensors.end(), [&](const auto& t) { return t.role == role; });
  return found == tensors.end() ? nullptr : &*found;
}

const TensorLayout& UnitLayout::at(TensorRole role) const {
  const TensorLayout* tensor = find(role);
  if (tensor == nullptr) {
    throw std::logic_error("unit " + name + " has no tensor of role " + std::to_string(static_cast<int>(role)));
  }
  return *tensor;
}

ElementRange UnitLayout::range(LayerBlock block) const {
  if (block == LayerBlock::whole) return {0, elements};
  const int64_t middle = at(TensorRole::post_norm).offset;
  return block == LayerBlock::attention ? ElementRange{0, middle} : ElementRange{middle, elements};
}

int64_t ModelLayout::class_elements(SlotClass slot_class) const {
  int64_t largest = 0;
  for (const UnitLayout& unit : units) {
    if (unit.slot_class == slot_class) largest = std::max(largest, unit.elements);
  }
  return largest;
}

ModelLayout make_layout(const ModelSpec& model) {
  ModelLayout layout;
  layout.layers = static_cast<int>(model.layers);
  layout.tied = model.tied;
  layout.units.push_back(embedding_unit(model));
  for (int layer = 0; layer < layout.layers; ++layer) layout.units.push_back(layer_unit(model, layer));
  layout.units.push_back(head_unit(model));
  for (const UnitLayout& unit : layout.units) layout.elements += unit.elements;
  return layout;
}

int64_t Chunk::shard_valid(int rank, int ranks) const {
  const int64_t shard = shard_elements(ranks);
  return std::clamp<int64_t>(elements - rank * shard, 0, shard);
}

std::vector<Chunk> make_chunks(const UnitLayout& unit, int64_t chunk_elements, int ranks) {
  if (chunk_elements <= 0 || ranks <= 0) throw std::logic_error("make_chunks needs a positive chunk and rank count");
  const int64_t grain = ranks * kBlockElements;
  // Capped before rounding, so that a huge wish cannot overflow.
  const int64_t size = round_up(std::min(chunk_elements, unit.elements), grain);
  std::vector<Chunk> chunks;
  chunks.reserve(static_cast<size_t>(ceil_div(unit.elements, size)));
  for (int64_t begin = 0; begin < unit.elements; begin += size) {
    const int64_t elements = std::min(size, unit.elements - begin);
    chunks.push_back({begin, elements, round_up(elements, grain)});
  }
  return chunks;
}

int64_t padded_elements(const UnitLayout& unit, int64_t chunk_elements, int ranks) {
  const Chunk last = make_chunks(unit, chunk_elements, ranks).back();
  return last.begin + last.padded;
}

}  // namespace slidedp
