#include "profiler/adam_slice.h"

#include <algorithm>
#include <set>

namespace slidedp {

int planned_threads(const ProbeContext& context) { return std::max(1, context.cores - 2); }

std::vector<int> thread_counts(const ProbeContext& context) {
  std::set<int> counts{1, context.cores};
  if (!context.quick) {
    counts.insert({planned_threads(context), context.cores / 4, context.cores / 2});
    counts.erase(0);
  }
  return {counts.begin(), counts.end()};
}

}  // namespace slidedp
