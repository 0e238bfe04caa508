#include "runtime/io/checkpoint_hf.h"

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <nlohmann/json.hpp>

#include "tests/runtime/io/io_fixture.h"

namespace slidedp {
namespace {

using testing::AllOf;
using testing::HasSubstr;

template <typename T>
std::string bytes_of(const std::vector<T>& values) {
  return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T)};
}

// Checkpoint tensors of the whole model with random contents of one type.
TestTensors random_tensors(const ModelLayout& layout, StoredType type, uint32_t seed) {
  std::mt19937 random(seed);
  TestTensors tensors;
  for (const UnitLayout& unit : layout.units) {
    for (const TensorLayout& tensor : unit.tensors) {
      std::string data(static_cast<size_t>(tensor.elements * size_of(type)), '\0');
      for (int64_t i = 0; i < tensor.elements; ++i) {
        // Any finite pattern: an all-ones exponent loses its lowest bit, and so does bf16's largest.
        auto bits = static_cast<uint32_t>(random());
        if (type == StoredType::f32) bits &= ~0x00800000u;
        if (type == StoredType::bf16) bits &= ~0x0080u;
        if (type == StoredType::f16) bits &= ~0x0400u;
        std::memcpy(data.data() + i * size_of(type), &bits, static_cast<size_t>(size_of(type)));
      }
      tensors[tensor.name] = {type, tensor.shape, data};
    }
  }
  return tensors;
}

// IEEE half by its definition.
float reference_half(uint16_t half) {
  const int exponent = half >> 10 & 31, fraction = half & 1023;
  const double magnitude = exponent == 0 ? std::ldexp(fraction, -24) : std::ldexp(1024 + fraction, exponent - 25);
  return static_cast<float>(half & 0x8000 ? -magnitude : magnitude);
}

float stored_value(const TestTensor& tensor, int64_t i) {
  uint32_t bits = 0;
  std::memcpy(&bits, tensor.data.data() + i * size_of(tensor.type), static_cast<size_t>(size_of(tensor.type)));
  if (tensor.type == StoredType::f16) return reference_half(static_cast<uint16_t>(bits));
  return std::bit_cast<float>(tensor.type == StoredType::bf16 ? bits << 16 : bits);
}

// Every master equals the checkpoint's value bit for bit; gaps are zero; m and v are zero.
void expect_loaded(HostState& state, const TestTensors& tensors) {
  int64_t covered = 0;
  for_each_tensor(state, [&](UnitState unit, const TensorLayout& tensor) {
    const TestTensor& stored = tensors.at(tensor.name);
    for (int64_t i = 0; i < tensor.elements; ++i) {
      const auto at = static_cast<size_t>(tensor.offset + i);
      ASSERT_EQ(std::bit_cast<uint32_t>(join_master({unit.hi[at], unit.lo[at]})),
                std::bit_cast<uint32_t>(stored_value(stored, i)))
          << tensor.name << " " << i;
      ASSERT_TRUE(unit.m[at] == 0 && unit.v[at] == 0);
      ASSERT_TRUE(stored.type != StoredType::bf16 || unit.lo[at] == 0);
      covered += unit.hi[at] != 0 || unit.lo[at] != 0;
      unit.hi[at] = unit.lo[at] = 0;
    }
  });
  EXPECT_GT(covered, 1000);
  for (const UnitLayout& unit : state.layout().units) {
    EXPECT_THAT(state.unit(unit.unit).hi, testing::Each(0)) << "gaps are zero";
    EXPECT_THAT(state.unit(unit.unit).lo, testing::Each(0)) << "gaps are zero";
  }
}

class LoadTest : public testing::Test {
 protected:
  std::string load_error(const TestTensors& tensors) {
    save(file_, tensors);
    return error_of([&] { load_hf_checkpoint(dir_, state_, 2); });
  }
  // Splits the tensors over two shards and writes them with this index (nullptr: the right one).
  void save_shards(const TestTensors& tensors, const nlohmann::json* index = nullptr) {
    TestTensors shards[2];
    nlohmann::json right;
    for (const auto& [name, tensor] : tensors) {
      const size_t shard = right["weight_map"].size() % 2;
      shards[shard][name] = tensor;
      right["weight_map"][name] = shard == 0 ? "one.safetensors" : "two.safetensors";
    }
    save(dir_ / "one.safetensors", shards[0]);
    save(dir_ / "two.safetensors", shards[1]);
    write_file(dir_ / "model.safetensors.index.json", (index != nullptr ? *index : right).dump());
  }
  TemporaryFolder folder_;
  fs::path dir_ = folder_ / "model";
  fs::path file_ = dir_ / "model.safetensors";
  ModelLayout layout_ = tiny_layout(false);
  HostState state_{layout_};
};

TEST_F(LoadTest, EveryTypeKeepsEveryBit) {
  for (StoredType type : {StoredType::bf16, StoredType::f16, StoredType::f32}) {
    for (int threads : {1, 3}) {
      const TestTensors tensors = random_tensors(layout_, type, 1);
      save(file_, tensors);
      EXPECT_TRUE(load_hf_checkpoint(dir_, state_, threads).empty());
      expect_loaded(state_, tensors);
    }
  }
}

TEST_F(LoadTest, EveryFiniteHalf) {
  TestTensors tensors = random_tensors(layout_, StoredType::f16, 1);
  const std::string& name = layout_.embedding().tensors[0].name;
  const int64_t room = tensors[name].data.size() / 2;
  for (int64_t next = 0; next < 0x10000; next += room) {
    std::vector<uint16_t> values(static_cast<size_t>(room));
    for (int64_t i = 0; i < room; ++i) {
      values[static_cast<size_t>(i)] = static_cast<uint16_t>(next + i);
      if ((values[static_cast<size_t>(i)] & 0x7c00) == 0x7c00) values[static_cast<size_t>(i)] = 1;
    }
    tensors[name].data = bytes_of(values);
    save(file_, tensors);
    load_hf_checkpoint(dir_, state_, 1);
    expect_loaded(state_, tensors);
    if (HasFatalFailure()) return;
  }
}

TEST_F(LoadTest, UnalignedDataIsRead) {
  TestTensors tensors = random_tensors(layout_, StoredType::f32, 2);
  save(file_, tensors);
  std::string content = read_file(file_);
  uint64_t header = 0;
  std::memcpy(&header, content.data(), 8);
  ++header;
  std::memcpy(content.data(), &header, 8);
  content.insert(8 + header - 1, 1, ' ');
  write_file(file_, content);
  load_hf_checkpoint(dir_, state_, 2);
  expect_loaded(state_, tensors);
}

TEST_F(LoadTest, ShardsWithAnIndex) {
  const TestTensors tensors = random_tensors(layout_, StoredType::bf16, 3);
  save_shards(tensors);
  EXPECT_TRUE(load_hf_checkpoint(dir_, state_, 2).empty());
  expect_loaded(state_, tensors);
}

TEST_F(LoadTest, BrokenIndexes) {
  const TestTensors tensors = random_tensors(layout_, StoredType::bf16, 3);
  const auto error_of_index = [&](const nlohmann::json& index) {
    save_shards(tensors, &index);
    return error_of([&] { load_hf_checkpoint(dir_, state_, 2); });
  };
  EXPECT_THAT(error_of_index({{"weight", 1}}), HasSubstr("model.safetensors.index.json"));
  EXPECT_THAT(error_of_index({{"weight_map", {{"a", 3}}}}), HasSubstr("model.safetensors.index.json"));
  EXPECT_THAT(error_of_index({{"weight_map", {{"a", "../one.safetensors"}}}}), HasSubstr("plain file name"));
  EXPECT_THAT(error_of_index({{"weight_map", {{"a", "three.safetensors"}}}}), HasSubstr("three.safetensors"));
  EXPECT_THAT(error_of_index({{"weight_map", {{"a", "one.safetensors"}}}}),
              AllOf(HasSubstr("tensor a"), HasSubstr("one")));
  // In the other shard than the index says.
  const std::string first = tensors.begin()->first;
  EXPECT_THAT(error_of_index({{"weight_map", {{first, "two.safetensors"}, {"b", "one.safetensors"}}}}),
              HasSubstr("not there"));
  save_shards(tensors);
  TestTensors again = tensors;
  save(dir_ / "two.safetensors", again);
  EXPECT_THAT(error_of([&] { load_hf_checkpoint(dir_, state_, 2); }),
              AllOf(HasSubstr("both in"), HasSubstr("one.safetensors"), HasSubstr("two.safetensors")));
  write_file(dir_ / "model.safetensors.index.json", "{");
  EXPECT_THAT(error_of([&] { load_hf_checkpoint(dir_, state_, 2); }), HasSubstr("model.safetensors.index.json"));
}

TEST_F(LoadTest, NoWeights) {
  EXPECT_THAT(error_of([&] { load_hf_checkpoint(dir_, state_, 2); }),
              AllOf(HasSubstr(dir_.string()), HasSubstr("neither")));
}

TEST_F(LoadTest, MissingTensorsAreListedUpToAFew) {
  TestTensors tensors = random_tensors(layout_, StoredType::bf16, 4);
  tensors.erase("model.norm.weight");
  EXPECT_THAT(load_error(tensors),
              AllOf(HasSubstr("lacks 1 of"), HasSubstr("model.norm.weight"), HasSubstr(dir_.string())));
  std::erase_if(tensors, [](const auto& entry) { return entry.first.starts_with("model.layers.1."); });
  const std::string message = load_error(tensors);
  EXPECT_THAT(message, AllOf(HasSubstr("model.layers.1."), HasSubstr("...")));
  EXPECT_THAT(message, testing::Not(HasSubstr("model.norm.weight"))) << "only the first few";
}

TEST_F(LoadTest, WrongShapeOrType) {
  TestTensors tensors = random_tensors(layout_, StoredType::bf16, 5);
  TestTensor& tensor = tensors["model.layers.1.mlp.down_proj.weight"];
  const TestTensor good = tensor;
  std::swap(tensor.shape[0], tensor.shape[1]);
  EXPECT_THAT(load_error(tensors), AllOf(HasSubstr("model.layers.1.mlp.down_proj.weight"), HasSubstr("[40, 24]"),
                                         HasSubstr("[24, 40]"), HasSubstr(file_.string())));
  tensor = good;
  tensor.type = StoredType::i32;
  tensor.data.resize(tensor.data.size() * 2);
  EXPECT_THAT(load_error(tensors), AllOf(HasSubstr("model.layers.1.mlp.down_proj.weight"), HasSubstr("I32")));
}

TEST_F(LoadTest, WeightsThatAreNotFinite) {
  const std::string name = "model.layers.0.mlp.up_proj.weight";
  const auto error_with = [&](StoredType type, auto value) {
    TestTensors tensors = random_tensors(layout_, type, 6);
    std::memcpy(tensors[name].data.data() + 7 * sizeof(value), &value, sizeof(value));
    const std::string message = load_error(tensors);
    EXPECT_THAT(message, AllOf(HasSubstr(name), HasSubstr(file_.string()), HasSubstr("not finite")));
  };
  error_with(StoredType::bf16, uint16_t{0x7f80});
  error_with(StoredType::bf16, uint16_t{0xffc0});
  error_with(StoredType::f16, uint16_t{0x7c00});
  error_with(StoredType::f16, uint16_t{0xfe00});
  error_with(StoredType::f32, std::numeric_limits<float>::infinity());
  error_with(StoredType::f32, uint32_t{0xffffffff});               // a NaN whose hi would be zero
  error_with(StoredType::f32, std::numeric_limits<float>::max());  // its hi overflows
}

TEST_F(LoadTest, RotaryBuffersAreIgnoredAndNoted) {
  TestTensors tensors = random_tensors(layout_, StoredType::bf16, 7);
  tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = {StoredType::f32, {4}, std::string(16, '\0')};
  save(file_, tensors);
  EXPECT_THAT(load_hf_checkpoint(dir_, state_, 2),
              testing::ElementsAre(HasSubstr("layers.0.self_attn.rotary_emb.inv_freq")));
  expect_loaded(state_, tensors);
}

TEST_F(LoadTest, AnyOtherExtraIsAnError) {
  TestTensors tensors = random_tensors(layout_, StoredType::bf16, 8);
  tensors["model.layers.0.mlp.experts.weight"] = {StoredType::f32, {1}, std::string(4, '\0')};
  EXPECT_THAT(load_error(tensors), AllOf(HasSubstr("model.layers.0.mlp.experts.weight"), HasSubstr(file_.string())));
}

TEST_F(LoadTest, ATiedHeadMustEqualTheEmbedding) {
  HostState tied(tiny_layout(true));
  TestTensors tensors = random_tensors(tied.layout(), StoredType::bf16, 9);
  ASSERT_FALSE(tensors.contains("lm_head.weight"));
  tensors["lm_head.weight"] = tensors.at("model.embed_tokens.weight");
  save(file_, tensors);
  EXPECT_THAT(load_hf_checkpoint(dir_, tied, 2), testing::ElementsAre(HasSubstr("lm_head.weight")));
  expect_loaded(tied, tensors);
  tensors["lm_head.weight"].data.back() ^= 1;
  save(file_, tensors);
  EXPECT_THAT(error_of([&] { load_hf_checkpoint(dir_, tied, 2); }),
              AllOf(HasSubstr("lm_head.weight differs"), HasSubstr("tie_word_embeddings")));
}

}  // namespace
}  // namespace slidedp
