// What the measured timeline costs: every task records an event when it starts beside the one at its end, which the
// tasks that depend on it need anyway. The same copies with and without the first, as the executor issues them, taking
// turns; the median of the rounds.
//
//   timeline_cost [--backend cuda] [--tasks N] [--rounds N] > timeline_cost.json
//
// Per copy size: microseconds a task with and without, until the stream is done and for the issuing thread alone.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>
#include <vector>

#include "model/base/error.h"
#include "model/base/types.h"
#include "runtime/device/backends.h"
#include "runtime/host/arena.h"

namespace slidedp {
namespace {

struct Cost {
  double done_us = 0, issue_us = 0;  // of one task
};

double median(std::vector<double> values) {
  std::ranges::sort(values);
  return values[values.size() / 2];
}

class Lane {
 public:
  Lane(Device& device, int tasks, int64_t bytes, void* host)
      : device_(device),
        tasks_(tasks),
        bytes_(bytes),
        host_(host),
        memory_(device.allocate(bytes, "the copies' target")),
        stream_(device.create_stream("h2d")) {
    for (int i = 0; i < 2 * tasks; ++i) events_.push_back(device.create_event());
  }

  Cost run(bool start_events) {
    using clock = std::chrono::steady_clock;
    const auto microseconds = [&](clock::duration time) {
      return std::chrono::duration<double, std::micro>(time).count() / tasks_;
    };
    const auto begin = clock::now();
    for (int i = 0; i < tasks_; ++i) {
      device_.begin_task(*stream_, "copy");
      if (start_events) device_.record(*stream_, *events_[static_cast<size_t>(2 * i)]);
      device_.copy_to_device(*stream_, memory_.data(), host_, bytes_);
      device_.record(*stream_, *events_[static_cast<size_t>(2 * i + 1)]);
      device_.end_task(*stream_);
    }
    const auto issued = clock::now();
    device_.synchronize(*stream_);
    return {microseconds(clock::now() - begin), microseconds(issued - begin)};
  }

 private:
  Device& device_;
  const int tasks_;
  const int64_t bytes_;
  void* host_;
  DeviceMemory memory_;
  std::unique_ptr<Stream> stream_;
  std::vector<std::unique_ptr<Event>> events_;
};

nlohmann::json measure(Device& device, int64_t bytes, void* host, int tasks, int rounds) {
  Lane lane(device, tasks, bytes, host);
  lane.run(true);  // events of the first round are made
  std::vector<double> done[2], issue[2];
  for (int round = 0; round < rounds; ++round) {
    for (const int with : {0, 1}) {
      const Cost cost = lane.run(with == 1);
      done[with].push_back(cost.done_us);
      issue[with].push_back(cost.issue_us);
    }
  }
  return {{"bytes", bytes},
          {"done_us_without", median(done[0])},
          {"done_us_with", median(done[1])},
          {"issue_us_without", median(issue[0])},
          {"issue_us_with", median(issue[1])}};
}

int run(int argc, char** argv) {
  CLI::App app("Measures what the start events of the timeline cost.");
  std::string backend = "cuda";
  int tasks = 1000, rounds = 9;
  app.add_option("--backend", backend)->capture_default_str();
  app.add_option("--tasks", tasks, "Tasks a round")->check(CLI::Range(1, 100000))->capture_default_str();
  app.add_option("--rounds", rounds)->check(CLI::Range(1, 1000))->capture_default_str();
  CLI11_PARSE(app, argc, argv);
  constexpr int64_t kMiB = int64_t{1} << 20;
  const Backend made = make_backend(backend, 1);
  Device& device = *made.devices.front();
  const Arena arena(4 * kMiB, "the copies' source");
  device.register_host(arena.data(), 4 * kMiB);
  nlohmann::json results = nlohmann::json::array();
  for (const int64_t bytes : {int64_t{256}, kMiB, 4 * kMiB}) {
    results.push_back(measure(device, bytes, arena.data(), tasks, rounds));
  }
  device.unregister_host(arena.data());
  std::cout << results.dump(1) << "\n";
  return 0;
}

}  // namespace
}  // namespace slidedp

int main(int argc, char** argv) { return slidedp::run_program("timeline_cost", slidedp::run, argc, argv); }
