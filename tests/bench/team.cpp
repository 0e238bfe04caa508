#include "tests/bench/team.h"

#include <algorithm>
#include <barrier>
#include <chrono>
#include <cstring>

#include "model/base/types.h"
#include "runtime/host/numa.h"

namespace slidedp::bench {
namespace {

constexpr int64_t kHugePage = int64_t{2} << 20;

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

}  // namespace

struct Team::Control {
  explicit Control(int threads)
      : start(threads + 1), end(threads + 1), began(static_cast<size_t>(threads)), ended(began) {}
  std::barrier<> start, end;
  std::vector<double> began, ended;
  const std::function<void(int)>* work = nullptr;  // null: leave
};

Team::Team(const std::vector<int>& cores, int64_t bytes) {
  const auto threads = static_cast<int64_t>(cores.size());
  part_bytes_ = round_up(ceil_div(bytes, threads), kHugePage);
  memory_ = Arena(part_bytes_ * threads, "The benchmark (--gib)");
  control_ = std::make_unique<Control>(static_cast<int>(threads));
  for (int thread = 0; thread < static_cast<int>(threads); ++thread) {
    threads_.emplace_back([this, thread, core = cores[static_cast<size_t>(thread)]] {
      run_on_cores({core});
      loop(thread);
    });
  }
}

Team::~Team() {
  control_->work = nullptr;
  control_->start.arrive_and_wait();
  threads_.clear();
}

void Team::loop(int thread) {
  const auto index = static_cast<size_t>(thread);
  for (;;) {
    control_->start.arrive_and_wait();
    if (control_->work == nullptr) return;
    control_->began[index] = now();
    (*control_->work)(thread);
    control_->ended[index] = now();
    control_->end.arrive_and_wait();
  }
}

void Team::fill() {
  run([this](int thread) { std::memset(part(thread), 0x3c, static_cast<size_t>(part_bytes_)); });
}

double Team::run(const std::function<void(int)>& work) {
  control_->work = &work;
  control_->start.arrive_and_wait();
  control_->end.arrive_and_wait();
  return *std::max_element(control_->ended.begin(), control_->ended.end()) -
         *std::min_element(control_->began.begin(), control_->began.end());
}

}  // namespace slidedp::bench
