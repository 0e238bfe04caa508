#include "model/spec/yaml_reader.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <fstream>
#include <iterator>
#include <limits>
#include <numeric>
#include <sstream>
#include <system_error>

#include "model/base/format.h"

namespace slidedp {
namespace {

// More layers than any model has; keeps a typing error in a plan from filling the memory.
constexpr int64_t kMaxLayers = 65536;

template <typename Number>
void check_range(Number value, std::string_view text, const std::string& where, const Rule& rule) {
  const auto refuse = [&](const char* must) { failf("{} is {}, but must be {}", where, text, must); };
  switch (rule.range) {
    case Rule::Range::any:
    case Rule::Range::backend:
      return;
    case Rule::Range::positive:
      if (!(value > 0)) refuse("greater than 0");
      return;
    case Rule::Range::not_negative:
      if (!(value >= 0)) refuse("0 or greater");
      return;
    case Rule::Range::below_one:
      if (!(value >= 0 && value < 1)) refuse("at least 0 and below 1");
      return;
    case Rule::Range::share:
      if (!(value > 0 && value <= 1)) refuse("above 0 and at most 1");
      return;
  }
}

template <typename Number>
bool read_whole(std::string_view text, Number& value) {
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, value);
  return error == std::errc{} && stop == end;
}

template <typename Integer>
void parse_integer(std::string_view text, const std::string& where, const Rule& rule, Integer& value) {
  Integer number{};
  if (!read_whole(text, number)) {
    if (!rule.bytes) {
      failf("{} is \"{}\", but must be an integer{}", where, text,
            std::is_unsigned_v<Integer> ? " of at most 64 bits and not negative"
                                        : fmt::format(" of at most {} bits", sizeof(Integer) * 8));
    }
    number = static_cast<Integer>(parse_bytes(text, where));
  }
  check_range(number, text, where, rule);
  value = number;
}

template <typename Enum>
void parse_enum(std::string_view text, const std::string& where, std::optional<Enum> parsed, int count, Enum& value) {
  if (!parsed) {
    std::vector<std::string_view> names;
    for (int i = 0; i < count; ++i) names.push_back(name(static_cast<Enum>(i)));
    failf("{} is \"{}\", but must be one of {}", where, text, fmt::join(names, ", "));
  }
  value = *parsed;
}

size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), size_t{0});
  for (size_t i = 0; i < a.size(); ++i) {
    size_t diagonal = std::exchange(row[0], i + 1);
    for (size_t j = 0; j < b.size(); ++j) {
      const size_t replaced = diagonal + (a[i] == b[j] ? 0 : 1);
      diagonal = row[j + 1];
      row[j + 1] = std::min({replaced, row[j] + 1, row[j + 1] + 1});
    }
  }
  return row.back();
}

int line_of(const YAML::Mark& mark) { return mark.line + 1; }

}  // namespace

void parse_value(std::string_view text, const std::string& where, const Rule& rule, int& value) {
  parse_integer(text, where, rule, value);
}
void parse_value(std::string_view text, const std::string& where, const Rule& rule, int64_t& value) {
  parse_integer(text, where, rule, value);
}
void parse_value(std::string_view text, const std::string& where, const Rule& rule, uint64_t& value) {
  parse_integer(text, where, rule, value);
}

void parse_value(std::string_view text, const std::string& where, const Rule& rule, double& value) {
  double number = 0;
  if (!read_whole(text, number) || !std::isfinite(number)) {
    failf("{} is \"{}\", but must be a finite number", where, text);
  }
  check_range(number, text, where, rule);
  value = number;
}

void parse_value(std::string_view text, const std::string& where, const Rule&, bool& value) {
  if (text != "true" && text != "false") failf("{} is \"{}\", but must be true or false", where, text);
  value = text == "true";
}

void parse_value(std::string_view text, const std::string& where, const Rule& rule, std::string& value) {
  if (rule.range == Rule::Range::backend && text != "cpu" && text != "cuda") {
    failf("{} is \"{}\", but must be cpu or cuda", where, text);
  }
  value = text;
}

void parse_value(std::string_view text, const std::string& where, const Rule&, DType& value) {
  parse_enum(text, where, parse_dtype(text), 2, value);
}
void parse_value(std::string_view text, const std::string& where, const Rule&, Delivery& value) {
  parse_enum(text, where, parse_delivery(text), 3, value);
}
void parse_value(std::string_view text, const std::string& where, const Rule&, Reduction& value) {
  parse_enum(text, where, parse_reduction(text), 2, value);
}
void parse_value(std::string_view text, const std::string& where, const Rule&, ActivationPolicy& value) {
  parse_enum(text, where, parse_activation(text), 4, value);
}
void parse_value(std::string_view text, const std::string& where, const Rule&, UpdatePolicy& value) {
  parse_enum(text, where, parse_update(text), 3, value);
}
void parse_value(std::string_view text, const std::string& where, const Rule&, VocabularyRows& value) {
  parse_enum(text, where, parse_vocabulary_rows(text), 2, value);
}

std::string format_value(bool value) { return value ? "true" : "false"; }
std::string format_value(int64_t value) { return fmt::format("{}", value); }
std::string format_value(uint64_t value) { return fmt::format("{}", value); }

std::string format_value(double value) {
  std::string text = fmt::format("{}", value);  // the shortest text that reads back as the same double
  // YAML 1.1 readers (PyYAML) take "1e-05" for a string: they want a point before the exponent.
  const size_t exponent = text.find('e');
  if (exponent != std::string::npos && text.find('.') == std::string::npos) text.insert(exponent, ".0");
  return text;
}

std::vector<std::string> nearest(std::string_view word, const std::vector<std::string>& candidates, size_t count) {
  std::vector<std::string> sorted = candidates;
  std::stable_sort(sorted.begin(), sorted.end(), [&](const std::string& a, const std::string& b) {
    return edit_distance(word, a) < edit_distance(word, b);
  });
  sorted.resize(std::min(count, sorted.size()));
  return sorted;
}

Reader::Reader(YAML::Node map, std::string file, std::string path)
    : map_(std::move(map)), file_(std::move(file)), path_(std::move(path)) {
  const std::string what = path_.empty() ? "the document" : fmt::format("key \"{}\"", path_);
  if (!map_.IsMap()) failf("{}:{}: {} must be a mapping of keys to values", file_, line_of(map_.Mark()), what);
  std::vector<std::string> seen;
  for (const auto& entry : map_) {
    const YAML::Node& key = entry.first;
    if (!key.IsScalar()) failf("{}:{}: a key must be a plain word", file_, line_of(key.Mark()));
    if (std::find(seen.begin(), seen.end(), key.Scalar()) != seen.end()) {
      failf("{} appears twice", where(key, key.Scalar().c_str()));
    }
    seen.push_back(key.Scalar());
  }
}

std::string Reader::path(const char* key) const { return path_.empty() ? key : path_ + "." + key; }

std::string Reader::where(const YAML::Node& node, const char* key) const {
  YAML::Mark mark = node.Mark();
  if (node.IsNull()) {  // yaml-cpp marks a missing value at the next token, often a line below its key
    for (const auto& entry : map_) {
      if (entry.first.Scalar() == key) mark = entry.first.Mark();
    }
  }
  return fmt::format("{}:{}: key \"{}\"", file_, line_of(mark), path(key));
}

std::string Reader::where(const std::string& path) const {
  YAML::Node node = map_;
  std::istringstream keys(path);
  for (std::string key; std::getline(keys, key, '.') && node[key].IsDefined();) node.reset(node[key]);
  return where(node, path.c_str());
}

YAML::Node Reader::child(const char* key, bool optional) {
  known_.emplace_back(key);
  const YAML::Node& map = std::as_const(map_);
  const YAML::Node node = map[key];
  if (!node.IsDefined() && !optional && missing_.empty()) missing_ = key;
  return node;
}

std::string Reader::scalar_text(const YAML::Node& node, const char* key, bool plain) const {
  if (!node.IsScalar()) failf("{} must be a single value", where(node, key));
  // yaml-cpp tags quoted scalars "!" and plain ones "?".
  if (plain && node.Tag() == "!") {
    failf("{} is the text \"{}\", but must be a value without quotes", where(node, key), node.Scalar());
  }
  return node.Scalar();
}

YAML::Node Reader::sequence(const char* key) {
  const YAML::Node node = child(key, false);
  if (node.IsDefined() && !node.IsSequence()) failf("{} must be a list", where(node, key));
  return node;
}

void Reader::value(const char* key, std::vector<std::string>& value) {
  const YAML::Node node = sequence(key);
  if (!node.IsDefined()) return;
  value.clear();
  for (const YAML::Node& item : node) value.push_back(scalar_text(item, key, false));
}

void Reader::value(const char* key, std::vector<ActivationPolicy>& value) {
  const YAML::Node node = sequence(key);
  if (!node.IsDefined()) return;
  value.clear();
  for (const YAML::Node& item : node) {
    Reader reader(item, file_, path(key));
    int64_t layers = 0;
    ActivationPolicy policy{};
    reader.value("layers", layers, kPositive);
    reader.value("policy", policy);
    reader.finish();
    if (layers > kMaxLayers - static_cast<int64_t>(value.size())) {
      failf("{} counts more than {} layers", where(item, key), kMaxLayers);
    }
    value.insert(value.end(), static_cast<size_t>(layers), policy);
  }
}

void Reader::finish() const {
  for (const auto& entry : map_) {
    const std::string& key = entry.first.Scalar();
    if (std::find(known_.begin(), known_.end(), key) != known_.end()) continue;
    const std::vector<std::string> close = nearest(key, known_, 1);
    failf("{} is unknown{}", where(entry.first, key.c_str()),
          close.empty() ? "" : fmt::format("; did you mean \"{}\"?", path(close.front().c_str())));
  }
  if (!missing_.empty()) {
    failf("{}:{}: key \"{}\" is missing; add it", file_, line_of(map_.Mark()), path(missing_.c_str()));
  }
}

Writer::Writer() { out_ << YAML::BeginMap; }

void Writer::pair(const char* key, const std::string& text) { out_ << YAML::Key << key << YAML::Value << text; }

void Writer::begin(const char* key, Style style) {
  out_ << YAML::Key << key << YAML::Value;
  if (style == Style::flow) out_ << YAML::Flow;
  out_ << YAML::BeginMap;
}

void Writer::begin_list(const char* key, bool empty) {
  out_ << YAML::Key << key << YAML::Value;
  if (empty) out_ << YAML::Flow;  // an empty block list would read as null
  out_ << YAML::BeginSeq;
}

void Writer::begin_item() { out_ << YAML::Flow << YAML::BeginMap; }

void Writer::end() { out_ << YAML::EndMap; }

void Writer::end_list() { out_ << YAML::EndSeq; }

void Writer::value(const char* key, const std::vector<std::string>& value) {
  begin_list(key, value.empty());
  for (const std::string& item : value) out_ << item;
  end_list();
}

void Writer::value(const char* key, const std::vector<ActivationPolicy>& value) {
  begin_list(key, value.empty());
  for (auto run = value.begin(); run != value.end();) {
    const auto end = std::find_if(run, value.end(), [&](ActivationPolicy policy) { return policy != *run; });
    begin_item();
    pair("layers", format_value(static_cast<int64_t>(end - run)));
    pair("policy", format_value(*run));
    this->end();
    run = end;
  }
  end_list();
}

std::string Writer::finish() {
  out_ << YAML::EndMap;
  if (!out_.good()) throw std::logic_error("YAML emitter: " + out_.GetLastError());
  return std::string(out_.c_str()) + "\n";
}

YAML::Node load_yaml(const std::filesystem::path& file, const std::string& schema, const SchemaAdvice& advice) {
  std::error_code ignored;
  std::ifstream stream(file);
  if (!stream || std::filesystem::is_directory(file, ignored)) failf("{}: cannot open this file", file.string());
  const std::string text{std::istreambuf_iterator<char>(stream), {}};
  return parse_yaml(text, file.string(), schema, advice);
}

YAML::Node parse_yaml(const std::string& text, const std::string& source, const std::string& schema,
                      const SchemaAdvice& advice) {
  std::vector<YAML::Node> documents;
  try {
    documents = YAML::LoadAll(text);
  } catch (const YAML::Exception& error) {
    failf("{}:{}: not valid YAML: {}", source, line_of(error.mark), error.msg);
  }
  if (documents.size() != 1) failf("{}:1: must hold one YAML document, has {}", source, documents.size());
  const YAML::Node root = documents.front();
  if (!root.IsMap()) failf("{}:{}: must be a mapping of keys to values", source, line_of(root.Mark()));
  const YAML::Node found = root["schema"];
  if (!found.IsDefined()) {
    failf("{}:1: key \"schema\" is missing; this program reads schema: {}", source, schema);
  }
  if (!found.IsScalar() || found.Scalar() != schema) {
    const std::string text = found.IsScalar() ? found.Scalar() : "a list or mapping";
    const auto known = advice.find(text);
    failf("{}:{}: schema is \"{}\", but this program reads \"{}\" here{}", source, line_of(found.Mark()), text, schema,
          known == advice.end() ? "" : "; " + known->second);
  }
  return root;
}

}  // namespace slidedp
