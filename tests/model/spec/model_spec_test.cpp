#include "model/spec/model_spec.h"

#include <set>
#include <utility>
#include <vector>

#include "tests/model/spec/support.h"

namespace slidedp {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::MatchesRegex;

// A config of `model_type` with small sizes and `extra` keys (text that starts with a comma, or nothing).
std::string config(const std::string& model_type, const std::string& extra = "") {
  const std::vector<std::pair<std::string, std::string>> classes{
      {"llama", "Llama"}, {"mistral", "Mistral"}, {"qwen2", "Qwen2"}, {"qwen3", "Qwen3"}};
  std::string prefix = "Unknown";
  for (const auto& [type, name] : classes) {
    if (type == model_type) prefix = name;
  }
  return "{\"model_type\": \"" + model_type + "\", \"architectures\": [\"" + prefix +
         "ForCausalLM\"], \"hidden_size\": 64, \"intermediate_size\": 96, \"num_hidden_layers\": 2, "
         "\"num_attention_heads\": 4, \"vocab_size\": 50, \"max_position_embeddings\": 128" +
         extra + "}";
}

const std::string kKv = ", \"num_key_value_heads\": 2";

class ModelSpecJson : public TempDir {
 protected:
  ModelSpec load(const std::string& text) { return load_model_spec(write("config.json", text)); }
  std::string refused(const std::string& text) {
    const std::string message = error_of([&] { load(text); });
    EXPECT_THAT(message, HasSubstr("config.json: "));
    return message;
  }
};

TEST_F(ModelSpecJson, Llama) {
  const ModelSpec spec = load(config("llama"));
  EXPECT_EQ(spec.family, ModelFamily::llama);
  EXPECT_EQ(spec.hidden, 64);
  EXPECT_EQ(spec.intermediate, 96);
  EXPECT_EQ(spec.layers, 2);
  EXPECT_EQ(spec.heads, 4);
  EXPECT_EQ(spec.kv_heads, 4);
  EXPECT_EQ(spec.head_dim, 16);
  EXPECT_EQ(spec.vocabulary, 50);
  EXPECT_EQ(spec.max_position, 128);
  EXPECT_EQ(spec.rms_eps, 1e-6);
  EXPECT_FALSE(spec.tied || spec.qkv_bias || spec.o_bias || spec.mlp_bias || spec.qk_norm);
  EXPECT_EQ(spec.rope, RopeSpec{});
}

TEST_F(ModelSpecJson, NullIsAbsentExceptWhereAbsentHasAClassDefault) {
  EXPECT_EQ(load(config("llama", ", \"head_dim\": null, \"num_key_value_heads\": null")).head_dim, 16);
  EXPECT_EQ(load(config("qwen3", ", \"head_dim\": 8" + kKv)).head_dim, 8);
  EXPECT_EQ(load(config("qwen3", kKv)).head_dim, 128);
  EXPECT_EQ(load(config("qwen3", ", \"head_dim\": null" + kKv)).head_dim, 16);
  EXPECT_EQ(load(config("qwen2", ", \"num_key_value_heads\": null")).kv_heads, 4);
  EXPECT_THAT(refused(config("qwen2")), HasSubstr("\"num_key_value_heads\" is 32"));
  EXPECT_THAT(refused(config("mistral", ", \"sliding_window\": null")), HasSubstr("\"num_key_value_heads\" is 8"));
  EXPECT_EQ(load(config("mistral", ", \"sliding_window\": null, \"num_key_value_heads\": null")).kv_heads, 4);
  EXPECT_EQ(load(config("llama", ", \"tie_word_embeddings\": null, \"rms_norm_eps\": null")).tied, false);
}

TEST_F(ModelSpecJson, BiasesOfEachFamily) {
  const ModelSpec llama = load(config("llama", ", \"attention_bias\": true, \"mlp_bias\": true"));
  EXPECT_TRUE(llama.qkv_bias && llama.o_bias && llama.mlp_bias);
  const ModelSpec qwen2 = load(config("qwen2", kKv));
  EXPECT_TRUE(qwen2.qkv_bias);
  EXPECT_FALSE(qwen2.o_bias || qwen2.mlp_bias || qwen2.qk_norm);
  const ModelSpec qwen3 = load(config("qwen3", kKv));
  EXPECT_TRUE(qwen3.qk_norm);
  EXPECT_FALSE(qwen3.qkv_bias || qwen3.o_bias || qwen3.mlp_bias);
  const ModelSpec biased = load(config("qwen3", kKv + ", \"attention_bias\": true"));
  EXPECT_TRUE(biased.qk_norm && biased.qkv_bias && biased.o_bias);
  const std::string mistral = ", \"sliding_window\": null" + kKv;
  EXPECT_FALSE(load(config("mistral", mistral)).qkv_bias);
  EXPECT_THAT(refused(config("mistral", mistral + ", \"attention_bias\": true")), HasSubstr("\"attention_bias\""));
  EXPECT_THAT(refused(config("qwen2", kKv + ", \"mlp_bias\": true")), HasSubstr("\"mlp_bias\" is true, but qwen2"));
}

TEST_F(ModelSpecJson, RopeInEveryPlace) {
  EXPECT_EQ(load(config("llama", ", \"rope_theta\": 500000")).rope.theta, 500000);
  EXPECT_EQ(load(config("llama", ", \"rope_scaling\": null, \"rope_theta\": 3e4")).rope.theta, 3e4);
  EXPECT_EQ(load(config("llama", R"(, "rope_parameters": {"rope_theta": 2e4, "rope_type": "default"})")).rope.theta,
            2e4);
  // Inside goes before top level; a non-empty rope_scaling goes before rope_parameters.
  EXPECT_EQ(load(config("llama", R"(, "rope_theta": 1, "rope_parameters": {"rope_theta": 2e4})")).rope.theta, 2e4);
  EXPECT_EQ(load(config("llama", R"(, "rope_scaling": {}, "rope_parameters": {"rope_theta": 2e4})")).rope.theta, 2e4);
  EXPECT_EQ(load(config("llama", R"(, "rope_scaling": {"rope_theta": 5}, "rope_parameters": {"rope_theta": 2e4})"))
                .rope.theta,
            5);
  EXPECT_EQ(load(config("llama", ", \"partial_rotary_factor\": 1.0")).rope, RopeSpec{});
}

TEST_F(ModelSpecJson, LinearRope) {
  RopeSpec wanted;
  wanted.kind = RopeKind::linear;
  wanted.theta = 7e4;
  wanted.factor = 4;
  for (const char* key : {"rope_type", "type"}) {
    EXPECT_EQ(load(config("llama", ", \"rope_theta\": 7e4, \"rope_scaling\": {\"" + std::string(key) +
                                       "\": \"linear\", \"factor\": 4}"))
                  .rope,
              wanted);
  }
  EXPECT_EQ(
      load(config("qwen3", kKv + R"(, "rope_parameters": {"rope_type": "linear", "factor": 4, "rope_theta": 7e4})"))
          .rope,
      wanted);
}

TEST_F(ModelSpecJson, Llama3Rope) {
  const std::string rope = R"("rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0)";
  RopeSpec wanted{RopeKind::llama3, 5e5, 8, 1, 4, 64};
  EXPECT_EQ(load(config("llama", ", \"rope_theta\": 5e5, \"rope_scaling\": {" + rope +
                                     ", \"original_max_position_embeddings\": 64}"))
                .rope,
            wanted);
  wanted.original_max_position = 128;  // max_position_embeddings where nothing says more
  EXPECT_EQ(load(config("llama", ", \"rope_theta\": 5e5, \"rope_scaling\": {" + rope + "}")).rope, wanted);
  wanted.original_max_position = 32;  // the top level wins
  EXPECT_EQ(
      load(config("llama", ", \"rope_theta\": 5e5, \"original_max_position_embeddings\": 32, \"rope_scaling\": {" +
                               rope + ", \"original_max_position_embeddings\": 64}"))
          .rope,
      wanted);
}

TEST_F(ModelSpecJson, RopeRefusals) {
  const auto scaling = [&](const std::string& text) { return refused(config("llama", ", \"rope_scaling\": " + text)); };
  for (const std::string type : {"yarn", "dynamic", "longrope", "proportional"}) {
    EXPECT_THAT(
        scaling("{\"rope_type\": \"" + type + "\", \"factor\": 2}"),
        AllOf(HasSubstr("\"rope_scaling.rope_type\" is \"" + type + "\""), HasSubstr("default, linear and llama3")));
  }
  EXPECT_THAT(scaling(R"({"type": "yarn"})"), HasSubstr("\"rope_scaling.type\" is \"yarn\""));
  EXPECT_THAT(scaling(R"({"rope_type": "linear"})"), HasSubstr("\"rope_scaling.factor\" is missing"));
  EXPECT_THAT(scaling(R"({"rope_type": "linear", "factor": 0})"), HasSubstr("must be a number above 0"));
  EXPECT_THAT(scaling(R"({"rope_type": "linear", "factor": "2"})"), HasSubstr("must be a number above 0"));
  EXPECT_THAT(scaling(R"({"rope_type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 4})"),
              HasSubstr("\"rope_scaling.high_freq_factor\" is 4, but must be greater"));
  EXPECT_THAT(scaling(R"({"rope_type": "llama3", "factor": 8, "high_freq_factor": 4})"),
              HasSubstr("\"rope_scaling.low_freq_factor\" is missing"));
  EXPECT_THAT(scaling("\"linear\""), HasSubstr("\"rope_scaling\" must be an object"));
  EXPECT_THAT(scaling(R"({"rope_type": 3})"), HasSubstr("must be a text"));
  EXPECT_THAT(scaling(R"({"rope_type": "linear", "factor": 2, "mrope_section": [1]})"),
              HasSubstr("\"rope_scaling.mrope_section\" is not supported"));
  EXPECT_THAT(scaling(R"({"rope_type": "default", "partial_rotary_factor": 0.5})"),
              HasSubstr("\"rope_scaling.partial_rotary_factor\" is not 1"));
  EXPECT_THAT(refused(config("llama", ", \"partial_rotary_factor\": 0.5")), HasSubstr("\"partial_rotary_factor\""));
  EXPECT_THAT(refused(config("llama", ", \"rope_theta\": -1")), HasSubstr("\"rope_theta\" is -1"));
  EXPECT_THAT(refused(config("llama", R"(, "rope_parameters": {"full_attention": {"rope_theta": 1}})")),
              HasSubstr("\"rope_parameters.full_attention\" is not supported"));
}

TEST_F(ModelSpecJson, SlidingWindows) {
  // Mistral: on unless null; the class default is 4096. A window that no sequence reaches is off.
  EXPECT_NO_THROW(load(config("mistral", ", \"sliding_window\": null" + kKv)));
  EXPECT_NO_THROW(load(config("mistral", ", \"sliding_window\": 128" + kKv)));
  EXPECT_NO_THROW(load(config("mistral", kKv))) << "4096 is beyond 128 positions";
  EXPECT_THAT(refused(config("mistral", ", \"sliding_window\": 127" + kKv)), HasSubstr("\"sliding_window\" is 127"));
  EXPECT_THAT(refused(replaced(config("mistral", kKv), "128", "8192")),
              AllOf(HasSubstr("\"sliding_window\" is 4096"), HasSubstr("key is absent")));
  EXPECT_THAT(refused(config("mistral", ", \"sliding_window\": \"on\"" + kKv)), HasSubstr("must be an integer"));
  // Qwen: needs use_sliding_window and reaches only layers from max_window_layers on.
  for (const std::string family : {"qwen2", "qwen3"}) {
    const std::string window = kKv + ", \"sliding_window\": 16";
    EXPECT_NO_THROW(load(config(family, window)));
    EXPECT_NO_THROW(load(config(family, window + ", \"use_sliding_window\": false, \"max_window_layers\": 0")));
    EXPECT_NO_THROW(load(config(family, window + ", \"use_sliding_window\": true, \"max_window_layers\": 2")));
    EXPECT_NO_THROW(load(config(family, window + ", \"use_sliding_window\": true"))) << "from layer 28 on";
    EXPECT_NO_THROW(load(config(family, window + R"(, "use_sliding_window": true, "max_window_layers": 0,
                                                    "layer_types": ["full_attention", "full_attention"])")));
    EXPECT_NO_THROW(load(
        config(family, kKv + ", \"sliding_window\": null, \"use_sliding_window\": true, \"max_window_layers\": 0")));
    EXPECT_NO_THROW(load(
        config(family, kKv + ", \"sliding_window\": 128, \"use_sliding_window\": true, \"max_window_layers\": 0")));
    EXPECT_THAT(refused(config(family, window + ", \"use_sliding_window\": true, \"max_window_layers\": 1")),
                HasSubstr("\"sliding_window\" is 16"));
  }
  EXPECT_THAT(refused(config("qwen3", kKv + R"(, "layer_types": ["full_attention", "sliding_attention"])")),
              AllOf(HasSubstr("\"layer_types\""), HasSubstr("sliding_attention")));
  EXPECT_NO_THROW(load(config("llama", ", \"sliding_window\": 16"))) << "Llama reads no such key";
}

TEST_F(ModelSpecJson, OtherArchitectures) {
  for (const std::string type : {"mixtral", "qwen3_moe", "gemma2", "gpt2"}) {
    EXPECT_THAT(refused(config(type)),
                AllOf(HasSubstr("\"model_type\" is \"" + type + "\""), HasSubstr("llama, mistral, qwen2, qwen3")));
  }
  EXPECT_THAT(refused("{\"hidden_size\": 3}"), HasSubstr("\"model_type\" is missing"));
  EXPECT_THAT(refused(replaced(config("llama"), "LlamaForCausalLM", "LlamaForSequenceClassification")),
              AllOf(HasSubstr("\"architectures\""), HasSubstr("LlamaForCausalLM")));
  EXPECT_NO_THROW(load(replaced(config("llama"), "\"architectures\": [\"LlamaForCausalLM\"], ", "")));
}

TEST_F(ModelSpecJson, MixtureOfExperts) {
  for (const std::string key : {"num_experts", "num_local_experts", "n_routed_experts", "moe_intermediate_size"}) {
    EXPECT_THAT(refused(config("llama", ", \"" + key + "\": 8")),
                AllOf(HasSubstr("\"" + key + "\" is 8"), HasSubstr("mixture-of-experts")));
    EXPECT_NO_THROW(load(config("llama", ", \"" + key + "\": null")));
    EXPECT_NO_THROW(load(config("llama", ", \"" + key + "\": 0")));
  }
}

TEST_F(ModelSpecJson, QuantisedWeights) {
  EXPECT_THAT(refused(config("llama", R"(, "quantization_config": {"quant_method": "gptq"})")),
              AllOf(HasSubstr("\"quantization_config\""), HasSubstr("quantised")));
  EXPECT_NO_THROW(load(config("llama", ", \"quantization_config\": null")));
}

TEST_F(ModelSpecJson, Dropout) {
  for (const std::string key : {"attention_dropout", "hidden_dropout", "resid_pdrop", "layerdrop"}) {
    EXPECT_THAT(refused(config("llama", ", \"" + key + "\": 0.1")),
                AllOf(HasSubstr("\"" + key + "\" is 0.1"), HasSubstr("dropout is not supported")));
    EXPECT_NO_THROW(load(config("llama", ", \"" + key + "\": 0.0")));
    EXPECT_NO_THROW(load(config("llama", ", \"" + key + "\": null")));
  }
}

TEST_F(ModelSpecJson, OtherFeatures) {
  EXPECT_THAT(refused(config("llama", ", \"hidden_act\": \"gelu\"")), HasSubstr("\"hidden_act\" is \"gelu\""));
  EXPECT_NO_THROW(load(config("llama", ", \"hidden_act\": \"silu\"")));
  EXPECT_NO_THROW(load(config("llama", ", \"hidden_act\": \"swish\"")));  // transformers' other name of silu
  EXPECT_THAT(refused(config("llama", R"(, "per_layer_config": {"0": {"intermediate_size": 8}})")),
              HasSubstr("\"per_layer_config\""));
}

TEST_F(ModelSpecJson, SizesThatDoNotFit) {
  EXPECT_THAT(refused(config("llama", ", \"num_key_value_heads\": 3")),
              HasSubstr("does not divide num_attention_heads"));
  EXPECT_THAT(refused(config("llama", ", \"head_dim\": 15")), HasSubstr("\"head_dim\" is 15"));
  EXPECT_THAT(refused(replaced(config("llama"), "\"num_attention_heads\": 4", "\"num_attention_heads\": 5")),
              HasSubstr("does not divide hidden_size, 64"));
  EXPECT_EQ(
      load(replaced(config("llama", ", \"head_dim\": 16"), "\"num_attention_heads\": 4", "\"num_attention_heads\": 5"))
          .head_dim,
      16);
}

TEST_F(ModelSpecJson, SizesWhoseProductsWouldOverflow) {
  std::string text = replaced(config("llama"), "\"hidden_size\": 64", "\"hidden_size\": 2147483640");
  text = replaced(text, "\"intermediate_size\": 96", "\"intermediate_size\": 2147483647");
  EXPECT_THAT(refused(text), AllOf(HasSubstr("\"hidden_size\""), HasSubstr("parameters; at most 1e+15")));
}

TEST_F(ModelSpecJson, MissingAndIllTypedKeys) {
  for (const std::string pair :
       {"\"hidden_size\": 64", "\"intermediate_size\": 96", "\"num_hidden_layers\": 2", "\"num_attention_heads\": 4",
        "\"vocab_size\": 50", "\"max_position_embeddings\": 128"}) {
    const std::string key = pair.substr(0, pair.find(':'));
    EXPECT_THAT(refused(replaced(config("llama"), pair, "\"x\": 1")), HasSubstr("key " + key + " is missing"));
    for (const std::string value : {"0", "-1", "1.5", "\"64\"", "true", "[1]", "3000000000", "18446744073709551615"}) {
      EXPECT_THAT(refused(replaced(config("llama"), pair, key + ": " + value)),
                  AllOf(HasSubstr("key " + key + " is " + value), HasSubstr("must be an integer from 1")));
    }
  }
  EXPECT_THAT(refused(replaced(config("llama"), "\"num_hidden_layers\": 2", "\"num_hidden_layers\": 65537")),
              HasSubstr("from 1 to 65536"));
  EXPECT_THAT(refused(config("llama", ", \"tie_word_embeddings\": 1")), HasSubstr("must be true or false"));
  EXPECT_THAT(refused(config("llama", ", \"rms_norm_eps\": 0")), HasSubstr("must be a number above 0"));
  EXPECT_THAT(refused(config("llama", ", \"rms_norm_eps\": \"small\"")), HasSubstr("must be a number above 0"));
  EXPECT_THAT(refused(config("llama", ", \"hidden_act\": 1")), HasSubstr("must be a text"));
}

TEST_F(ModelSpecJson, NotAConfig) {
  EXPECT_THAT(refused("{\n\"model_type\": llama}"), AllOf(HasSubstr("not valid JSON"), HasSubstr("line 2")));
  EXPECT_THAT(refused("[1]"), HasSubstr("must hold a JSON object"));
  EXPECT_THAT(error_of([&] { load_model_spec(dir / "absent"); }), AllOf(HasSubstr("absent"), HasSubstr("cannot open")));
  std::filesystem::remove(dir / "config.json");
  EXPECT_THAT(error_of([&] { load_model_spec(dir); }), HasSubstr("config.json: cannot open"));
}

TEST_F(ModelSpecJson, NamesComeFromTheDirectoryOrTheFile) {
  const std::filesystem::path model = dir / "My-Model";
  std::filesystem::create_directory(model);
  std::ofstream(model / "config.json") << config("llama");
  EXPECT_EQ(load_model_spec(model).name, "My-Model");
  EXPECT_EQ(load_model_spec(model.string() + "/").name, "My-Model");
  EXPECT_EQ(load_model_spec(model / "config.json").name, "My-Model");
  EXPECT_EQ(load_model_spec(write("Tiny-1.5B.json", config("llama"))).name, "Tiny-1.5B");
}

TEST_F(ModelSpecJson, FingerprintDiffersInEveryFieldButTheName) {
  ModelSpec spec = load(config("llama"));
  EXPECT_THAT(spec.fingerprint(), MatchesRegex("llama-2x64-[0-9a-f]{8}"));
  std::set<std::string> prints{spec.fingerprint()};
  spec.name = "another";
  EXPECT_TRUE(prints.contains(spec.fingerprint()));
  size_t changes = 0;
  const auto changed = [&](auto change) {
    ModelSpec other = spec;
    change(other);
    prints.insert(other.fingerprint());
    ++changes;
  };
  changed([](ModelSpec& s) { s.family = ModelFamily::mistral; });
  changed([](ModelSpec& s) { s.hidden += 1; });
  changed([](ModelSpec& s) { s.intermediate += 1; });
  changed([](ModelSpec& s) { s.layers += 1; });
  changed([](ModelSpec& s) { s.heads += 1; });
  changed([](ModelSpec& s) { s.kv_heads += 1; });
  changed([](ModelSpec& s) { s.head_dim += 1; });
  changed([](ModelSpec& s) { s.vocabulary += 1; });
  changed([](ModelSpec& s) { s.max_position += 1; });
  changed([](ModelSpec& s) { s.rms_eps = 1.0000000000000002e-6; });
  changed([](ModelSpec& s) { s.tied = true; });
  changed([](ModelSpec& s) { s.qkv_bias = true; });
  changed([](ModelSpec& s) { s.o_bias = true; });
  changed([](ModelSpec& s) { s.mlp_bias = true; });
  changed([](ModelSpec& s) { s.qk_norm = true; });
  changed([](ModelSpec& s) { s.rope.kind = RopeKind::linear; });
  changed([](ModelSpec& s) { s.rope.theta += 1; });
  changed([](ModelSpec& s) { s.rope.factor += 1; });
  changed([](ModelSpec& s) { s.rope.low_freq_factor += 1; });
  changed([](ModelSpec& s) { s.rope.high_freq_factor += 1; });
  changed([](ModelSpec& s) { s.rope.original_max_position += 1; });
  EXPECT_EQ(prints.size(), changes + 1);
}

TEST(ModelFamilyNames, AreTheModelTypes) {
  EXPECT_EQ(name(ModelFamily::llama), "llama");
  EXPECT_EQ(name(ModelFamily::mistral), "mistral");
  EXPECT_EQ(name(ModelFamily::qwen2), "qwen2");
  EXPECT_EQ(name(ModelFamily::qwen3), "qwen3");
}

}  // namespace
}  // namespace slidedp
