// What changed between two measured profiles, beyond their noise.
#pragma once

#include <string>
#include <vector>

#include "model/spec/hardware_spec.h"

namespace slidedp {

struct FieldChange {
  std::string field;
  double before = 0, after = 0;
  double errors =
      0;  // |after - before| over the standard error of the difference; infinite for exact values that differ
  bool beyond_noise() const { return errors > 2; }
};

struct ProfileDiff {
  std::vector<FieldChange> fields;        // of both profiles, in the files' order; facts that agree are left out
  std::vector<std::string> incomparable;  // why a field is in one profile only, or the machines are not the same
  int beyond_noise() const;
  // More fields are beyond two standard errors than one in five, or one of them is beyond five: chance explains neither
  // (errors of a few rounds have long tails).
  bool changed() const;
};

// Throws Error that names the profile (by `name_*`) that has no uncertainties.
ProfileDiff diff_profiles(const HardwareSpec& before, const std::string& name_before, const HardwareSpec& after,
                          const std::string& name_after);

// One table, a row for each field, and the verdict.
std::string diff_table(const ProfileDiff& diff);

}  // namespace slidedp
