// Corrects a hardware profile from what runs took: one factor for the rates of each group of tasks.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "model/calibration/run_log_reader.h"
#include "model/spec/hardware_spec.h"

namespace slidedp {

// Of one group of tasks that the runs have.
struct GroupCorrection {
  RateGroup group{};
  double factor = 1;          // on the group's rates
  double standard_error = 0;  // of the factor
  // Busy time on held-out steps: predicted over measured - 1, by the profile as it was and as corrected on the rest.
  double error_before = 0, error_after = 0;
};

struct Recalibration {
  HardwareSpec hardware;  // corrected on all steps
  std::vector<GroupCorrection> groups;
  double step_error_before = 0, step_error_after = 0;  // of the step time, held out
  std::string held_out;                                // what was: "run.db, run 2" or "the later half of the steps"
  std::vector<std::string> refused;                    // runs that were disturbed, and why
};

// Why nothing is to be learnt from a run; empty if it was quiet. Steps may vary by 5 % (robust standard deviation),
// other guests of the host may have taken 2 % of the CPU time, and there must be four steps.
std::string disturbance(const LoggedRun& run);

// The factors that make simulate() meet the measured busy times of the groups best, robust and drawn towards 1 (a
// profile is taken to be right within 25 % before anything is known). Groups are corrected together through the
// simulator, so that shared limits are respected. With several runs the last one is held out to judge the correction,
// with one the later half of its steps. Throws Error if every run was disturbed.
Recalibration recalibrate(std::span<const LoggedRun> runs, const HardwareSpec& hardware);

// A table of the groups, and the step time.
std::string recalibration_table(const Recalibration& result);

}  // namespace slidedp
