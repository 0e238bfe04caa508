#include "runtime/io/safetensors.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <stdexcept>
#include <tuple>
#include <utility>

#include "model/base/format.h"

namespace slidedp {

static_assert(std::endian::native == std::endian::little, "safetensors data is little-endian and is used in place");

namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr uint64_t kMaxHeaderBytes = 100'000'000;  // the reference implementation's limit
constexpr uint64_t kLengthBytes = 8;

struct TypeName {
  std::string_view name;
  StoredType type;
  int bits;
};
// Every type of the reference implementation; those that SlideDP has no use for are `other`.
constexpr TypeName kTypes[] = {
    {"BF16", StoredType::bf16, 16},        {"F16", StoredType::f16, 16},      {"F32", StoredType::f32, 32},
    {"I32", StoredType::i32, 32},          {"I64", StoredType::i64, 64},      {"BOOL", StoredType::other, 8},
    {"F4", StoredType::other, 4},          {"F6_E2M3", StoredType::other, 6}, {"F6_E3M2", StoredType::other, 6},
    {"U8", StoredType::other, 8},          {"I8", StoredType::other, 8},      {"F8_E5M2", StoredType::other, 8},
    {"F8_E4M3", StoredType::other, 8},     {"F8_E8M0", StoredType::other, 8}, {"F8_E4M3FNUZ", StoredType::other, 8},
    {"F8_E5M2FNUZ", StoredType::other, 8}, {"I16", StoredType::other, 16},    {"U16", StoredType::other, 16},
    {"U32", StoredType::other, 32},        {"F64", StoredType::other, 64},    {"U64", StoredType::other, 64},
    {"C64", StoredType::other, 64}};

const TypeName* find_type(std::string_view name) {
  const auto* found =
      std::find_if(std::begin(kTypes), std::end(kTypes), [&](const TypeName& t) { return t.name == name; });
  return found == std::end(kTypes) ? nullptr : found;
}

const TypeName& type_of(StoredType type) {
  for (const TypeName& entry : kTypes) {
    if (entry.type == type && type != StoredType::other) return entry;
  }
  throw std::logic_error("safetensors: this type cannot be written");
}

// Product of shape and bits, in bytes; nullopt if it overflows or is no whole number of bytes.
std::optional<uint64_t> tensor_bytes(const std::vector<int64_t>& shape, int bits) {
  uint64_t total = static_cast<uint64_t>(bits);
  for (int64_t extent : shape) {
    if (__builtin_mul_overflow(total, static_cast<uint64_t>(extent), &total)) return std::nullopt;
  }
  if (total % 8 != 0) return std::nullopt;
  return total / 8;
}

struct Entry {
  StoredTensor tensor;
  uint64_t begin = 0, end = 0;  // bytes from the end of the header
};

// A JSON value as a number in [0, 2^63).
std::optional<uint64_t> as_size(const json& value) {
  if (!value.is_number_unsigned()) return std::nullopt;
  const auto number = value.get<uint64_t>();
  if (number > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) return std::nullopt;
  return number;
}

[[noreturn]] void malformed(const fs::path& file, const std::string& what) {
  failf("{} is not a valid safetensors file: {}.", file.string(), what);
}

Entry read_entry(const fs::path& file, const std::string& name, const json& value) {
  const auto bad = [&](const std::string& what) { malformed(file, fmt::format("tensor {} {}", name, what)); };
  if (!value.is_object() || value.size() != 3 || !value.contains("dtype") || !value.contains("shape") ||
      !value.contains("data_offsets")) {
    bad("does not have exactly the keys dtype, shape and data_offsets");
  }
  const json &dtype = value["dtype"], &shape = value["shape"], &offsets = value["data_offsets"];
  const TypeName* type = dtype.is_string() ? find_type(dtype.get_ref<const std::string&>()) : nullptr;
  if (type == nullptr) bad(fmt::format("has the unknown dtype {}", dtype.dump()));
  Entry entry{{name, type->type, std::string(type->name), {}, {}}};
  if (!shape.is_array()) bad("has a shape that is not a list");
  for (const json& extent : shape) {
    const auto number = as_size(extent);
    if (!number) bad("has a shape that is not made of whole numbers");
    entry.tensor.shape.push_back(static_cast<int64_t>(*number));
  }
  if (!offsets.is_array() || offsets.size() != 2) bad("has data_offsets that are not a pair");
  const auto begin = as_size(offsets[0]), end = as_size(offsets[1]);
  if (!begin || !end || *begin > *end) bad("has data_offsets that are not a range");
  entry.begin = *begin;
  entry.end = *end;
  const auto bytes = tensor_bytes(entry.tensor.shape, type->bits);
  if (!bytes || *bytes != entry.end - entry.begin) {
    bad(fmt::format("has {} bytes of data, which is not its shape {} of {}", entry.end - entry.begin, shape.dump(),
                    type->name));
  }
  return entry;
}

// Parses the header and refuses repeated keys, of which a parser would silently take one.
json parse_header(const fs::path& file, std::string_view text) {
  std::set<std::string> keys;
  std::string repeated;
  const auto watch = [&](int depth, json::parse_event_t event, json& parsed) {
    if (event == json::parse_event_t::key && depth == 1 && !keys.insert(parsed.get<std::string>()).second) {
      repeated = parsed.get<std::string>();
    }
    return true;
  };
  json header;
  try {
    header = json::parse(text, watch);
  } catch (const json::exception& error) {
    malformed(file, fmt::format("its header is not JSON ({})", error.what()));
  }
  if (!header.is_object()) malformed(file, "its header is not a JSON object");
  if (!repeated.empty()) malformed(file, fmt::format("its header names {} twice", repeated));
  return header;
}

std::map<std::string, std::string> read_metadata(const fs::path& file, const json& value) {
  std::map<std::string, std::string> metadata;
  if (!value.is_object()) malformed(file, "__metadata__ is not an object");
  for (const auto& [key, text] : value.items()) {
    if (!text.is_string()) malformed(file, fmt::format("__metadata__ key {} is not a string", key));
    metadata[key] = text.get<std::string>();
  }
  return metadata;
}

// Sorts by offset and demands that the tensors cover the data exactly: no gap, no overlap, nothing beyond.
void check_cover(const fs::path& file, std::vector<Entry>& entries, uint64_t data_bytes) {
  std::sort(entries.begin(), entries.end(), [](const Entry& a, const Entry& b) {
    return std::tie(a.begin, a.end, a.tensor.name) < std::tie(b.begin, b.end, b.tensor.name);
  });
  uint64_t expected = 0;
  for (const Entry& entry : entries) {
    if (entry.begin != expected) {
      malformed(file, fmt::format("tensor {} starts at byte {} of the data instead of {} ({})", entry.tensor.name,
                                  entry.begin, expected, entry.begin < expected ? "an overlap" : "a gap"));
    }
    expected = entry.end;
  }
  if (expected > data_bytes) {
    malformed(file,
              fmt::format("it is truncated: the header promises {} bytes of data, {} are there", expected, data_bytes));
  }
  if (expected < data_bytes) {
    malformed(file, fmt::format("{} bytes follow the last tensor", data_bytes - expected));
  }
}

struct Mapping {
  int descriptor = -1;
  void* data = nullptr;
  int64_t bytes = 0;
};

Mapping map_file(const fs::path& file) {
  const int descriptor = ::open(file.c_str(), O_RDONLY | O_CLOEXEC);
  if (descriptor < 0) failf("Cannot open {}: {}.", file.string(), std::strerror(errno));
  struct stat status {};
  const bool known = ::fstat(descriptor, &status) == 0;
  if (!known || !S_ISREG(status.st_mode) || status.st_size < static_cast<off_t>(kLengthBytes)) {
    ::close(descriptor);
    malformed(file, known && S_ISREG(status.st_mode) ? "it is shorter than 8 bytes" : "it is not a regular file");
  }
  void* data = mmap(nullptr, static_cast<size_t>(status.st_size), PROT_READ, MAP_PRIVATE, descriptor, 0);
  if (data == MAP_FAILED) {
    const int error = errno;
    ::close(descriptor);
    failf("Cannot map {} into memory: {}.", file.string(), std::strerror(error));
  }
  return {descriptor, data, status.st_size};
}

}  // namespace

std::string_view stored_name(StoredType type) { return type_of(type).name; }
int64_t size_of(StoredType type) { return type_of(type).bits / 8; }

int64_t StoredTensor::elements() const {
  int64_t product = 1;
  for (int64_t extent : shape) product *= extent;
  return product;
}

SafetensorsFile::SafetensorsFile(const fs::path& file) : path_(file) {
  const Mapping mapping = map_file(file);
  descriptor_ = mapping.descriptor;
  mapping_ = mapping.data;
  bytes_ = mapping.bytes;
  try {
    read_header();
  } catch (...) {
    release();
    throw;
  }
}

void SafetensorsFile::read_header() {
  const auto* bytes = static_cast<const std::byte*>(mapping_);
  const auto available = static_cast<uint64_t>(bytes_) - kLengthBytes;
  uint64_t length = 0;
  std::memcpy(&length, bytes, kLengthBytes);
  if (length > kMaxHeaderBytes) malformed(path_, fmt::format("its header claims {} bytes, more than 100 MB", length));
  if (length > available) {
    malformed(path_, fmt::format("it is truncated inside the header ({} of {} bytes are there)", available, length));
  }
  const std::string_view text(reinterpret_cast<const char*>(bytes) + kLengthBytes, length);
  if (text.empty() || text.front() != '{') malformed(path_, "its header does not start with {");
  const json header = parse_header(path_, text);
  std::vector<Entry> entries;
  for (const auto& [name, value] : header.items()) {
    if (name == "__metadata__") {
      metadata_ = read_metadata(path_, value);
    } else {
      entries.push_back(read_entry(path_, name, value));
    }
  }
  check_cover(path_, entries, available - length);
  const std::byte* data = bytes + kLengthBytes + length;
  for (Entry& entry : entries) {
    entry.tensor.data = {data + entry.begin, static_cast<size_t>(entry.end - entry.begin)};
    tensors_.push_back(std::move(entry.tensor));
  }
}

SafetensorsFile::SafetensorsFile(SafetensorsFile&& other) noexcept
    : path_(std::move(other.path_)),
      descriptor_(std::exchange(other.descriptor_, -1)),
      mapping_(std::exchange(other.mapping_, nullptr)),
      bytes_(std::exchange(other.bytes_, 0)),
      tensors_(std::move(other.tensors_)),
      metadata_(std::move(other.metadata_)) {}

SafetensorsFile& SafetensorsFile::operator=(SafetensorsFile&& other) noexcept {
  std::swap(path_, other.path_);
  std::swap(descriptor_, other.descriptor_);
  std::swap(mapping_, other.mapping_);
  std::swap(bytes_, other.bytes_);
  std::swap(tensors_, other.tensors_);
  std::swap(metadata_, other.metadata_);
  return *this;
}

SafetensorsFile::~SafetensorsFile() { release(); }

void SafetensorsFile::release() noexcept {
  if (mapping_ == nullptr) return;
  munmap(mapping_, static_cast<size_t>(bytes_));
  ::close(descriptor_);
}

void SafetensorsFile::read(const StoredTensor& tensor, int64_t begin, std::span<std::byte> out) const {
  off_t at = tensor.data.data() + begin - static_cast<const std::byte*>(mapping_);
  while (!out.empty()) {
    const ssize_t got = ::pread(descriptor_, out.data(), out.size(), at);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) failf("Cannot read {}: {}.", path_.string(), std::strerror(errno));
    if (got == 0) failf("{} became shorter while it was read: tensor {} is cut off.", path_.string(), tensor.name);
    out = out.subspan(static_cast<size_t>(got));
    at += got;
  }
}

const StoredTensor* SafetensorsFile::find(const std::string& name) const {
  for (const StoredTensor& tensor : tensors_) {
    if (tensor.name == name) return &tensor;
  }
  return nullptr;
}

void write_safetensors(FileSystem& files, const fs::path& file, std::span<const TensorToStore> tensors,
                       const std::map<std::string, std::string>& metadata) {
  nlohmann::ordered_json header = nlohmann::ordered_json::object();
  if (!metadata.empty()) header["__metadata__"] = metadata;
  uint64_t offset = 0;
  for (const TensorToStore& tensor : tensors) {
    const auto bytes = tensor_bytes(tensor.shape, type_of(tensor.type).bits);
    if (bytes != tensor.data.size() || header.contains(tensor.name)) {
      throw std::logic_error("write_safetensors: " + tensor.name + " is there twice or is not as long as its shape");
    }
    header[tensor.name] = {{"dtype", stored_name(tensor.type)},
                           {"shape", tensor.shape},
                           {"data_offsets", {offset, offset + tensor.data.size()}}};
    offset += tensor.data.size();
  }
  std::string text = header.dump();
  text.append((kLengthBytes - text.size() % kLengthBytes) % kLengthBytes, ' ');
  const uint64_t length = text.size();
  const auto writer = files.create(file);
  writer->write(std::as_bytes(std::span(&length, 1)));
  writer->write(std::as_bytes(std::span(text)));
  for (const TensorToStore& tensor : tensors) writer->write(tensor.data);
  writer->close();
}

}  // namespace slidedp
