// What a probe measured, as it is stored: every repeat, and what to make of many of them.
#pragma once

#include <map>
#include <span>
#include <string>
#include <vector>

#include "model/calibration/fit.h"

namespace slidedp {

// One measured quantity at one setting of a probe's parameters, with every repeat.
struct Measurement {
  std::string value_name;  // "seconds", "forward", "cores"
  std::string unit;        // "s", "B", "1"
  std::map<std::string, double> parameters;
  std::vector<double> repeats;   // in the order taken, warm-up excluded
  bool steady = true;            // false: the time limit ended it first
  std::vector<int> rounds = {};  // in which each repeat was taken; empty: all in round 0

  int round_of(size_t repeat) const { return rounds.empty() ? 0 : rounds[repeat]; }
};

// What a median is called steady by: relative_error() below this.
inline constexpr double kSteady = 0.02;

// A profile is measured in rounds: every probe, then every probe again, so that what differs from one time to the next
// (where pages lie, clocks, warmth, other guests of the host) shows. Adds a round's repeats to those of earlier rounds.
void add_round(std::vector<Measurement>& all, std::vector<Measurement> more, int round);
// What was measured in the other rounds.
std::vector<Measurement> without_round(std::span<const Measurement> all, int round);

double median(std::span<const double> values);  // of at least one value
// Standard deviation of what deviates so, if it is normal; outliers hardly count. Of at least one value.
double robust_sigma(std::span<const double> deviations);
// Half-width of the median's error bar over the median: 1.57 * (interquartile range) / sqrt(n) / median.
// Source: McGill, Tukey, Larsen 1978 ("notches" of box plots, about 95 %).
double relative_error(std::span<const double> values);

// Those of one value name, in order.
std::vector<const Measurement*> select(std::span<const Measurement>, const std::string& value_name);
// The only measurement with this name and these parameters (others may differ); throws Error if none.
const Measurement& find(std::span<const Measurement>, const std::string& value_name,
                        const std::map<std::string, double>& parameters = {});
// Every repeat as (parameter `work`, seconds).
std::vector<FitSample> fit_samples(std::span<const Measurement* const>, const std::string& work);

}  // namespace slidedp
