#include "profiler/stream_team.h"

#include <chrono>
#include <cstddef>
#include <numeric>

#include "runtime/device/clock.h"

namespace slidedp {
namespace {

// A tour over all cores that reaches distant ones first.
size_t tour_step(size_t cores) {
  size_t step = cores * 3 / 8 + 1;
  while (std::gcd(step, cores) != 1) ++step;
  return step;
}

}  // namespace

WorkerCores::WorkerCores(int workers, int others)
    : tours_(workers == 1 && others == 0),
      places_(tours_ ? worker_places(numa_nodes(), static_cast<int>(allowed_cores().size()), 0)
                     : worker_places(numa_nodes(), workers, others)) {}

void WorkerCores::take(int worker) const {
  if (places_.empty()) return;
  const size_t place = tours_ ? turn_ * tour_step(places_.size()) % places_.size() : static_cast<size_t>(worker);
  run_on_cores({places_[place].core});
}

StreamTeam::StreamTeam(int workers, const WorkerCores& cores, const StreamWork& work)
    : curves_(static_cast<size_t>(workers)), errors_(static_cast<size_t>(workers)), at_work_(workers) {
  for (int worker = 0; worker < workers; ++worker) {
    threads_.emplace_back(
        [this, worker, &cores, &work](const std::stop_token& stop) { run(stop, worker, cores, work); });
  }
  at_work_.wait();
}

std::vector<ProgressCurve> StreamTeam::finish() {
  for (std::jthread& thread : threads_) thread.request_stop();
  threads_.clear();
  for (const std::exception_ptr& error : errors_) {
    if (error) std::rethrow_exception(error);
  }
  return std::move(curves_);
}

void StreamTeam::run(const std::stop_token& stop, int worker, const WorkerCores& cores, const StreamWork& work) {
  const auto index = static_cast<size_t>(worker);
  ProgressCurve& curve = curves_[index];
  bool at_work = false;
  try {
    cores.take(worker);
    work(worker);
    double amount = 0;
    curve.push_back({process_seconds(), amount});
    at_work = true;
    at_work_.count_down();
    for (bool last = false; !last;) {
      last = stop.stop_requested();  // asked before the call, so that the curve ends after the stop
      amount += work(worker);
      curve.push_back({process_seconds(), amount});
    }
  } catch (...) {
    errors_[index] = std::current_exception();
    if (!at_work) at_work_.count_down();
  }
}

double rate_together(int workers, const WorkerCores& cores, double window_s, const StreamWork& work) {
  StreamTeam team(workers, cores, work);
  std::this_thread::sleep_for(std::chrono::duration<double>(window_s));
  const std::vector<ProgressCurve> curves = team.finish();
  return summed_rate(curves, common_window(curves));
}

}  // namespace slidedp
