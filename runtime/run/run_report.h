// What a run reports at its end: prediction beside measurement, and memory beside the plan.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "model/graph/memory.h"
#include "model/sim/simulator.h"
#include "model/timeline/timeline.h"

namespace slidedp {

// Measured steps that enter the comparison: from the third on (the first two fill caches and pipelines). Of the
// timelines the last 64 are kept.
class MeasuredSteps {
 public:
  void add(const Timeline& timeline);
  bool empty() const { return seconds_.empty(); }
  int64_t steps() const { return static_cast<int64_t>(seconds_.size()); }
  MeasuredSeconds median() const;  // of all of them
  const std::vector<Timeline>& timelines() const { return kept_; }

 private:
  std::vector<Timeline> kept_;
  std::vector<double> seconds_;
  int64_t seen_ = 0;
};

// Measured high-water marks of a run.
struct MemoryPeaks {
  int64_t device_buffers = 0;  // largest rank's
  int64_t temporaries = 0;     // all ranks together
  // Of the fullest device, all that is in use there, other processes and the driver's context included, at the run's
  // end: nothing that this process takes is given back before. 0 = not known. Planned: buffers, temporaries and
  // context of the ranks on it.
  int64_t device_used = 0, device_planned = 0;
};

// `steal_share`: of the CPU time that the run wanted, what other guests of the host got; such time is in no prediction.
std::string run_report(const StepGraph& graph, const Simulation& predicted, const MeasuredSteps& measured,
                       const MemoryTable& planned, const MemoryPeaks& peaks, double steal_share);

}  // namespace slidedp
