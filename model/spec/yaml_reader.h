// Strict YAML in and out, internal to model/spec. A struct lists its keys once, in a function template
//
//   template <typename Visitor> void fields(Visitor& visit, AdamSpec& spec) {
//     visit.value("learning_rate", spec.learning_rate, kNotNegative);
//     ...
//   }
//
// which a Reader, a Writer or an AssignmentTable (`--set key=value`) visits.
#pragma once

#include <yaml-cpp/yaml.h>

#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "model/base/error.h"
#include "model/base/types.h"

namespace slidedp {

// What a value may be.
struct Rule {
  // below_one: [0, 1). share: (0, 1]. backend: a string, the name of a device backend.
  enum class Range : uint8_t { any, positive, not_negative, below_one, share, backend };
  Range range = Range::any;
  bool bytes = false;     // a size: "22GiB" is accepted beside plain integers
  bool optional = false;  // the key may be missing; the struct's default stays
  constexpr Rule or_default() const { return {range, bytes, true}; }
};
inline constexpr Rule kAny{};
inline constexpr Rule kPositive{Rule::Range::positive};
inline constexpr Rule kNotNegative{Rule::Range::not_negative};
inline constexpr Rule kBelowOne{Rule::Range::below_one};
inline constexpr Rule kShare{Rule::Range::share};
inline constexpr Rule kBackend{Rule::Range::backend};
inline constexpr Rule kBytes{Rule::Range::positive, true};
inline constexpr Rule kBytesOrZero{Rule::Range::not_negative, true};

// How a section is written: one key a line, or in braces on one line.
enum class Style : uint8_t { block, flow };

// Text to value. `where` starts the message of the Error: `hw.yaml:12: key "pcie.h2d.gbps"`. Integers are written
// plainly, doubles are finite.
void parse_value(std::string_view text, const std::string& where, const Rule& rule, int& value);
void parse_value(std::string_view text, const std::string& where, const Rule& rule, int64_t& value);
void parse_value(std::string_view text, const std::string& where, const Rule& rule, uint64_t& value);
void parse_value(std::string_view text, const std::string& where, const Rule& rule, double& value);
void parse_value(std::string_view text, const std::string& where, const Rule& rule, bool& value);
void parse_value(std::string_view text, const std::string& where, const Rule& rule, std::string& value);
void parse_value(std::string_view text, const std::string& where, const Rule& rule, DType& value);
void parse_value(std::string_view text, const std::string& where, const Rule& rule, Delivery& value);
void parse_value(std::string_view text, const std::string& where, const Rule& rule, Reduction& value);
void parse_value(std::string_view text, const std::string& where, const Rule& rule, ActivationPolicy& value);
void parse_value(std::string_view text, const std::string& where, const Rule& rule, UpdatePolicy& value);
void parse_value(std::string_view text, const std::string& where, const Rule& rule, VocabularyRows& value);

// Value to text that parse_value reads back exactly.
std::string format_value(bool value);
std::string format_value(double value);
std::string format_value(int64_t value);
std::string format_value(uint64_t value);
inline std::string format_value(int value) { return format_value(static_cast<int64_t>(value)); }
inline std::string format_value(const std::string& value) { return value; }
template <typename Enum>
requires std::is_enum_v<Enum> std::string format_value(Enum value) { return std::string(name(value)); }

// The candidates nearest to `word` by edit distance, best first, at most `count`.
std::vector<std::string> nearest(std::string_view word, const std::vector<std::string>& candidates, size_t count);

// Reads one mapping. Unknown and missing keys are reported by finish().
class Reader {
 public:
  Reader(YAML::Node map, std::string file, std::string path);

  template <typename T>
  void value(const char* key, T& value, Rule rule = kAny) {
    const YAML::Node node = child(key, rule.optional);
    if (node.IsDefined()) parse_value(scalar(node, key, rule, value), where(node, key), rule, value);
  }
  void value(const char* key, std::vector<std::string>& value);
  // A list of {layers: COUNT, policy: NAME}.
  void value(const char* key, std::vector<ActivationPolicy>& value);

  template <typename T>
  void section(const char* key, T& value, Style = Style::block) {
    const YAML::Node node = child(key, false);
    if (!node.IsDefined()) return;
    Reader reader(node, file_, path(key));
    fields(reader, value);
    reader.finish();
  }
  // A section that may be missing; the struct's defaults stay.
  template <typename T>
  void section_if(bool, const char* key, T& value) {
    const YAML::Node node = child(key, true);
    if (!node.IsDefined()) return;
    Reader reader(node, file_, path(key));
    fields(reader, value);
    reader.finish();
  }
  template <typename T>
  void optional_section(const char* key, T& value, Style = Style::block) {
    section_if(true, key, value);
  }
  // A list of mappings.
  template <typename T>
  void list(const char* key, std::vector<T>& value) {
    const YAML::Node node = sequence(key);
    if (!node.IsDefined()) return;
    value.clear();
    for (const YAML::Node& item : node) {
      Reader reader(item, file_, path(key));
      fields(reader, value.emplace_back());
      reader.finish();
    }
  }
  // Throws Error for the first unknown key (naming the nearest valid one), else for the first missing key.
  void finish() const;
  // `FILE:LINE: key "PATH"` of a dotted path below this mapping.
  std::string where(const std::string& path) const;

 private:
  YAML::Node child(const char* key, bool optional);
  template <typename T>
  std::string scalar(const YAML::Node& node, const char* key, const Rule& rule, const T&) const {
    return scalar_text(node, key, std::is_arithmetic_v<T> && !rule.bytes);
  }
  // Throws unless the node is one scalar; `plain` demands that it is not quoted.
  std::string scalar_text(const YAML::Node& node, const char* key, bool plain) const;
  YAML::Node sequence(const char* key);
  std::string path(const char* key) const;
  std::string where(const YAML::Node& node, const char* key) const;

  YAML::Node map_;
  std::string file_, path_;
  std::vector<std::string> known_;
  std::string missing_;  // the first missing key
};

class Writer {
 public:
  Writer();
  template <typename T>
  void value(const char* key, const T& value, Rule = kAny) {
    pair(key, format_value(value));
  }
  void value(const char* key, const std::vector<std::string>& value);
  void value(const char* key, const std::vector<ActivationPolicy>& value);
  template <typename T>
  void section(const char* key, T& value, Style style = Style::block) {
    begin(key, style);
    fields(*this, value);
    end();
  }
  template <typename T>
  void optional_section(const char* key, T& value, Style style = Style::block) {
    section(key, value, style);
  }
  template <typename T>
  void section_if(bool present, const char* key, T& value) {
    if (present) section(key, value);
  }
  template <typename T>
  void list(const char* key, std::vector<T>& value) {
    begin_list(key, value.empty());
    for (T& item : value) {
      begin_item();
      fields(*this, item);
      end();
    }
    end_list();
  }
  void schema(const std::string& schema) { pair("schema", schema); }
  std::string finish();

 private:
  void pair(const char* key, const std::string& text);
  void begin(const char* key, Style style);
  void begin_list(const char* key, bool empty);
  void begin_item();
  void end();
  void end_list();
  YAML::Emitter out_;
};

// The scalar keys of a spec, by their dotted paths, for assignment by name.
class AssignmentTable {
 public:
  using Target = std::variant<int*, int64_t*, uint64_t*, double*, bool*, std::string*>;
  struct Entry {
    std::string path;
    Target target;
    Rule rule;
  };
  // Paths start with `prefix`.
  explicit AssignmentTable(std::string prefix) : prefix_(std::move(prefix)) {}
  template <typename T>
  void value(const char* key, T& value, Rule rule = kAny) {
    entries.push_back({prefix_ + key, Target(&value), rule});
  }
  template <typename T>
  void section(const char* key, T& value, Style = Style::block) {
    const std::string outer = std::exchange(prefix_, prefix_ + key + ".");
    fields(*this, value);
    prefix_ = outer;
  }
  template <typename T>
  void optional_section(const char* key, T& value, Style style = Style::block) {
    section(key, value, style);
  }
  // What describes other values is not assigned by name.
  template <typename T>
  void section_if(bool, const char*, T&) {}
  std::vector<Entry> entries;

 private:
  std::string prefix_;
};

// What to do about a file of another schema than the one wanted, by the schema found.
using SchemaAdvice = std::map<std::string, std::string>;

// The root mapping of the file, whose `schema` key must be `schema`.
YAML::Node load_yaml(const std::filesystem::path& file, const std::string& schema, const SchemaAdvice& advice = {});
// The same of a file's text; errors name `source`.
YAML::Node parse_yaml(const std::string& text, const std::string& source, const std::string& schema,
                      const SchemaAdvice& advice = {});

// What is wrong with a combination of keys: the dotted path of the key to blame, and the rest of the sentence.
struct Problem {
  std::string key, message;
};

// `check(spec)` returns an optional Problem; it runs after every key was read.
template <typename Spec, typename Check>
Spec read_yaml(const YAML::Node& root, const std::string& source, Check check) {
  Spec spec;
  Reader reader(root, source, "");
  std::string ignored;
  reader.value("schema", ignored);
  fields(reader, spec);
  reader.finish();
  if (const std::optional<Problem> problem = check(spec)) fail(reader.where(problem->key) + " " + problem->message);
  return spec;
}

template <typename Spec, typename Check>
Spec read_yaml(const std::filesystem::path& file, const std::string& schema, Check check,
               const SchemaAdvice& advice = {}) {
  return read_yaml<Spec>(load_yaml(file, schema, advice), file.string(), check);
}

template <typename Spec>
std::string write_yaml(Spec spec, const std::string& schema) {
  Writer writer;
  writer.schema(schema);
  fields(writer, spec);
  return writer.finish();
}

}  // namespace slidedp
