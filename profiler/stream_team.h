// Threads that stream through memory at the same time, and their rate as the update workers add up.
#pragma once

#include <cstddef>
#include <exception>
#include <functional>
#include <latch>
#include <stop_token>
#include <thread>
#include <vector>

#include "profiler/progress_curve.h"
#include "runtime/host/worker_cores.h"

namespace slidedp {

// Ties the calling thread to its core as the executor ties its update workers: `others` threads keep cores of their
// own. Nothing where the cores do not suffice. A worker all alone speaks for every core, so it gets another one after
// each turn(): virtual cores differ, as some share a physical core with a busy one.
class WorkerCores {
 public:
  WorkerCores(int workers, int others);
  void take(int worker) const;
  void turn() { ++turn_; }

 private:
  bool tours_;
  std::vector<WorkerPlace> places_;
  size_t turn_ = 0;
};

// One call of a worker's stream, a few milliseconds at most; returns the amount done (bytes, elements).
using StreamWork = std::function<double(int worker)>;

// Workers that go on calling their work from construction until finish(). One call each comes before and is not
// counted. The work and the cores must outlive it.
class StreamTeam {
 public:
  // Returns when all workers are at work.
  StreamTeam(int workers, const WorkerCores& cores, const StreamWork& work);

  // Amount done by each worker, from before the constructor returned until after this call, so there is a window in
  // which all of them run. Rethrows what a worker's call threw.
  std::vector<ProgressCurve> finish();

 private:
  void run(const std::stop_token& stop, int worker, const WorkerCores& cores, const StreamWork& work);

  std::vector<ProgressCurve> curves_;
  std::vector<std::exception_ptr> errors_;
  std::latch at_work_;
  std::vector<std::jthread> threads_;  // last: stopped and joined before the rest goes
};

// Sum over the workers of each one's rate while all of them run, about `window_s` seconds: a slow worker takes from it
// what it falls behind and no more, as where workers take chunks from one queue.
double rate_together(int workers, const WorkerCores& cores, double window_s, const StreamWork& work);

}  // namespace slidedp
