#include "model/spec/overrides.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <limits>

#include "model/base/format.h"
#include "model/spec/spec_fields.h"

namespace slidedp {
namespace {

using Entry = AssignmentTable::Entry;

constexpr std::string_view kTrainPrefix = "train.";

// "pcie.h2d_gbps" and "pcie.h2d.gbps" are the same name.
std::string normal(std::string_view key) {
  std::string text(key);
  std::replace(text.begin(), text.end(), '_', '.');
  return text;
}

// True if `key` names `path` or its last parts.
bool is_tail(std::string_view key, std::string_view path) {
  for (std::string_view tail = path;;) {
    if (normal(tail) == normal(key)) return true;
    const size_t dot = tail.find('.');
    if (dot == std::string_view::npos) return false;
    tail.remove_prefix(dot + 1);
  }
}

std::vector<std::string> paths(const std::vector<Entry>& entries) {
  std::vector<std::string> result;
  for (const Entry& entry : entries) result.push_back(entry.path);
  return result;
}

Entry& find_entry(const std::string& key, AssignmentTable& hardware, AssignmentTable& train) {
  const bool in_train = key.rfind(kTrainPrefix, 0) == 0;
  const std::string_view wanted = std::string_view(key).substr(in_train ? kTrainPrefix.size() : 0);
  std::vector<Entry>& entries = in_train ? train.entries : hardware.entries;
  std::vector<Entry*> found;
  for (Entry& entry : entries) {
    const std::string_view path = std::string_view(entry.path).substr(in_train ? kTrainPrefix.size() : 0);
    if (normal(path) == normal(wanted)) return entry;  // the whole path beats a last part
    if (is_tail(wanted, path)) found.push_back(&entry);
  }
  if (found.size() == 1) return *found.front();
  std::vector<std::string> names;
  if (found.empty()) {
    std::vector<std::string> all = paths(hardware.entries);
    for (const std::string& path : paths(train.entries)) all.push_back(path);
    names = nearest(key, all, 3);
    failf("--set: there is no key \"{}\"; the nearest are {}", key, fmt::join(names, ", "));
  }
  for (const Entry* entry : found) names.push_back(entry->path);
  failf("--set: key \"{}\" could be any of {}; write the whole key", key, fmt::join(names, ", "));
}

double parse_factor(const std::string& text, const std::string& where) {
  double factor = 0;
  parse_value(std::string_view(text).substr(1), where + ", whose factor", kPositive, factor);
  return factor;
}

template <typename Number>
void multiply(Number& value, double factor, const std::string& where, const Rule& rule) {
  if constexpr (std::is_same_v<Number, double>) {
    parse_value(format_value(value * factor), where, rule, value);
  } else if constexpr (std::is_same_v<Number, int> || std::is_same_v<Number, int64_t>) {
    const double product = static_cast<double>(value) * factor;
    const double rounded = std::round(product);
    // A share of a byte is nothing to complain about; half a GPU is.
    if (!rule.bytes && rounded != product) {
      failf("{} is {}; times {} it would be {}, but it must stay an integer", where, value, factor, product);
    }
    parse_value(fmt::format("{:.0f}", rounded), where, rule, value);
  } else {
    failf("{} cannot be multiplied; write a value", where);
  }
}

void assign(const Entry& entry, const std::string& text) {
  const std::string where = fmt::format("--set: key \"{}\"", entry.path);
  std::visit(
      [&](auto* target) {
        if (!text.empty() && text.front() == '*') {
          multiply(*target, parse_factor(text, where), where, entry.rule);
        } else {
          parse_value(text, where, entry.rule, *target);
        }
      },
      entry.target);
}

}  // namespace

void apply_set(const std::string& assignment, HardwareSpec& hardware, TrainSpec& train) {
  const size_t equals = assignment.find('=');
  if (equals == std::string::npos || equals == 0) {
    failf("--set {}: write key=value, for example --set gpus=8 or --set pcie.h2d_gbps=*2", assignment);
  }
  HardwareSpec new_hardware = hardware;
  TrainSpec new_train = train;
  AssignmentTable hardware_table("");
  AssignmentTable train_table{std::string(kTrainPrefix)};
  fields(hardware_table, new_hardware);
  fields(train_table, new_train);
  const Entry& entry = find_entry(assignment.substr(0, equals), hardware_table, train_table);
  assign(entry, assignment.substr(equals + 1));
  // What was measured of the old value says nothing about the new one.
  std::erase_if(new_hardware.uncertainty.standard_errors,
                [&](const FieldError& error) { return error.field == entry.path; });
  if (const auto problem = check_hardware(new_hardware)) {
    failf("--set {}: key \"{}\" {}", assignment, problem->key, problem->message);
  }
  if (const auto problem = check_train(new_train)) {
    failf("--set {}: key \"{}{}\" {}", assignment, kTrainPrefix, problem->key, problem->message);
  }
  hardware = new_hardware;
  train = new_train;
}

}  // namespace slidedp
