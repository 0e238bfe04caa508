#include "runtime/io/checkpoint_hf.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstring>
#include <exception>
#include <fstream>
#include <map>
#include <memory>
#include <mutex>
#include <nlohmann/json.hpp>
#include <set>
#include <thread>

#include "model/base/format.h"
#include "runtime/io/safetensors.h"

namespace slidedp {
namespace {

namespace fs = std::filesystem;

constexpr const char* kSingleFile = "model.safetensors";
constexpr const char* kIndexFile = "model.safetensors.index.json";

struct Found {
  const StoredTensor* tensor = nullptr;
  const SafetensorsFile* file = nullptr;
};

// An opened checkpoint: its files, mapped, and where each tensor is.
struct Checkpoint {
  std::vector<std::unique_ptr<SafetensorsFile>> files;
  std::map<std::string, Found> tensors;

  void open(const fs::path& path) {
    const auto& file = files.emplace_back(std::make_unique<SafetensorsFile>(path));
    for (const StoredTensor& tensor : file->tensors()) {
      const auto [at, added] = tensors.try_emplace(tensor.name, Found{&tensor, file.get()});
      if (!added) {
        failf("Tensor {} is both in {} and in {}.", tensor.name, at->second.file->path().string(), path.string());
      }
    }
  }
};

// The index's weight_map: tensor name -> file name.
std::map<std::string, std::string> read_index(const fs::path& index) {
  std::ifstream in(index);
  std::map<std::string, std::string> weight_map;
  try {
    weight_map = nlohmann::json::parse(in).at("weight_map").get<std::map<std::string, std::string>>();
  } catch (const nlohmann::json::exception& error) {
    failf("{} is not an index of safetensors files: {}.", index.string(), error.what());
  }
  for (const auto& [tensor, file] : weight_map) {
    if (fs::path(file).filename() != file) {
      failf("{} places tensor {} in \"{}\", which is not a plain file name.", index.string(), tensor, file);
    }
  }
  return weight_map;
}

void open_shards(const fs::path& dir, Checkpoint& checkpoint) {
  const auto weight_map = read_index(dir / kIndexFile);
  std::set<std::string> names;
  for (const auto& [tensor, file] : weight_map) names.insert(file);
  for (const std::string& file : names) checkpoint.open(dir / file);
  for (const auto& [tensor, file] : weight_map) {
    const auto found = checkpoint.tensors.find(tensor);
    if (found == checkpoint.tensors.end() || found->second.file->path().filename() != file) {
      failf("{} places tensor {} in {}, but it is not there.", (dir / kIndexFile).string(), tensor, file);
    }
  }
}

Checkpoint open_checkpoint(const fs::path& dir) {
  Checkpoint checkpoint;
  if (fs::exists(dir / kSingleFile)) {
    checkpoint.open(dir / kSingleFile);
  } else if (fs::exists(dir / kIndexFile)) {
    open_shards(dir, checkpoint);
  } else if (!fs::exists(dir) && fs::exists(replaced_directory(dir))) {
    failf(
        "{} is not there: an export was interrupted while it replaced it. The previous one is complete in {}{}. Rename "
        "the one you want to {}.",
        dir.string(), replaced_directory(dir).string(),
        fs::exists(partial_directory(dir)) ? ", the new one in " + partial_directory(dir).string() : "", dir.string());
  } else {
    failf("{} has neither {} nor {}: convert the weights to safetensors first.", dir.string(), kSingleFile, kIndexFile);
  }
  return checkpoint;
}

// A piece of one tensor: what one thread converts at a time.
struct Piece {
  const StoredTensor* stored = nullptr;
  const SafetensorsFile* file = nullptr;
  int64_t begin = 0, elements = 0;  // inside the tensor
  uint16_t* hi = nullptr;
  uint16_t* lo = nullptr;
};

// Exact. The product of a (possibly subnormal) fp32 with half's exponent field in place and 2^112 moves the bias.
float half_to_float(uint16_t half) {
  const uint32_t magnitude = static_cast<uint32_t>(half & 0x7fffu) << 13;
  uint32_t bits = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) * 0x1p112f);
  if ((half & 0x7c00u) == 0x7c00u) bits = magnitude | 0x7f800000u;
  return std::bit_cast<float>(bits | static_cast<uint32_t>(half & 0x8000u) << 16);
}

// All three return whether every weight is finite, in the fp32 master and in hi.
template <typename Load>
bool convert_floats(std::span<uint16_t> hi, uint16_t* lo, Load load) {
  uint32_t infinite = 0;
  for (size_t i = 0; i < hi.size(); ++i) {
    const float master = load(i);
    const HiLo parts = split_master(master);
    hi[i] = parts.hi;
    lo[i] = parts.lo;
    infinite |= (std::bit_cast<uint32_t>(master) & 0x7f800000u) == 0x7f800000u || (parts.hi & 0x7f80u) == 0x7f80u;
  }
  return infinite == 0;
}

bool all_finite(std::span<const uint16_t> hi) {
  uint32_t infinite = 0;
  for (const uint16_t value : hi) infinite |= (value & 0x7f80u) == 0x7f80u;
  return infinite == 0;
}

// Reads elements [begin, begin + hi.size()) of the tensor. bf16 goes straight to where it stays.
bool read_part(const SafetensorsFile& file, const StoredTensor& stored, int64_t begin, std::span<uint16_t> hi,
               uint16_t* lo, std::vector<std::byte>& buffer) {
  const int64_t type_bytes = size_of(stored.type);
  if (stored.type == StoredType::bf16) {
    file.read(stored, begin * type_bytes, std::as_writable_bytes(hi));
    std::memset(lo, 0, hi.size_bytes());
    return all_finite(hi);
  }
  buffer.resize(hi.size() * static_cast<size_t>(type_bytes));
  file.read(stored, begin * type_bytes, buffer);
  const auto value = [&]<typename T>(size_t i, T number) {
    std::memcpy(&number, buffer.data() + i * sizeof(T), sizeof(T));
    return number;
  };
  if (stored.type == StoredType::f16) {
    return convert_floats(hi, lo, [&](size_t i) { return half_to_float(value(i, uint16_t{})); });
  }
  return convert_floats(hi, lo, [&](size_t i) { return value(i, float{}); });
}

// In parts that stay in the core's cache between reading and checking.
void convert(const Piece& piece) {
  constexpr int64_t kPart = int64_t{1} << 19;
  std::vector<std::byte> buffer;
  for (int64_t done = 0; done < piece.elements; done += kPart) {
    const int64_t elements = std::min(kPart, piece.elements - done);
    if (!read_part(*piece.file, *piece.stored, piece.begin + done, {piece.hi + done, static_cast<size_t>(elements)},
                   piece.lo + done, buffer)) {
      failf("{}: tensor {} has a weight that is not finite in bf16 (NaN, infinity or overflow).",
            piece.file->path().string(), piece.stored->name);
    }
  }
}

// Runs all pieces on `threads` threads; rethrows the first error after all have stopped.
void convert_all(const std::vector<Piece>& pieces, int threads) {
  std::atomic<size_t> next = 0;
  std::mutex mutex;
  std::exception_ptr error;
  const auto work = [&] {
    for (size_t i = next++; i < pieces.size(); i = next++) {
      try {
        convert(pieces[i]);
      } catch (...) {
        std::lock_guard lock(mutex);
        if (!error) error = std::current_exception();
        next = pieces.size();
      }
    }
  };
  {
    std::vector<std::jthread> helpers;
    for (int i = 1; i < threads; ++i) helpers.emplace_back(work);
    work();
  }
  if (error) std::rethrow_exception(error);
}

std::string text_of(const std::vector<int64_t>& shape) { return fmt::format("[{}]", fmt::join(shape, ", ")); }

void check_tensor(const Found& found, const TensorLayout& wanted) {
  const StoredTensor& stored = *found.tensor;
  if (stored.shape != wanted.shape) {
    failf("{}: tensor {} has the shape {}, but config.json implies {}.", found.file->path().string(), stored.name,
          text_of(stored.shape), text_of(wanted.shape));
  }
  if (stored.type != StoredType::bf16 && stored.type != StoredType::f16 && stored.type != StoredType::f32) {
    failf("{}: tensor {} has the dtype {}; SlideDP reads BF16, F16 and F32.", found.file->path().string(), stored.name,
          stored.type_name);
  }
}

[[noreturn]] void fail_missing(const fs::path& dir, const std::vector<std::string>& missing) {
  constexpr size_t kNamed = 5;
  const auto named = std::min(missing.size(), kNamed);
  failf("The checkpoint in {} lacks {} of the tensors that its config.json implies: {}{}.", dir.string(),
        missing.size(), fmt::join(missing.begin(), missing.begin() + static_cast<std::ptrdiff_t>(named), ", "),
        missing.size() > named ? ", ..." : "");
}

// Why a tensor that the model has no place for may be ignored; fails if it may not.
std::string accept_extra(const Found& extra, const Checkpoint& checkpoint, const ModelLayout& layout) {
  const StoredTensor& stored = *extra.tensor;
  const std::string file = extra.file->path().string();
  if (stored.name.ends_with("rotary_emb.inv_freq")) {
    return fmt::format("{}: ignored {} (rotary frequencies are computed from config.json).", file, stored.name);
  }
  if (layout.tied && stored.name == "lm_head.weight") {
    const std::string& embedding = layout.embedding().at(TensorRole::embedding).name;
    const StoredTensor& shared = *checkpoint.tensors.at(embedding).tensor;
    const bool equal = stored.type == shared.type && stored.shape == shared.shape &&
                       std::memcmp(stored.data.data(), shared.data.data(), shared.data.size()) == 0;
    if (equal) return fmt::format("{}: ignored lm_head.weight, equal to {} (tied).", file, embedding);
    failf(
        "{}: lm_head.weight differs from {}, but config.json ties them (tie_word_embeddings). Set it to false to train "
        "both, or remove lm_head.weight.",
        file, embedding);
  }
  failf("{}: tensor {} has no place in the model that config.json describes.", file, stored.name);
}

// The pieces of all tensors, checked; `used` gets their names.
std::vector<Piece> make_pieces(const fs::path& dir, const Checkpoint& checkpoint, HostState& state,
                               std::set<std::string>& used) {
  constexpr int64_t kPieceElements = int64_t{1} << 24;
  std::vector<Piece> pieces;
  std::vector<std::string> missing;
  for (const UnitLayout& unit : state.layout().units) {
    const UnitState target = state.unit(unit.unit);
    for (const TensorLayout& tensor : unit.tensors) {
      const auto found = checkpoint.tensors.find(tensor.name);
      if (found == checkpoint.tensors.end()) {
        missing.push_back(tensor.name);
        continue;
      }
      check_tensor(found->second, tensor);
      used.insert(tensor.name);
      for (int64_t begin = 0; begin < tensor.elements; begin += kPieceElements) {
        pieces.push_back({found->second.tensor, found->second.file, begin,
                          std::min(kPieceElements, tensor.elements - begin), target.hi.data() + tensor.offset + begin,
                          target.lo.data() + tensor.offset + begin});
      }
    }
  }
  if (!missing.empty()) fail_missing(dir, missing);
  return pieces;
}

}  // namespace

std::vector<std::string> load_hf_checkpoint(const fs::path& dir, HostState& state, int threads) {
  const Checkpoint checkpoint = open_checkpoint(dir);
  std::set<std::string> used;
  const std::vector<Piece> pieces = make_pieces(dir, checkpoint, state, used);
  std::vector<std::string> notes;
  for (const auto& [name, found] : checkpoint.tensors) {
    if (!used.contains(name)) notes.push_back(accept_extra(found, checkpoint, state.layout()));
  }
  convert_all(pieces, threads);
  return notes;
}

}  // namespace slidedp
