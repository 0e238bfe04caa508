// safetensors files: memory-mapped reading, streaming writing. Format: runtime/io/FORMATS.md.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/io/file_system.h"

namespace slidedp {

enum class StoredType : uint8_t { bf16, f16, f32, i32, i64, other };

struct StoredTensor {
  std::string name;
  StoredType type{};
  std::string type_name;  // as in the file: "BF16"
  std::vector<int64_t> shape;
  // Into the mapping; valid while the file object lives. Aligned to the elements only if the file's writer cared.
  std::span<const std::byte> data;
  int64_t elements() const;
};

// One file, mapped read-only. Move-only. Throws Error that names the file (and tensor) on anything malformed:
// truncated header or data, overlapping or out-of-range offsets, size not shape x type. Tensors come in offset order.
class SafetensorsFile {
 public:
  explicit SafetensorsFile(const std::filesystem::path& file);
  SafetensorsFile(SafetensorsFile&&) noexcept;
  SafetensorsFile& operator=(SafetensorsFile&&) noexcept;
  ~SafetensorsFile();
  const std::vector<StoredTensor>& tensors() const { return tensors_; }
  const StoredTensor* find(const std::string& name) const;
  const std::map<std::string, std::string>& metadata() const { return metadata_; }
  const std::filesystem::path& path() const { return path_; }
  // Reads part of a tensor's data, from `begin` bytes on, without the mapping: at storage speed, with an Error where
  // the mapping would raise a signal. Thread-safe.
  void read(const StoredTensor& tensor, int64_t begin, std::span<std::byte> out) const;

 private:
  void read_header();
  void release() noexcept;

  std::filesystem::path path_;
  int descriptor_ = -1;
  void* mapping_ = nullptr;
  int64_t bytes_ = 0;
  std::vector<StoredTensor> tensors_;
  std::map<std::string, std::string> metadata_;
};

// Name in the header ("BF16"); bytes of one element. Not for `other`.
std::string_view stored_name(StoredType);
int64_t size_of(StoredType);

struct TensorToStore {
  std::string name;
  StoredType type{};
  std::vector<int64_t> shape;
  std::span<const std::byte> data;
};
// Tensors are stored in the order given, without gaps, the first at a multiple of 8 bytes.
void write_safetensors(FileSystem&, const std::filesystem::path& file, std::span<const TensorToStore> tensors,
                       const std::map<std::string, std::string>& metadata);

}  // namespace slidedp
