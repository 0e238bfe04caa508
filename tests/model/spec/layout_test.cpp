#include "model/spec/layout.h"

#include <set>

#include "tests/model/spec/support.h"

namespace slidedp {
namespace {

using Role = TensorRole;

// Odd sizes, so that every group ends off the 64-element grain.
ModelSpec odd_model() {
  ModelSpec model;
  model.hidden = 18;
  model.intermediate = 23;
  model.layers = 3;
  model.heads = 6;
  model.kv_heads = 2;
  model.head_dim = 10;
  model.vocabulary = 31;
  model.max_position = 64;
  return model;
}

ModelSpec full_model() {
  ModelSpec model = odd_model();
  model.qkv_bias = model.o_bias = model.mlp_bias = model.qk_norm = true;
  return model;
}

std::vector<Role> roles(const UnitLayout& unit) {
  std::vector<Role> result;
  for (const TensorLayout& tensor : unit.tensors) result.push_back(tensor.role);
  return result;
}

TEST(Layout, UnitsInModelOrder) {
  const ModelLayout layout = make_layout(odd_model());
  ASSERT_EQ(layout.units.size(), 5u);
  EXPECT_EQ(layout.layers, 3);
  EXPECT_FALSE(layout.tied);
  for (int i = 0; i < 5; ++i) EXPECT_EQ(layout.units[i].unit, i);
  EXPECT_EQ(layout.embedding().kind, UnitKind::embedding);
  EXPECT_EQ(layout.embedding().name, "embedding");
  EXPECT_EQ(layout.embedding().layer, -1);
  EXPECT_EQ(layout.units[2].kind, UnitKind::layer);
  EXPECT_EQ(layout.units[2].layer, 1);
  EXPECT_EQ(layout.units[2].name, "layer 1");
  EXPECT_EQ(layout.head().kind, UnitKind::head);
  EXPECT_EQ(layout.head().name, "head");
  EXPECT_EQ(layout.head().layer, -1);
}

TEST(Layout, LayerOrderWithEverything) {
  const ModelLayout layout = make_layout(full_model());
  EXPECT_EQ(roles(layout.units[1]),
            (std::vector{Role::input_norm, Role::q_weight, Role::k_weight, Role::v_weight, Role::q_bias, Role::k_bias,
                         Role::v_bias, Role::q_norm, Role::k_norm, Role::o_weight, Role::o_bias, Role::post_norm,
                         Role::gate_weight, Role::up_weight, Role::gate_bias, Role::up_bias, Role::down_weight,
                         Role::down_bias}));
  EXPECT_EQ(layout.units[3].at(Role::o_bias).name, "model.layers.2.self_attn.o_proj.bias");
}

TEST(Layout, LayerOrderOfAPlainModel) {
  const ModelLayout layout = make_layout(odd_model());
  const UnitLayout& unit = layout.units[1];
  EXPECT_EQ(roles(unit), (std::vector{Role::input_norm, Role::q_weight, Role::k_weight, Role::v_weight, Role::o_weight,
                                      Role::post_norm, Role::gate_weight, Role::up_weight, Role::down_weight}));
  EXPECT_EQ(unit.find(Role::q_bias), nullptr);
  EXPECT_THROW(unit.at(Role::q_bias), std::logic_error);
}

TEST(Layout, GroupsAreOneMatrixViewAndStartAligned) {
  const ModelLayout layout = make_layout(full_model());
  const UnitLayout& unit = layout.units[1];
  const std::vector<std::vector<Role>> groups{{Role::q_weight, Role::k_weight, Role::v_weight},
                                              {Role::q_bias, Role::k_bias, Role::v_bias},
                                              {Role::gate_weight, Role::up_weight},
                                              {Role::gate_bias, Role::up_bias}};
  std::set<Role> inner;  // every other tensor starts a group
  for (const auto& group : groups) {
    for (size_t i = 1; i < group.size(); ++i) {
      const TensorLayout& previous = unit.at(group[i - 1]);
      EXPECT_EQ(unit.at(group[i]).offset, previous.offset + previous.elements) << unit.at(group[i]).name;
      inner.insert(group[i]);
    }
  }
  int64_t end = 0;
  for (const TensorLayout& tensor : unit.tensors) {
    EXPECT_GE(tensor.offset, end) << tensor.name;
    EXPECT_LT(tensor.offset - end, kBlockElements) << tensor.name;
    if (!inner.contains(tensor.role)) {
      EXPECT_EQ(tensor.offset % kBlockElements, 0) << tensor.name;
    }
    end = tensor.offset + tensor.elements;
  }
  EXPECT_EQ(unit.elements, round_up(end, kBlockElements));
  EXPECT_NE(unit.elements, end) << "the model must leave a gap for this test to mean something";
}

TEST(Layout, ShapesOffsetsAndElements) {
  const ModelLayout layout = make_layout(odd_model());
  const UnitLayout& unit = layout.units[1];
  EXPECT_EQ(unit.at(Role::q_weight).shape, (std::vector<int64_t>{60, 18}));
  EXPECT_EQ(unit.at(Role::k_weight).shape, (std::vector<int64_t>{20, 18}));
  EXPECT_EQ(unit.at(Role::o_weight).shape, (std::vector<int64_t>{18, 60}));
  EXPECT_EQ(unit.at(Role::down_weight).shape, (std::vector<int64_t>{18, 23}));
  EXPECT_EQ(unit.at(Role::input_norm).offset, 0);
  EXPECT_EQ(unit.at(Role::q_weight).offset, 64);  // 18 rounded up
  EXPECT_EQ(unit.at(Role::v_weight).offset, 64 + 1080 + 360);
  EXPECT_EQ(unit.at(Role::o_weight).offset, 1920);  // 64 + 1080 + 360 + 360 = 1864 rounded up
  EXPECT_EQ(unit.at(Role::o_weight).elements, 1080);
  EXPECT_EQ(unit.at(Role::post_norm).offset, 3008);  // 3000 rounded up
  EXPECT_EQ(unit.at(Role::gate_weight).offset, 3072);
  EXPECT_EQ(unit.at(Role::down_weight).offset, 3904);  // 3072 + 2 * 414 = 3900 rounded up
  EXPECT_EQ(unit.elements, 4352);                      // 3904 + 414 = 4318 rounded up
}

// The two blocks meet at the norm between them, on a block's boundary, and hold all tensors.
TEST(Layout, BlocksOfALayer) {
  for (const ModelSpec& model : {odd_model(), full_model()}) {
    const UnitLayout unit = make_layout(model).units[1];
    const ElementRange whole = unit.range(LayerBlock::whole), attention = unit.range(LayerBlock::attention),
                       mlp = unit.range(LayerBlock::mlp);
    EXPECT_EQ(whole.begin, 0);
    EXPECT_EQ(whole.end, unit.elements);
    EXPECT_EQ(attention.begin, 0);
    EXPECT_EQ(attention.end, mlp.begin);
    EXPECT_EQ(mlp.begin % kBlockElements, 0);
    EXPECT_EQ(mlp.end, unit.elements);
    const std::set<Role> of_mlp{Role::post_norm, Role::gate_weight, Role::up_weight, Role::gate_bias,
                                Role::up_bias,   Role::down_weight, Role::down_bias};
    for (const TensorLayout& tensor : unit.tensors) {
      const ElementRange own = of_mlp.contains(tensor.role) ? mlp : attention;
      EXPECT_GE(tensor.offset, own.begin) << tensor.name;
      EXPECT_LE(tensor.offset + tensor.elements, own.end) << tensor.name;
    }
  }
}

TEST(Layout, DecayOnlyOnMatrices) {
  const ModelLayout layout = make_layout(full_model());
  const std::set<Role> decayed{Role::embedding, Role::q_weight,  Role::k_weight,    Role::v_weight,   Role::o_weight,
                               Role::lm_head,   Role::up_weight, Role::gate_weight, Role::down_weight};
  for (const UnitLayout& unit : layout.units) {
    for (const TensorLayout& tensor : unit.tensors)
      EXPECT_EQ(tensor.decay, decayed.contains(tensor.role)) << tensor.name;
  }
}

TEST(Layout, TiedHeadHoldsTheFinalNormOnly) {
  ModelSpec model = odd_model();
  model.tied = true;
  const ModelLayout layout = make_layout(model);
  EXPECT_TRUE(layout.tied);
  EXPECT_EQ(roles(layout.head()), (std::vector{Role::final_norm}));
  EXPECT_EQ(layout.head().slot_class, SlotClass::final_norm);
  EXPECT_EQ(layout.class_elements(SlotClass::final_norm), 64);
  EXPECT_EQ(layout.class_elements(SlotClass::vocabulary), 576);  // 31 * 18 = 558 rounded up
}

TEST(Layout, UntiedHeadIsAVocabularyUnit) {
  const ModelLayout layout = make_layout(odd_model());
  EXPECT_EQ(roles(layout.head()), (std::vector{Role::final_norm, Role::lm_head}));
  EXPECT_EQ(layout.head().at(Role::final_norm).name, "model.norm.weight");
  EXPECT_EQ(layout.head().at(Role::lm_head).name, "lm_head.weight");
  EXPECT_EQ(layout.head().at(Role::lm_head).offset, 64);
  EXPECT_EQ(layout.head().slot_class, SlotClass::vocabulary);
  EXPECT_EQ(layout.embedding().slot_class, SlotClass::vocabulary);
  EXPECT_EQ(layout.class_elements(SlotClass::vocabulary), 640);  // the head, not the embedding's 576
  EXPECT_EQ(layout.class_elements(SlotClass::layer), layout.units[1].elements);
  EXPECT_EQ(layout.class_elements(SlotClass::final_norm), 0);
}

TEST(Layout, ElementsAreTheSumOfUnits) {
  const ModelLayout layout = make_layout(full_model());
  int64_t sum = 0;
  for (const UnitLayout& unit : layout.units) sum += unit.elements;
  EXPECT_EQ(layout.elements, sum);
}

TEST(Layout, SlotClassNames) {
  EXPECT_EQ(name(SlotClass::layer), "layer");
  EXPECT_EQ(name(SlotClass::vocabulary), "vocabulary");
  EXPECT_EQ(name(SlotClass::final_norm), "final_norm");
}

UnitLayout unit_of(int64_t elements) {
  UnitLayout unit;
  unit.elements = elements;
  return unit;
}

TEST(Chunks, OnlyTheLastIsPadded) {
  const UnitLayout unit = unit_of(10 * 64);
  const std::vector<Chunk> chunks = make_chunks(unit, 200, 3);  // 200 rounded up to 2 * 192
  ASSERT_EQ(chunks.size(), 2u);
  EXPECT_EQ(chunks[0].begin, 0);
  EXPECT_EQ(chunks[0].elements, 384);
  EXPECT_EQ(chunks[0].padded, 384);
  EXPECT_EQ(chunks[1].begin, 384);
  EXPECT_EQ(chunks[1].elements, 256);
  EXPECT_EQ(chunks[1].padded, 384);
  EXPECT_EQ(padded_elements(unit, 200, 3), 768);
}

TEST(Chunks, CoverTheUnitForAnyChunkAndRankCount) {
  for (const int64_t blocks : {1, 2, 3, 7, 16, 33}) {
    for (int ranks = 1; ranks <= 8; ++ranks) {
      for (const int64_t wish : {int64_t{1}, int64_t{64}, int64_t{65}, int64_t{500}, int64_t{100000}, INT64_MAX}) {
        SCOPED_TRACE(::testing::Message() << blocks << " blocks, " << ranks << " ranks, chunk " << wish);
        const UnitLayout unit = unit_of(blocks * 64);
        const std::vector<Chunk> chunks = make_chunks(unit, wish, ranks);
        int64_t end = 0;
        for (size_t i = 0; i < chunks.size(); ++i) {
          EXPECT_EQ(chunks[i].begin, end);
          EXPECT_GT(chunks[i].elements, 0);
          EXPECT_EQ(chunks[i].padded, round_up(chunks[i].elements, ranks * 64));
          EXPECT_TRUE(chunks[i].elements == chunks[i].padded || i + 1 == chunks.size());
          EXPECT_EQ(chunks[i].shard_elements(ranks) % 64, 0);
          int64_t valid = 0;
          for (int rank = 0; rank < ranks; ++rank) valid += chunks[i].shard_valid(rank, ranks);
          EXPECT_EQ(valid, chunks[i].elements);
          end += chunks[i].elements;
        }
        EXPECT_EQ(end, unit.elements);
        EXPECT_EQ(padded_elements(unit, wish, ranks), chunks.back().begin + chunks.back().padded);
        EXPECT_TRUE(wish < unit.elements || chunks.size() == 1);
      }
    }
  }
}

TEST(Chunks, ShardsOfTheTailMayBeShortOrEmpty) {
  const Chunk chunk{0, 5 * 64, 8 * 64};  // 4 ranks, 128 elements each
  EXPECT_EQ(chunk.shard_elements(4), 128);
  EXPECT_EQ(chunk.shard_valid(0, 4), 128);
  EXPECT_EQ(chunk.shard_valid(1, 4), 128);
  EXPECT_EQ(chunk.shard_valid(2, 4), 64);
  EXPECT_EQ(chunk.shard_valid(3, 4), 0);
}

TEST(Chunks, RefuseNonsense) {
  EXPECT_THROW(make_chunks(unit_of(64), 0, 1), std::logic_error);
  EXPECT_THROW(make_chunks(unit_of(64), 64, 0), std::logic_error);
}

}  // namespace
}  // namespace slidedp
