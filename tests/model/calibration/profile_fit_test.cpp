// From samples to a profile with uncertainties, and what two such profiles say about each other.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <map>

#include "model/base/error.h"
#include "model/calibration/profile_diff.h"
#include "model/calibration/profile_record.h"
#include "tests/support/synthetic_profile.h"

namespace slidedp::test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

HardwareSpec start() { return empty_profile({"node", "a processor", "Linux 6", 16, 0, 0, "a GPU"}, "cuda", 1); }

HardwareSpec fitted(const Noise& noise, unsigned seed, int rounds = 3, const HardwareSpec& truth = true_machine()) {
  ProfileRun run = SyntheticProfile(truth, noise, seed, rounds).run();
  fit_profile(run, start());
  return run.spec;
}

std::map<std::string, double> values_of(const HardwareSpec& spec) {
  std::map<std::string, double> values;
  for (const NamedValue& value : named_values(spec)) values[value.field] = value.value;
  return values;
}

TEST(Rounds, AddUpAndAreLeftOut) {
  std::vector<Measurement> all;
  add_round(all, {{"seconds", "s", {{"bytes", 1}}, {1, 2}, true}, {"seconds", "s", {{"bytes", 2}}, {5}, true}}, 0);
  add_round(all, {{"seconds", "s", {{"bytes", 1}}, {3}, true}, {"hop", "s", {}, {7}, true}}, 1);
  ASSERT_EQ(all.size(), 3u);
  EXPECT_THAT(all[0].repeats, ElementsAre(1, 2, 3));
  EXPECT_THAT(all[0].rounds, ElementsAre(0, 0, 1));
  EXPECT_EQ(all[2].round_of(0), 1);
  const std::vector<Measurement> rest = without_round(all, 0);
  ASSERT_EQ(rest.size(), 2u) << "what was measured in that round only is gone";
  EXPECT_THAT(rest[0].repeats, ElementsAre(3));
  EXPECT_EQ(rest[1].value_name, "hop");
  EXPECT_THAT(without_round(all, 1)[1].repeats, ElementsAre(5));
}

TEST(ProfileFit, RecoversTheMachineWithinItsErrors) {
  const std::map<std::string, double> truth = values_of(true_machine());
  const HardwareSpec spec = fitted({0.01, 0.01, 0, 0.03}, 7);
  const Uncertainty& uncertainty = spec.uncertainty;
  int fields = 0, near = 0;
  for (const NamedValue& value : named_values(spec)) {
    const FieldError* error = uncertainty.error_of(value.field);
    if (error == nullptr) continue;
    ++fields;
    near += std::abs(value.value - truth.at(value.field)) <= 3 * error->value;
  }
  EXPECT_GE(fields, 26) << "every measured value has an error";
  // Of three rounds an error is known to half of itself only, so a few values lie beyond three errors.
  EXPECT_GE(near, fields - 2);
  EXPECT_EQ(spec.host.memory_bytes, true_machine().host.memory_bytes);
  EXPECT_EQ(uncertainty.error_of("host.cores"), nullptr) << "facts are exact";
  ASSERT_EQ(uncertainty.waived.size(), 1u);
  EXPECT_EQ(uncertainty.waived[0].reason, "one GPU has nobody to exchange data with");
  EXPECT_EQ(uncertainty.measured_at, "2026-09-21 14:13:20 UTC");
  EXPECT_EQ(uncertainty.rounds, 3);
  EXPECT_EQ(uncertainty.gpu, "a GPU");
  ASSERT_EQ(uncertainty.fits.size(), 7u);
  EXPECT_EQ(uncertainty.fits[0].fit, "copy.h2d");
  EXPECT_FALSE(uncertainty.fits[0].structured);
  EXPECT_EQ(uncertainty.correlations[0].first, "pcie.h2d.gbps");
  EXPECT_EQ(uncertainty.correlations[0].second, "pcie.h2d.latency_s");
  EXPECT_LT(std::abs(uncertainty.correlations[0].value), 1);
}

TEST(ProfileFit, RoundsThatDifferWidenTheErrors) {
  // Repeats agree within 0.1 %, rounds within 4 %. An estimate from three rounds is within a factor of five of the
  // truth in 98 % of all cases; four of five fields suffice.
  const HardwareSpec spec = fitted({0.001, 0.04, 0, 0}, 3);
  int wide = 0;
  for (const char* field : {"pcie.duplex_gbps", "host.norm_elements_per_s", "kernels.elementwise_gbps",
                            "kernels.launch_latency_s", "kernels.layer_fwd.peak_gflops"}) {
    const double relative = spec.uncertainty.error_of(field)->value / values_of(spec).at(field);
    EXPECT_LT(relative, 0.04 * 5) << field;
    wide += relative > 0.04 / 5;
  }
  EXPECT_GE(wide, 4);
  const HardwareSpec quiet = fitted({0.001, 0, 0, 0}, 3);
  EXPECT_NEAR(quiet.uncertainty.error_of("pcie.duplex_gbps")->value / quiet.pcie.duplex_gbps, 0.0025, 1e-4)
      << "the floor";
}

TEST(ProfileFit, WhatWasNotMeasuredKeepsItsUncertainty) {
  const HardwareSpec before = fitted({}, 1);
  ProfileRun again = SyntheticProfile(true_machine(), {}, 2).run();
  std::erase_if(again.outcomes, [](const ProbeOutcome& outcome) { return outcome.key != "copy.h2d"; });
  again.started_unix_s += 86400;
  fit_profile(again, before);
  const Uncertainty &now = again.spec.uncertainty, &old = before.uncertainty;
  EXPECT_EQ(now.standard_errors.size(), old.standard_errors.size());
  EXPECT_EQ(*now.error_of("host.norm_elements_per_s"), *old.error_of("host.norm_elements_per_s"));
  EXPECT_NE(*now.error_of("pcie.h2d.gbps"), *old.error_of("pcie.h2d.gbps"));
  EXPECT_EQ(now.waived, old.waived);
  EXPECT_EQ(now.fits.size(), old.fits.size());
  EXPECT_EQ(now.correlations.size(), old.correlations.size());
  EXPECT_EQ(now.measured_at, "2026-09-22 14:13:20 UTC");
}

TEST(ProfileFit, SectionIsWrittenAndReadBack) {
  HardwareSpec spec = fitted({}, 1);
  spec.uncertainty.notes = {"a note: with \"quotes\" and 5 %"};
  spec.uncertainty.corrections = {{"update", 0.93, 0.02}};
  const std::filesystem::path file = std::filesystem::path(::testing::TempDir()) / "uncertain.yaml";
  spec.collectives = {{1e-6, 3}, {1e-6, 4}, {1e-6, 5}};
  std::ofstream(file) << to_yaml(spec);
  EXPECT_EQ(load_hardware_spec(file), spec);
  std::filesystem::remove(file);
}

// Profiles in a row of a machine that differs from round to round and, as pages lie elsewhere, from run to run as much
// again. The promise: at least 80 % of the differences within twice their standard error.
TEST(ProfileDiff, ErrorsPredictTheDifferencesOfProfilesInARow) {
  int fields = 0, within = 0, changed = 0;
  for (unsigned seed = 1; seed <= 20; ++seed) {
    const Noise noise{0.01, 0.01, 0.01, 0.03};
    const ProfileDiff diff = diff_profiles(fitted(noise, 2 * seed), "a", fitted(noise, 2 * seed + 1), "b");
    EXPECT_THAT(diff.incomparable, ElementsAre());
    fields += static_cast<int>(diff.fields.size());
    within += static_cast<int>(diff.fields.size()) - diff.beyond_noise();
    changed += diff.changed();
  }
  EXPECT_GE(within, 0.8 * fields);
  EXPECT_LE(changed, 4) << "a false alarm in one of five at most";
}

TEST(ProfileDiff, ABusyMemoryIsSeenAndNamed) {
  HardwareSpec slow = true_machine();
  slow.host.cpu_stream_gbps *= 0.6;
  slow.host.dram_gbps *= 0.6;
  slow.host.norm_elements_per_s *= 0.7;
  const Noise noise{0.01, 0.005, 0, 0};
  const ProfileDiff diff = diff_profiles(fitted(noise, 1), "a", fitted(noise, 2, 3, slow), "b");
  EXPECT_TRUE(diff.changed());
  const std::string table = diff_table(diff);
  EXPECT_THAT(table, HasSubstr("host.norm_elements_per_s"));
  EXPECT_THAT(table, HasSubstr("the machine has changed"));
  for (const FieldChange& change : diff.fields) {
    if (change.field == "host.norm_elements_per_s") {
      EXPECT_TRUE(change.beyond_noise());
      EXPECT_NEAR(change.after / change.before, 0.7, 0.05);
    }
  }
  const ProfileDiff same = diff_profiles(fitted(noise, 1), "a", fitted(noise, 1), "b");
  EXPECT_FALSE(same.changed());
  EXPECT_EQ(same.beyond_noise(), 0);
}

TEST(ProfileDiff, RefusesProfilesWithoutUncertaintiesAndSaysWhatDiffers) {
  const auto message = [](const HardwareSpec& before, const HardwareSpec& after) -> std::string {
    try {
      diff_profiles(before, "old.yaml", after, "new.yaml");
    } catch (const Error& error) {
      return error.what();
    }
    return "accepted";
  };
  const HardwareSpec measured = fitted({}, 1);
  HardwareSpec bare = measured;
  bare.uncertainty = {};
  EXPECT_THAT(message(bare, measured), HasSubstr("old.yaml"));
  EXPECT_THAT(message(measured, bare), HasSubstr("new.yaml"));
  HardwareSpec other = measured;
  other.uncertainty.gpu = "another GPU";
  other.host.cores = 8;
  const ProfileDiff diff = diff_profiles(measured, "a", other, "b");
  EXPECT_TRUE(diff.changed()) << "an exact value differs";
  EXPECT_THAT(diff_table(diff), HasSubstr("GPU: a GPU before, another GPU after"));
}

}  // namespace
}  // namespace slidedp::test
