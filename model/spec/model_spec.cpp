#include "model/spec/model_spec.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <fstream>
#include <iterator>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <stdexcept>
#include <vector>

#include "model/base/format.h"

namespace slidedp {
namespace {

using nlohmann::json;

constexpr int64_t kMaxSize = std::numeric_limits<int32_t>::max();  // of any dimension; products of two fit 64 bits
constexpr int64_t kMaxLayers = 65536;
constexpr double kMaxParameters = 1e15;  // keeps every count of elements and bytes inside 64 bits

// What a key means to transformers 5.24 when config.json lacks it: the class defaults in its
// models/*/configuration_*.py. tie_word_embeddings is false, rms_norm_eps 1e-6, hidden_act silu and rope_theta 10000
// (RotaryEmbeddingConfigMixin.default_theta) in all four.
struct Family {
  ModelFamily family;
  std::string_view model_type;
  std::string_view architecture;
  std::optional<int64_t> kv_heads;        // nothing: as many as heads
  std::optional<int64_t> head_dim;        // nothing: hidden / heads
  std::optional<int64_t> sliding_window;  // nothing: full attention
};
constexpr std::array<Family, 4> kFamilies{{
    {ModelFamily::llama, "llama", "LlamaForCausalLM", {}, {}, {}},
    {ModelFamily::mistral, "mistral", "MistralForCausalLM", 8, {}, 4096},
    {ModelFamily::qwen2, "qwen2", "Qwen2ForCausalLM", 32, {}, 4096},
    {ModelFamily::qwen3, "qwen3", "Qwen3ForCausalLM", 32, 128, 4096},
}};

// One JSON object of the config; every message names the file and the key.
class Config {
 public:
  Config(const json& object, std::string file, std::string prefix = "")
      : object_(object), file_(std::move(file)), prefix_(std::move(prefix)) {}

  const json& object() const { return object_; }
  const std::string& file() const { return file_; }
  bool has(const char* key) const { return object_.contains(key); }
  bool is_set(const char* key) const { return find(key) != nullptr; }
  // The value, or nullptr where the key is absent or null.
  const json* find(const char* key) const {
    const auto found = object_.find(key);
    return found == object_.end() || found->is_null() ? nullptr : &*found;
  }
  [[noreturn]] void refuse(const std::string& key, const std::string& problem) const {
    failf("{}: key \"{}{}\" {}", file_, prefix_, key, problem);
  }

  int64_t size(const char* key, int64_t most = kMaxSize) const { return as_size(key, required(key), most); }
  int64_t size_or(const char* key, int64_t missing) const {
    const json* value = find(key);
    return value == nullptr ? missing : as_size(key, *value, kMaxSize);
  }
  // A finite number above 0.
  double positive(const char* key) const { return as_positive(key, required(key)); }
  double positive_or(const char* key, double missing) const {
    const json* value = find(key);
    return value == nullptr ? missing : as_positive(key, *value);
  }
  bool flag(const char* key) const {  // false where missing
    const json* value = find(key);
    if (value != nullptr && !value->is_boolean())
      refuse(key, fmt::format("is {}, but must be true or false", show(*value)));
    return value != nullptr && value->get<bool>();
  }
  std::string text_or(const char* key, const char* missing) const {
    const json* value = find(key);
    if (value != nullptr && !value->is_string()) refuse(key, fmt::format("is {}, but must be a text", show(*value)));
    return value == nullptr ? missing : value->get<std::string>();
  }
  static std::string show(const json& value) { return value.dump(-1, ' ', false, json::error_handler_t::replace); }

 private:
  const json& required(const char* key) const {
    const json* value = find(key);
    if (value == nullptr) refuse(key, "is missing");
    return *value;
  }
  int64_t as_size(const char* key, const json& value, int64_t most) const {
    const bool fits = value.is_number_integer() && (!value.is_number_unsigned() || value.get<uint64_t>() <= kMaxSize);
    if (!fits || value.get<int64_t>() < 1 || value.get<int64_t>() > most) {
      refuse(key, fmt::format("is {}, but must be an integer from 1 to {}", show(value), most));
    }
    return value.get<int64_t>();
  }
  double as_positive(const char* key, const json& value) const {
    if (!value.is_number() || !std::isfinite(value.get<double>()) || value.get<double>() <= 0) {
      refuse(key, fmt::format("is {}, but must be a number above 0", show(value)));
    }
    return value.get<double>();
  }

  const json& object_;
  std::string file_, prefix_;
};

std::string read_file(const std::filesystem::path& file) {
  std::ifstream stream(file);
  std::error_code ignored;
  if (!stream || std::filesystem::is_directory(file, ignored)) {
    failf("{}: cannot open this file; give a model directory with a config.json, or the config.json itself",
          file.string());
  }
  return {std::istreambuf_iterator<char>(stream), {}};
}

json parse_json(const std::string& text, const std::string& source) {
  try {
    json root = json::parse(text);
    if (!root.is_object()) failf("{}: must hold a JSON object", source);
    return root;
  } catch (const json::parse_error& error) {
    const std::string message = error.what();  // "[json.exception.parse_error.101] parse error at line 1, ..."
    const size_t end = message.find("] ");
    failf("{}: not valid JSON: {}", source, end == std::string::npos ? message : message.substr(end + 2));
  }
}

const Family& find_family(const Config& config) {
  std::vector<std::string_view> known;
  for (const Family& family : kFamilies) known.push_back(family.model_type);
  if (!config.is_set("model_type")) {
    config.refuse("model_type", fmt::format("is missing; SlideDP trains {}", fmt::join(known, ", ")));
  }
  const std::string type = config.text_or("model_type", "");
  for (const Family& family : kFamilies) {
    if (family.model_type != type) continue;
    const json* architectures = config.find("architectures");
    if (architectures != nullptr && *architectures != json::array({std::string(family.architecture)})) {
      config.refuse("architectures", fmt::format("is {}, but SlideDP trains only [\"{}\"] of model_type {}",
                                                 Config::show(*architectures), family.architecture, type));
    }
    return family;
  }
  config.refuse("model_type", fmt::format("is \"{}\", but SlideDP trains only {}", type, fmt::join(known, ", ")));
}

// null, false, 0 and empty lists or objects leave a feature off.
bool switches_on(const json& value) {
  if (value.is_boolean()) return value.get<bool>();
  if (value.is_number()) return value.get<double>() != 0;
  return !value.empty();
}

// Features that change the mathematics and that no field of ModelSpec can say.
void refuse_features(const Config& config) {
  for (const auto& [key, value] : config.object().items()) {
    if (!switches_on(value)) continue;
    const auto contains = [&key = key](const char* part) { return key.find(part) != std::string::npos; };
    if (key == "quantization_config" || key == "compression_config") {
      config.refuse(key, "says that the weights are quantised; SlideDP trains bf16, fp16 or fp32 checkpoints");
    }
    if (contains("expert") || key.rfind("moe", 0) == 0) {
      config.refuse(key, fmt::format("is {}: mixture-of-experts models are not supported", Config::show(value)));
    }
    if (contains("dropout") || contains("pdrop") || contains("layerdrop")) {
      config.refuse(key, fmt::format("is {}: dropout is not supported; set it to 0", Config::show(value)));
    }
    if (key == "per_layer_config") config.refuse(key, "makes layers differ, which is not supported");
  }
  const std::string activation = config.text_or("hidden_act", "silu");
  if (activation != "silu" && activation != "swish") {
    config.refuse("hidden_act", fmt::format("is \"{}\", but only silu is supported", activation));
  }
}

// A window as long as the longest sequence hides nothing. Llama has no window, whatever its config says. Mistral has
// one unless it is null; Qwen's needs use_sliding_window and starts at layer max_window_layers.
void refuse_sliding_window(const Config& config, const Family& family, const ModelSpec& spec) {
  if (const json* types = config.find("layer_types")) {
    if (!types->is_array()) config.refuse("layer_types", "must be a list");
    for (const json& type : *types) {
      if (type != "full_attention") {
        config.refuse("layer_types", fmt::format("has {}, but only full_attention is supported", Config::show(type)));
      }
    }
  }
  const bool is_null = config.has("sliding_window") && !config.is_set("sliding_window");
  if (!family.sliding_window || is_null) return;
  if (family.family != ModelFamily::mistral) {
    const bool layers_say_full = config.is_set("layer_types");
    const json* from = config.find("max_window_layers");
    if (from != nullptr && !from->is_number_integer()) config.refuse("max_window_layers", "must be an integer");
    const int64_t first = from == nullptr ? 28 : from->get<int64_t>();
    if (!config.flag("use_sliding_window") || layers_say_full || first >= spec.layers) return;
  }
  const int64_t window = config.size_or("sliding_window", *family.sliding_window);
  if (window >= spec.max_position) return;
  config.refuse("sliding_window",
                fmt::format("is {}, less than max_position_embeddings, {}: sliding-window attention is not supported",
                            window, spec.max_position) +
                    (config.has("sliding_window") ? "" : " (the key is absent, and transformers' default is 4096)"));
}

void refuse_unknown_rope_keys(const Config& rope) {
  constexpr std::array known{"rope_type",
                             "type",
                             "rope_theta",
                             "factor",
                             "low_freq_factor",
                             "high_freq_factor",
                             "original_max_position_embeddings",
                             "partial_rotary_factor"};
  for (const auto& [key, value] : rope.object().items()) {
    if (value.is_null() || std::find(known.begin(), known.end(), key) != known.end()) continue;
    rope.refuse(key, "is not supported");
  }
}

void refuse_partial_rotary(const Config& config) {
  if (config.positive_or("partial_rotary_factor", 1.0) != 1.0) {
    config.refuse("partial_rotary_factor", "is not 1: rotating a part of each head is not supported");
  }
}

// transformers 5 (modeling_rope_utils.py, convert_rope_params_to_dict): a non-empty rope_scaling replaces
// rope_parameters; rope_theta inside it goes before the one at top level. "type" is the old name of "rope_type".
RopeSpec read_rope(const Config& config, int64_t max_position) {
  RopeSpec spec;
  spec.theta = config.positive_or("rope_theta", spec.theta);
  refuse_partial_rotary(config);
  const auto non_empty = [&](const char* key) {
    const json* value = config.find(key);
    if (value != nullptr && !value->is_object()) config.refuse(key, "must be an object or null");
    return value != nullptr && !value->empty() ? value : nullptr;
  };
  const json* scaling = non_empty("rope_scaling");
  const json* parameters = scaling != nullptr ? scaling : non_empty("rope_parameters");
  if (parameters == nullptr) return spec;

  const Config rope(*parameters, config.file(), scaling != nullptr ? "rope_scaling." : "rope_parameters.");
  const char* type_key = rope.is_set("rope_type") ? "rope_type" : "type";
  const std::string type = rope.text_or(type_key, "default");
  if (type != "default" && type != "linear" && type != "llama3") {
    rope.refuse(type_key, fmt::format("is \"{}\", but only default, linear and llama3 are supported", type));
  }
  refuse_unknown_rope_keys(rope);
  refuse_partial_rotary(rope);
  spec.theta = rope.positive_or("rope_theta", spec.theta);
  if (type == "default") return spec;

  spec.kind = type == "linear" ? RopeKind::linear : RopeKind::llama3;
  spec.factor = rope.positive("factor");
  if (spec.kind == RopeKind::linear) return spec;
  spec.low_freq_factor = rope.positive("low_freq_factor");
  spec.high_freq_factor = rope.positive("high_freq_factor");
  if (spec.high_freq_factor <= spec.low_freq_factor) {
    rope.refuse("high_freq_factor", fmt::format("is {}, but must be greater than low_freq_factor, {}",
                                                spec.high_freq_factor, spec.low_freq_factor));
  }
  // standardize_rope_params: the top-level key wins, then the one inside, then max_position_embeddings.
  spec.original_max_position = config.size_or("original_max_position_embeddings",
                                              rope.size_or("original_max_position_embeddings", max_position));
  return spec;
}

// Absent and null differ: absent is the class's default, null is "as many as heads" or "hidden / heads".
void read_heads(const Config& config, const Family& family, ModelSpec& spec) {
  spec.heads = config.size("num_attention_heads");
  const int64_t kv_absent = family.kv_heads.value_or(spec.heads);
  spec.kv_heads = config.size_or("num_key_value_heads", config.has("num_key_value_heads") ? spec.heads : kv_absent);
  if (spec.heads % spec.kv_heads != 0) {
    config.refuse("num_key_value_heads",
                  fmt::format("is {}, which does not divide num_attention_heads, {}", spec.kv_heads, spec.heads));
  }
  if (config.is_set("head_dim")) {
    spec.head_dim = config.size("head_dim");
  } else if (family.head_dim && !config.has("head_dim")) {
    spec.head_dim = *family.head_dim;
  } else if (spec.hidden % spec.heads == 0) {
    spec.head_dim = spec.hidden / spec.heads;
  } else {
    config.refuse("num_attention_heads",
                  fmt::format("is {}, which does not divide hidden_size, {}; add head_dim", spec.heads, spec.hidden));
  }
  if (spec.head_dim % 2 != 0) {
    config.refuse("head_dim", fmt::format("is {}, but rotary embedding needs an even number", spec.head_dim));
  }
}

// Which biases exist: transformers' modeling_*.py.
void read_biases(const Config& config, ModelSpec& spec) {
  const bool attention_bias = config.flag("attention_bias");
  const bool mlp_bias = config.flag("mlp_bias");
  const bool is_llama = spec.family == ModelFamily::llama;
  if (mlp_bias && !is_llama) config.refuse("mlp_bias", fmt::format("is true, but {} has none", name(spec.family)));
  spec.mlp_bias = mlp_bias;
  if (spec.family == ModelFamily::qwen2) {
    spec.qkv_bias = true;  // always, and never on the output; attention_bias is not read
    return;
  }
  if (attention_bias && spec.family == ModelFamily::mistral) {
    config.refuse("attention_bias", "is true, but mistral has no biases");
  }
  spec.qkv_bias = spec.o_bias = attention_bias;
}

void refuse_absurd_size(const Config& config, const ModelSpec& spec) {
  const auto hidden = static_cast<double>(spec.hidden), layers = static_cast<double>(spec.layers);
  const double attention = 2.0 * static_cast<double>(spec.heads + spec.kv_heads) * static_cast<double>(spec.head_dim);
  const double matrices = layers * (attention + 3.0 * static_cast<double>(spec.intermediate)) * hidden +
                          2.0 * static_cast<double>(spec.vocabulary) * hidden;
  if (matrices > kMaxParameters) {
    config.refuse("hidden_size", fmt::format("and the other sizes make {:.1e} parameters; at most {:.0e} are supported",
                                             matrices, kMaxParameters));
  }
}

std::string display_name(const std::filesystem::path& file) {
  const std::filesystem::path absolute = std::filesystem::absolute(file).lexically_normal();
  return (absolute.filename() == "config.json" ? absolute.parent_path().filename() : absolute.stem()).string();
}

std::string_view rope_name(RopeKind kind) {
  switch (kind) {
    case RopeKind::standard:
      return "default";
    case RopeKind::linear:
      return "linear";
    case RopeKind::llama3:
      return "llama3";
  }
  throw std::logic_error("unknown RopeKind");
}

uint32_t fnv1a(std::string_view text) {
  uint32_t hash = 2166136261u;
  for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 16777619u;
  return hash;
}

}  // namespace

std::string_view name(ModelFamily family) {
  for (const Family& entry : kFamilies) {
    if (entry.family == family) return entry.model_type;
  }
  throw std::logic_error("unknown ModelFamily");
}

int64_t ModelSpec::parameters() const {
  const int64_t q = heads * head_dim;
  const int64_t kv = kv_heads * head_dim;
  int64_t layer = 2 * hidden                    // norms
                  + 2 * hidden * (q + kv)       // q, o; k, v
                  + 3 * hidden * intermediate;  // gate, up, down
  if (qkv_bias) layer += q + 2 * kv;
  if (o_bias) layer += hidden;
  if (qk_norm) layer += 2 * head_dim;
  if (mlp_bias) layer += 2 * intermediate + hidden;
  return layers * layer + hidden + (tied ? 1 : 2) * vocabulary * hidden;
}

std::string ModelSpec::fingerprint() const {
  const std::string everything = fmt::format(
      "{} hidden={} intermediate={} layers={} heads={} kv_heads={} head_dim={} vocabulary={} max_position={} "
      "rms_eps={} "
      "tied={} qkv_bias={} o_bias={} mlp_bias={} qk_norm={} rope={} theta={} factor={} low={} high={} original={}",
      slidedp::name(family), hidden, intermediate, layers, heads, kv_heads, head_dim, vocabulary, max_position, rms_eps,
      tied, qkv_bias, o_bias, mlp_bias, qk_norm, rope_name(rope.kind), rope.theta, rope.factor, rope.low_freq_factor,
      rope.high_freq_factor, rope.original_max_position);
  return fmt::format("{}-{}x{}-{:08x}", slidedp::name(family), layers, hidden, fnv1a(everything));
}

ModelSpec load_model_spec(const std::filesystem::path& dir_or_file) {
  std::error_code ignored;
  const bool is_directory = std::filesystem::is_directory(dir_or_file, ignored);
  const std::filesystem::path file = is_directory ? dir_or_file / "config.json" : dir_or_file;
  ModelSpec spec = parse_model_spec(read_file(file), file.string());
  spec.name = display_name(file);
  return spec;
}

ModelSpec parse_model_spec(const std::string& text, const std::string& source) {
  const json root = parse_json(text, source);
  const Config config(root, source);
  const Family& family = find_family(config);
  refuse_features(config);

  ModelSpec spec;
  spec.name = source;
  spec.family = family.family;
  spec.hidden = config.size("hidden_size");
  spec.intermediate = config.size("intermediate_size");
  spec.layers = config.size("num_hidden_layers", kMaxLayers);
  spec.vocabulary = config.size("vocab_size");
  spec.max_position = config.size("max_position_embeddings");
  spec.rms_eps = config.positive_or("rms_norm_eps", 1e-6);
  spec.tied = config.flag("tie_word_embeddings");
  spec.qk_norm = family.family == ModelFamily::qwen3;
  read_heads(config, family, spec);
  refuse_absurd_size(config, spec);
  read_biases(config, spec);
  spec.rope = read_rope(config, spec.max_position);
  refuse_sliding_window(config, family, spec);
  return spec;
}

}  // namespace slidedp
