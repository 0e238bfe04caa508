// How far work has come over time, and its rate in a window of it.
#pragma once

#include <algorithm>
#include <iterator>
#include <limits>
#include <span>
#include <vector>

namespace slidedp {

struct ProgressPoint {
  double seconds;  // of this process's clock
  double amount;   // done until then
};
// Of one worker or lane; ascending in both. Work between two points goes on evenly.
using ProgressCurve = std::vector<ProgressPoint>;

// Done at a time; before the first point and after the last one that point's amount.
inline double amount_at(const ProgressCurve& curve, double seconds) {
  if (curve.empty()) return 0;
  const auto after = std::upper_bound(curve.begin(), curve.end(), seconds,
                                      [](double time, const ProgressPoint& point) { return time < point.seconds; });
  if (after == curve.begin()) return curve.front().amount;
  if (after == curve.end()) return curve.back().amount;
  const ProgressPoint &from = *std::prev(after), &to = *after;
  return from.amount + (to.amount - from.amount) * (seconds - from.seconds) / (to.seconds - from.seconds);
}

struct Window {
  double begin = 0, end = std::numeric_limits<double>::infinity();  // of this process's clock, in seconds
  bool empty() const { return !(begin < end); }
};

// In which all of them run. None of the curves is empty.
inline Window common_window(std::span<const ProgressCurve> curves) {
  Window window;
  for (const ProgressCurve& curve : curves) {
    window.begin = std::max(window.begin, curve.front().seconds);
    window.end = std::min(window.end, curve.back().seconds);
  }
  return window;
}

// In a window that is not empty.
inline double rate_in(const ProgressCurve& curve, const Window& window) {
  return (amount_at(curve, window.end) - amount_at(curve, window.begin)) / (window.end - window.begin);
}
inline double summed_rate(std::span<const ProgressCurve> curves, const Window& window) {
  double rate = 0;
  for (const ProgressCurve& curve : curves) rate += rate_in(curve, window);
  return rate;
}

}  // namespace slidedp
