// Export of the host state as a Hugging Face checkpoint.
#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <stdexcept>

#include "model/base/format.h"
#include "runtime/io/checkpoint_hf.h"
#include "runtime/io/safetensors.h"

namespace slidedp {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

std::string read_text(const fs::path& file) {
  std::ifstream in(file, std::ios::binary);
  std::string text((std::istreambuf_iterator<char>(in)), std::istreambuf_iterator<char>());
  if (!in.is_open() || in.bad()) failf("Cannot read {}: {}.", file.string(), std::strerror(errno));
  return text;
}

void write_text(FileSystem& files, const fs::path& file, const std::string& text) {
  const auto writer = files.create(file);
  writer->write(std::as_bytes(std::span(text)));
  writer->close();
}

// config.json as it is, but naming bf16 as the dtype where it names one (`torch_dtype`; `dtype` in newer versions).
std::string config_for_bf16(const fs::path& file) {
  const std::string text = read_text(file);
  Json config;
  try {
    config = Json::parse(text);
  } catch (const Json::exception& error) {
    failf("{} is not JSON: {}.", file.string(), error.what());
  }
  bool changed = false;
  for (const char* key : {"torch_dtype", "dtype"}) {
    if (!config.contains(key) || config[key] == "bfloat16") continue;
    config[key] = "bfloat16";
    changed = true;
  }
  return changed ? config.dump(2) + "\n" : text;
}

// Files besides config.json and the weights that make a checkpoint usable.
bool travels(const std::string& name) {
  if (name == "generation_config.json" || name == "special_tokens_map.json" || name == "added_tokens.json" ||
      name == "merges.txt") {
    return true;
  }
  for (const char* prefix : {"tokenizer", "vocab.", "chat_template"}) {
    if (name.starts_with(prefix)) return true;
  }
  const bool sentencepiece = name.starts_with("spiece") || name.starts_with("sentencepiece");
  return name.ends_with(".jinja") || (sentencepiece && name.ends_with(".model"));
}

// All tensors in layout order, cut into files of at most `max_bytes`. The data lies in the host state.
std::vector<std::vector<TensorToStore>> make_shards(HostState& state, int64_t max_bytes) {
  std::vector<std::vector<TensorToStore>> shards;
  int64_t bytes = 0;
  for (const UnitLayout& unit : state.layout().units) {
    const UnitState weights = state.unit(unit.unit);
    for (const TensorLayout& tensor : unit.tensors) {
      const auto data =
          std::as_bytes(weights.hi.subspan(static_cast<size_t>(tensor.offset), static_cast<size_t>(tensor.elements)));
      const auto size = static_cast<int64_t>(data.size());
      if (shards.empty() || bytes + size > max_bytes) {
        shards.emplace_back();
        bytes = 0;
      }
      shards.back().push_back({tensor.name, StoredType::bf16, tensor.shape, data});
      bytes += size;
    }
  }
  return shards;
}

void write_weights(FileSystem& files, HostState& state, const fs::path& target, int64_t max_shard_bytes) {
  const std::map<std::string, std::string> metadata{{"format", "pt"}};
  const auto shards = make_shards(state, max_shard_bytes);
  if (shards.size() == 1) {
    write_safetensors(files, target / "model.safetensors", shards.front(), metadata);
    return;
  }
  int64_t total = 0;
  std::map<std::string, std::string> weight_map;
  for (size_t i = 0; i < shards.size(); ++i) {
    const std::string name = fmt::format("model-{:05}-of-{:05}.safetensors", i + 1, shards.size());
    write_safetensors(files, target / name, shards[i], metadata);
    for (const TensorToStore& tensor : shards[i]) {
      weight_map[tensor.name] = name;
      total += static_cast<int64_t>(tensor.data.size());
    }
  }
  const Json index{{"metadata", {{"total_size", total}}}, {"weight_map", weight_map}};
  write_text(files, target / "model.safetensors.index.json", index.dump(2) + "\n");
}

// The name beside `dir`, for "a/b" as for "a/b/".
fs::path beside(const fs::path& dir, const char* suffix) {
  fs::path path = dir.has_filename() ? dir : dir.parent_path();
  path += suffix;
  return path;
}

// Puts the complete `partial` in `dir`'s place.
void put_in_place(FileSystem& files, const fs::path& partial, const fs::path& dir) {
  const fs::path replaced = replaced_directory(dir);
  if (!fs::exists(dir)) {
    files.rename(partial, dir);
    return;
  }
  files.remove_all(replaced);
  files.rename(dir, replaced);
  try {
    files.rename(partial, dir);
  } catch (const Error& error) {
    try {
      files.rename(replaced, dir);
    } catch (const Error& second) {
      failf("{} The previous export could not be moved back ({}); it is complete in {}.", error.what(), second.what(),
            replaced.string());
    }
    throw;
  }
  files.remove_all(replaced);
}

}  // namespace

fs::path partial_directory(const fs::path& dir) { return beside(dir, ".partial"); }
fs::path replaced_directory(const fs::path& dir) { return beside(dir, ".replaced"); }

ExportFiles read_export_files(const fs::path& source) {
  ExportFiles files{{"config.json", config_for_bf16(source / "config.json")}};
  for (const auto& entry : fs::directory_iterator(source)) {
    const std::string name = entry.path().filename();
    if (entry.is_regular_file() && travels(name)) files.try_emplace(name, read_text(entry.path()));
  }
  return files;
}

void export_hf_checkpoint(FileSystem& files, const ExportFiles& source, HostState& state, const fs::path& dir,
                          int64_t max_shard_bytes) {
  const fs::path target = beside(dir, ""), partial = partial_directory(dir), replaced = replaced_directory(dir);
  if (fs::exists(target) && !fs::is_directory(target)) failf("{} exists and is not a directory.", target.string());
  // Killed between the two renames of a replacement: the previous export goes back first.
  if (!fs::exists(target) && fs::exists(replaced)) files.rename(replaced, target);
  files.remove_all(partial);
  try {
    files.create_directory(partial);
    for (const auto& [name, text] : source) write_text(files, partial / name, text);
    write_weights(files, state, partial, max_shard_bytes);
    put_in_place(files, partial, target);
  } catch (const std::exception& error) {
    files.remove_all(partial);
    const auto* known = dynamic_cast<const Error*>(&error);
    throw Error(fmt::format("The export to {} failed: {}", target.string(), error.what()),
                known != nullptr ? known->code() : ExitCode::failure);
  }
}

}  // namespace slidedp
