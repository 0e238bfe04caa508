// How far work has come over time, and its rate in a window of it.
#pragma once

#include <algorithm>
#include <iterator>
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

// Of a window that is not empty.
inline double rate_between(const ProgressCurve& curve, double begin, double end) {
  return (amount_at(curve, end) - amount_at(curve, begin)) / (end - begin);
}

}  // namespace slidedp
