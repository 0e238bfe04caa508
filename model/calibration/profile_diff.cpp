#include "model/calibration/profile_diff.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>

#include "model/base/format.h"

namespace slidedp {
namespace {

// Beyond it even the long tails of an error from a few rounds do not reach.
constexpr double kFarBeyond = 5;
// The share of fields beyond two standard errors that the errors promise to stay below.
constexpr double kPromisedShare = 0.2;

void check(const HardwareSpec& spec, const std::string& name) {
  if (spec.uncertainty.known()) return;
  failf(
      "{}: has no section \"uncertainty\", so noise cannot be told from change; measure it with slidedp-profile, or "
      "fit its samples again with slidedp-plan --calibrate.",
      name);
}

std::map<std::string, double> values_of(const HardwareSpec& spec) {
  std::map<std::string, double> values;
  for (const NamedValue& value : named_values(spec)) values[value.field] = value.value;
  return values;
}

// The difference over its standard error.
double in_errors(double difference, const FieldError* before, const FieldError* after) {
  if (difference == 0) return 0;
  const double error = std::hypot(before == nullptr ? 0 : before->value, after == nullptr ? 0 : after->value);
  return error > 0 ? std::abs(difference) / error : std::numeric_limits<double>::infinity();
}

void compare_setting(const char* what, const std::string& before, const std::string& after, ProfileDiff& diff) {
  if (before != after) diff.incomparable.push_back(fmt::format("{}: {} before, {} after", what, before, after));
}

}  // namespace

int ProfileDiff::beyond_noise() const {
  return static_cast<int>(
      std::count_if(fields.begin(), fields.end(), [](const FieldChange& change) { return change.beyond_noise(); }));
}

bool ProfileDiff::changed() const {
  return beyond_noise() > kPromisedShare * static_cast<double>(fields.size()) ||
         std::any_of(fields.begin(), fields.end(), [](const FieldChange& c) { return c.errors > kFarBeyond; });
}

ProfileDiff diff_profiles(const HardwareSpec& before, const std::string& name_before, const HardwareSpec& after,
                          const std::string& name_after) {
  check(before, name_before);
  check(after, name_after);
  ProfileDiff diff;
  const Uncertainty &a = before.uncertainty, &b = after.uncertainty;
  compare_setting("processor", a.processor, b.processor, diff);
  compare_setting("GPU", a.gpu, b.gpu, diff);
  compare_setting("kernel shapes", a.kernel_shapes, b.kernel_shapes, diff);
  compare_setting("--quick", a.quick ? "yes" : "no", b.quick ? "yes" : "no", diff);
  const std::map<std::string, double> after_values = values_of(after);
  for (const NamedValue& value : named_values(before)) {
    const FieldError *error = a.error_of(value.field), *other = b.error_of(value.field);
    const double now = after_values.at(value.field);
    const bool exact = error == nullptr && other == nullptr;
    if (exact && value.value == now) continue;
    if (!exact && (error == nullptr || other == nullptr)) {
      diff.incomparable.push_back(
          fmt::format("{}: was measured {} only", value.field, error == nullptr ? "after" : "before"));
      continue;
    }
    diff.fields.push_back({value.field, value.value, now, in_errors(now - value.value, error, other)});
  }
  return diff;
}

std::string diff_table(const ProfileDiff& diff) {
  std::string text = fmt::format("{:<36}{:>14}{:>14}{:>10}{:>10}\n", "field", "before", "after", "change", "errors");
  for (const FieldChange& change : diff.fields) {
    const std::string relative =
        change.before == 0 ? "" : fmt::format("{:+.1f} %", 100 * (change.after / change.before - 1));
    text += fmt::format("{:<36}{:>14.6g}{:>14.6g}{:>10}{:>10.1f}{}\n", change.field, change.before, change.after,
                        relative, change.errors, change.beyond_noise() ? "  beyond noise" : "");
  }
  for (const std::string& line : diff.incomparable) text += line + "\n";
  return text + fmt::format("{} of {} values differ by more than two standard errors: {}\n", diff.beyond_noise(),
                            diff.fields.size(), diff.changed() ? "the machine has changed" : "no more than noise");
}

}  // namespace slidedp
