// A tiny model, folders that clean up after themselves, and a file system that fails on demand.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "model/base/error.h"
#include "model/spec/layout.h"
#include "runtime/host/host_state.h"
#include "runtime/io/file_system.h"
#include "runtime/io/safetensors.h"

namespace slidedp {

namespace fs = std::filesystem;

class TemporaryFolder {
 public:
  TemporaryFolder() {
    std::string pattern = (fs::path(testing::TempDir()) / "slidedp_io_XXXXXX").string();
    if (mkdtemp(pattern.data()) == nullptr) throw std::runtime_error("no temporary folder");
    path_ = pattern;
  }
  ~TemporaryFolder() { fs::remove_all(path_); }
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;
  fs::path operator/(const std::string& name) const { return path_ / name; }
  const fs::path& path() const { return path_; }

 private:
  fs::path path_;
};

inline void write_file(const fs::path& file, const std::string& text) {
  fs::create_directories(file.parent_path());
  std::ofstream(file, std::ios::binary) << text;
}

inline std::string read_file(const fs::path& file) {
  std::ifstream in(file, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()};
}

// Relative path -> content of every file below a folder.
inline std::map<std::string, std::string> snapshot(const fs::path& folder) {
  std::map<std::string, std::string> files;
  for (const auto& entry : fs::recursive_directory_iterator(folder)) {
    if (entry.is_regular_file()) files[fs::relative(entry.path(), folder)] = read_file(entry.path());
  }
  return files;
}

inline ModelLayout tiny_layout(bool tied) {
  ModelSpec model;
  model.family = ModelFamily::qwen3;
  model.hidden = 24;
  model.intermediate = 40;
  model.layers = 2;
  model.heads = 4;
  model.kv_heads = 2;
  model.head_dim = 8;
  model.vocabulary = 50;
  model.max_position = 64;
  model.qk_norm = true;
  model.tied = tied;
  return make_layout(model);
}

// Calls visit(unit state, tensor) for every tensor.
template <typename Visit>
void for_each_tensor(HostState& state, Visit visit) {
  for (const UnitLayout& unit : state.layout().units) {
    for (const TensorLayout& tensor : unit.tensors) visit(state.unit(unit.unit), tensor);
  }
}

// Random finite weights; m and v get values that loading and exporting must leave alone.
inline void fill_random(HostState& state, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  for_each_tensor(state, [&](UnitState unit, const TensorLayout& tensor) {
    for (auto i = static_cast<size_t>(tensor.offset); i < static_cast<size_t>(tensor.offset + tensor.elements); ++i) {
      const HiLo parts = split_master(normal(random));
      unit.hi[i] = parts.hi;
      unit.lo[i] = parts.lo;
      unit.m[i] = normal(random);
      unit.v[i] = 1.0f;
    }
  });
}

// A checkpoint under construction: bytes of each tensor.
struct TestTensor {
  StoredType type = StoredType::bf16;
  std::vector<int64_t> shape;
  std::string data;
};
using TestTensors = std::map<std::string, TestTensor>;

inline void save(const fs::path& file, const TestTensors& tensors) {
  std::vector<TensorToStore> stored;
  for (const auto& [name, tensor] : tensors) {
    stored.push_back({name, tensor.type, tensor.shape, std::as_bytes(std::span(tensor.data))});
  }
  fs::create_directories(file.parent_path());
  write_safetensors(posix_file_system(), file, stored, {{"format", "pt"}});
}

// A file system (without flushing, for speed) that fails at chosen operations as a full disk would: a failing write
// leaves half of its data behind. remove_all never fails and is not counted.
class FaultyFileSystem : public FileSystem {
 public:
  // Fails at operation `first` (counted from 0), and with `lasting` at every later one too.
  explicit FaultyFileSystem(int first = -1, bool lasting = false) : first_(first), lasting_(lasting) {}
  int operations() const { return operations_; }
  const std::string& failed_at() const { return failed_at_; }

  std::unique_ptr<FileWriter> create(const fs::path& path) override {
    count("create", path);
    return std::make_unique<Writer>(*this, path);
  }
  void create_directory(const fs::path& path) override {
    count("create_directory", path);
    fs::create_directory(path);
  }
  void rename(const fs::path& from, const fs::path& to) override {
    count("rename", from);
    fs::rename(from, to);
  }
  void remove_all(const fs::path& path) noexcept override {
    std::error_code ignored;
    fs::remove_all(path, ignored);
  }

 private:
  class Writer : public FileWriter {
   public:
    Writer(FaultyFileSystem& files, const fs::path& path) : files_(files), path_(path), out_(path, std::ios::binary) {}
    void write(std::span<const std::byte> data) override {
      const bool fails = files_.next_fails();
      out_.write(reinterpret_cast<const char*>(data.data()),
                 static_cast<std::streamsize>(fails ? data.size() / 2 : data.size()));
      files_.count("write", path_);
    }
    void close() override {
      out_.close();
      files_.count("close", path_);
    }

   private:
    FaultyFileSystem& files_;
    fs::path path_;
    std::ofstream out_;
  };

  bool next_fails() const { return first_ >= 0 && (operations_ == first_ || (lasting_ && operations_ > first_)); }
  void count(const std::string& what, const fs::path& path) {
    const bool fails = next_fails();
    ++operations_;
    if (!fails) return;
    if (failed_at_.empty()) failed_at_ = what + " " + path.filename().string();
    throw Error("Cannot " + what + " " + path.string() + ": No space left on device.");
  }

  int first_;
  bool lasting_;
  int operations_ = 0;
  std::string failed_at_;
};

// The message of the Error that `action` throws; a test failure if it throws none.
template <typename Action>
std::string error_of(Action action) {
  try {
    action();
  } catch (const Error& error) {
    return error.what();
  }
  ADD_FAILURE() << "no Error was thrown";
  return {};
}

}  // namespace slidedp
