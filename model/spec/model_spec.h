// What a decoder-only transformer looks like, read from a Hugging Face config.json.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>

namespace slidedp {

enum class ModelFamily : uint8_t { llama, mistral, qwen2, qwen3 };
std::string_view name(ModelFamily);

enum class RopeKind : uint8_t { standard, linear, llama3 };

// Rotary position embedding. Source: transformers' modeling_rope_utils (default, linear, llama3).
struct RopeSpec {
  RopeKind kind = RopeKind::standard;
  double theta = 10000.0;
  double factor = 1.0;                // linear, llama3
  double low_freq_factor = 1.0;       // llama3
  double high_freq_factor = 1.0;      // llama3
  int64_t original_max_position = 0;  // llama3
  bool operator==(const RopeSpec&) const = default;
};

struct ModelSpec {
  std::string name;  // the directory's or file's name, for messages only; not part of fingerprint()
  ModelFamily family = ModelFamily::llama;
  int64_t hidden = 0;
  int64_t intermediate = 0;
  int64_t layers = 0;
  int64_t heads = 0;
  int64_t kv_heads = 0;
  int64_t head_dim = 0;
  int64_t vocabulary = 0;
  int64_t max_position = 0;  // max_position_embeddings, tokens
  double rms_eps = 1e-6;
  bool tied = false;  // lm_head shares the embedding matrix
  bool qkv_bias = false;
  bool o_bias = false;
  bool mlp_bias = false;
  bool qk_norm = false;
  RopeSpec rope;

  // Exact number of trainable parameters (a tied matrix counts once).
  int64_t parameters() const;
  // Short text that identifies the architecture (every field but `name`), e.g. "llama-30x576-3f2a91bc". A plan
  // carries it; slidedp-run refuses a plan whose fingerprint differs from the checkpoint's.
  std::string fingerprint() const;
};

// Reads DIR/config.json or the file itself. Throws Error that names the file and the key for anything SlideDP does not
// train: other architectures, MoE, an active sliding window, activations but silu, quantised weights, dropout > 0,
// unknown rope types, missing or ill-typed keys.
ModelSpec load_model_spec(const std::filesystem::path& dir_or_file);
// The same of a config.json's text; errors name `source`.
ModelSpec parse_model_spec(const std::string& config, const std::string& source);

}  // namespace slidedp
