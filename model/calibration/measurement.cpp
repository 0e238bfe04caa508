#include "model/calibration/measurement.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>

#include "model/base/format.h"

namespace slidedp {
namespace {

// Linear interpolation between order statistics.
double quantile(const std::vector<double>& sorted, double q) {
  const double position = q * static_cast<double>(sorted.size() - 1);
  const auto below = static_cast<size_t>(position);
  const size_t above = std::min(below + 1, sorted.size() - 1);
  return sorted[below] + (position - static_cast<double>(below)) * (sorted[above] - sorted[below]);
}

std::vector<double> sorted_copy(std::span<const double> values) {
  if (values.empty()) throw std::logic_error("a median needs at least one value");
  std::vector<double> sorted(values.begin(), values.end());
  std::sort(sorted.begin(), sorted.end());
  return sorted;
}

}  // namespace

double median(std::span<const double> values) { return quantile(sorted_copy(values), 0.5); }

double robust_sigma(std::span<const double> deviations) {
  std::vector<double> magnitudes;
  for (const double deviation : deviations) magnitudes.push_back(std::abs(deviation));
  return 1.4826 * median(magnitudes);  // of normal noise half lies within 1 / 1.4826 standard deviations
}

double relative_error(std::span<const double> values) {
  const std::vector<double> sorted = sorted_copy(values);
  const double middle = quantile(sorted, 0.5);
  const double range = quantile(sorted, 0.75) - quantile(sorted, 0.25);
  if (range == 0) return 0;
  return 1.57 * range / std::sqrt(static_cast<double>(sorted.size())) / std::abs(middle);
}

void add_round(std::vector<Measurement>& all, std::vector<Measurement> more, int round) {
  for (Measurement& measurement : more) {
    measurement.rounds.assign(measurement.repeats.size(), round);
    const auto earlier = std::find_if(all.begin(), all.end(), [&](const Measurement& m) {
      return m.value_name == measurement.value_name && m.parameters == measurement.parameters;
    });
    if (earlier == all.end()) {
      all.push_back(std::move(measurement));
      continue;
    }
    earlier->repeats.insert(earlier->repeats.end(), measurement.repeats.begin(), measurement.repeats.end());
    earlier->rounds.insert(earlier->rounds.end(), measurement.rounds.begin(), measurement.rounds.end());
    earlier->steady = (earlier->steady && measurement.steady) || relative_error(earlier->repeats) < kSteady;
  }
}

std::vector<Measurement> without_round(std::span<const Measurement> all, int round) {
  std::vector<Measurement> rest;
  for (const Measurement& measurement : all) {
    Measurement kept = measurement;
    kept.repeats.clear();
    kept.rounds.clear();
    for (size_t i = 0; i < measurement.repeats.size(); ++i) {
      if (measurement.round_of(i) == round) continue;
      kept.repeats.push_back(measurement.repeats[i]);
      kept.rounds.push_back(measurement.round_of(i));
    }
    if (!kept.repeats.empty()) rest.push_back(std::move(kept));
  }
  return rest;
}

std::vector<const Measurement*> select(std::span<const Measurement> all, const std::string& value_name) {
  std::vector<const Measurement*> chosen;
  for (const Measurement& measurement : all) {
    if (measurement.value_name == value_name) chosen.push_back(&measurement);
  }
  return chosen;
}

const Measurement& find(std::span<const Measurement> all, const std::string& value_name,
                        const std::map<std::string, double>& parameters) {
  for (const Measurement* measurement : select(all, value_name)) {
    const bool match = std::all_of(parameters.begin(), parameters.end(), [&](const auto& wanted) {
      const auto found = measurement->parameters.find(wanted.first);
      return found != measurement->parameters.end() && found->second == wanted.second;
    });
    if (match) return *measurement;
  }
  std::vector<std::string> wanted;
  for (const auto& [name, value] : parameters) wanted.push_back(fmt::format("{} = {}", name, value));
  failf("there is no measurement \"{}\"{}{}", value_name, wanted.empty() ? "" : " with ", fmt::join(wanted, ", "));
}

std::vector<FitSample> fit_samples(std::span<const Measurement* const> measurements, const std::string& work) {
  std::vector<FitSample> samples;
  for (const Measurement* measurement : measurements) {
    const double amount = measurement->parameters.at(work);
    for (double seconds : measurement->repeats) samples.push_back({amount, seconds});
  }
  return samples;
}

}  // namespace slidedp
