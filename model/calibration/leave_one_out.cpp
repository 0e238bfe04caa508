#include "model/calibration/leave_one_out.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <map>

#include "model/calibration/measurement.h"

namespace slidedp {
namespace {

constexpr size_t kFewestWorks = 3;

// Samples by what was done. `predict` fits the samples of all others and predicts the one that was left out.
template <typename Sample, typename Key>
std::vector<double> left_out(std::span<const Sample> samples, const std::function<Key(const Sample&)>& key,
                             const std::function<bool(const Key&)>& counts,
                             const std::function<double(std::span<const Sample> others, const Sample&)>& predict) {
  std::map<Key, std::vector<Sample>> works;
  for (const Sample& sample : samples) works[key(sample)].push_back(sample);
  std::vector<double> errors;
  if (works.size() < kFewestWorks) return errors;
  for (const auto& [left, at] : works) {
    if (!counts(left)) continue;
    std::vector<Sample> others;
    for (const auto& [other, of_other] : works) {
      if (other != left) others.insert(others.end(), of_other.begin(), of_other.end());
    }
    std::vector<double> seconds;
    for (const Sample& sample : at) seconds.push_back(sample.seconds);
    errors.push_back(std::abs(predict(others, at.front()) / median(seconds) - 1));
  }
  return errors;
}

}  // namespace

std::vector<double> unseen_layer_errors(std::span<const LayerSample> samples) {
  using Key = std::array<double, 3>;
  return left_out<LayerSample, Key>(
      samples,
      [](const LayerSample& sample) {
        return Key{sample.work.product_flops, sample.work.attention_flops, sample.work.bytes};
      },
      [](const Key&) { return true; },
      [](std::span<const LayerSample> others, const LayerSample& left) {
        return layer_seconds(fit_layer(others, "leave-one-out").rate, left.work);
      });
}

std::vector<double> unseen_kernel_errors(std::span<const FitSample> samples) {
  return left_out<FitSample, double>(
      samples, [](const FitSample& sample) { return sample.work; }, [](double) { return true; },
      [](std::span<const FitSample> others, const FitSample& left) {
        return kernel_seconds(fit_kernel(others, "leave-one-out").rate, left.work);
      });
}

std::vector<double> unseen_transfer_errors(std::span<const FitSample> samples, double least_bytes) {
  return left_out<FitSample, double>(
      samples, [](const FitSample& sample) { return sample.work; },
      [least_bytes](double bytes) { return bytes >= least_bytes; },
      [](std::span<const FitSample> others, const FitSample& left) {
        const LinkRate rate = fit_link(others, "leave-one-out").rate;
        return rate.latency_s + left.work / (rate.gbps * 1e9);
      });
}

std::vector<double> unseen_concurrent_errors(std::span<const ContentionSample> samples, const HardwareSpec& hardware) {
  std::vector<double> errors;
  for (size_t i = 0; i < samples.size(); ++i) {
    const Together& running = samples[i].running;
    if (running.adam_threads == 0 || !(running.h2d || running.d2h)) continue;
    std::vector<ContentionSample> others(samples.begin(), samples.end());
    others.erase(others.begin() + static_cast<std::ptrdiff_t>(i));
    if (others.empty()) continue;
    const HardwareSpec fitted = with_contention(hardware, fit_contention(others, hardware));
    // The largest rates seen are the caps, and may have been seen where this sample was taken.
    const TogetherRates predicted = predict_uncapped(fitted, running);
    const TogetherRates& measured = samples[i].measured;
    const auto add = [&](bool runs, double a, double b) {
      if (runs) errors.push_back(std::abs(a / b - 1));
    };
    add(running.h2d, predicted.h2d_gbps, measured.h2d_gbps);
    add(running.d2h, predicted.d2h_gbps, measured.d2h_gbps);
    add(true, predicted.adam_gbps, measured.adam_gbps);
  }
  return errors;
}

ErrorSummary summarize(std::vector<double> errors) {
  ErrorSummary summary;
  if (errors.empty()) return summary;
  summary.count = static_cast<int>(errors.size());
  summary.median = median(errors);
  std::sort(errors.begin(), errors.end());
  const auto rank = static_cast<size_t>(std::ceil(0.95 * static_cast<double>(errors.size())));
  summary.p95 = errors[std::max<size_t>(rank, 1) - 1];
  return summary;
}

}  // namespace slidedp
