#include "tests/model/sim/graphs.h"

#include <algorithm>

namespace slidedp::testing {
namespace {

int64_t giga(double value) { return static_cast<int64_t>(value * 1e9); }

double between(std::mt19937& random, double low, double high) {
  return std::uniform_real_distribution<double>(low, high)(random);
}

bool chance(std::mt19937& random, double probability) { return between(random, 0, 1) < probability; }

int below(std::mt19937& random, int end) { return std::uniform_int_distribution<int>(0, end - 1)(random); }

}  // namespace

HardwareSpec round_machine() {
  HardwareSpec machine;
  machine.gpus = 8;
  machine.device.backend = "cuda";
  machine.pcie.h2d = machine.pcie.d2h = {0, 1};
  machine.pcie.duplex_gbps = 2;
  machine.pcie.root_h2d_gbps = machine.pcie.root_d2h_gbps = 1000;
  machine.collectives.all_gather = machine.collectives.reduce_scatter = machine.collectives.broadcast = {0, 1};
  KernelSpec& kernels = machine.kernels;
  kernels.layer_fwd = kernels.layer_bwd = kernels.head = kernels.embedding = {1, 0};
  kernels.elementwise_gbps = 1;
  machine.host.cores = 1000;
  machine.host.dram_gbps = machine.host.cpu_stream_gbps = 1000;
  machine.host.adam_elements_per_s = machine.host.norm_elements_per_s = 1e9;
  machine.host.source_gbps = 1;
  return machine;
}

GraphMaker::GraphMaker(int ranks, int workers) {
  graph_.plan.ranks = ranks;
  graph_.plan.threads.update = workers;
  graph_.plan.update = UpdatePolicy::deferred;  // an update is then Adam alone
  UnitLayout embedding, layer;
  embedding.kind = UnitKind::embedding;
  embedding.name = "embedding";
  layer.unit = 1;
  layer.kind = UnitKind::layer;
  layer.name = "layer 0";
  graph_.layout.units = {embedding, layer};
}

TaskId GraphMaker::add(TaskKind kind, Lane lane, std::vector<TaskId> deps) {
  Task task;
  task.kind = kind;
  task.lane = lane;
  task.rank = lane.rank;
  task.unit = 1;
  task.deps = std::move(deps);
  graph_.tasks.push_back(task);
  return static_cast<TaskId>(graph_.tasks.size() - 1);
}

TaskId GraphMaker::compute(int rank, double seconds, std::vector<TaskId> deps) {
  const TaskId id = add(TaskKind::fwd, {LaneKind::compute, rank}, std::move(deps));
  at(id).work.flops = seconds * 1e9;
  return id;
}

TaskId GraphMaker::copy(TaskKind kind, int rank, double seconds, std::vector<TaskId> deps) {
  const bool down = kind == TaskKind::h2d || kind == TaskKind::act_h2d;
  const TaskId id = add(kind, {down ? LaneKind::h2d : LaneKind::d2h, rank}, std::move(deps));
  at(id).work.link_bytes = giga(seconds);
  (down ? at(id).work.host_read_bytes : at(id).work.host_write_bytes) = giga(seconds);
  return id;
}

TaskId GraphMaker::collective(TaskKind kind, int rank, int32_t group, double seconds, std::vector<TaskId> deps) {
  const TaskId id = add(kind, {LaneKind::comm, rank}, std::move(deps));
  const double ranks = graph_.ranks();
  at(id).work.link_bytes = giga(kind == TaskKind::broadcast ? seconds : seconds * ranks / (ranks - 1));
  at(id).group = group;
  return id;
}

TaskId GraphMaker::update(double seconds, int32_t need, std::vector<TaskId> deps, int64_t host_bytes) {
  const TaskId id = add(TaskKind::update, {LaneKind::update, -1}, std::move(deps));
  at(id).work.elements = giga(seconds);
  at(id).work.sources = 1;
  at(id).work.host_read_bytes = host_bytes;
  at(id).need = need;
  return id;
}

StepGraph GraphMaker::finish() {
  graph_.lanes.assign(static_cast<size_t>(graph_.ranks() * kDeviceLanes + 1), {});
  for (size_t i = 0; i < graph_.tasks.size(); ++i) {
    graph_.lanes[static_cast<size_t>(graph_.lane_index(graph_.tasks[i].lane))].push_back(static_cast<TaskId>(i));
  }
  return graph_;
}

StepGraph random_graph(std::mt19937& random, const RandomGraphOptions& options) {
  const int ranks = 1 + below(random, 3);
  GraphMaker maker(ranks, options.enough_workers ? 2 * options.max_tasks : 1 + below(random, 3));
  const int count = 2 + below(random, options.max_tasks - 1);
  int32_t groups = 0;
  const auto some_deps = [&](TaskId end) {
    std::vector<TaskId> deps;
    for (TaskId id = std::max(0, end - 6); id < end; ++id) {
      if (chance(random, 0.25)) deps.push_back(id);
    }
    return deps;
  };
  const auto size = [&] { return static_cast<TaskId>(maker.graph().tasks.size()); };
  while (size() < count) {
    const double seconds = between(random, 0.05, 1);
    const int rank = below(random, ranks);
    const std::vector<TaskId> deps = some_deps(size());
    switch (below(random, ranks > 1 ? 6 : 5)) {
      case 0:
      case 1:
        maker.compute(rank, seconds, deps);
        break;
      case 2:
        maker.copy(TaskKind::h2d, rank, seconds, deps);
        break;
      case 3:
        maker.copy(TaskKind::d2h, rank, seconds, deps);
        break;
      case 4:
        maker.update(seconds, below(random, 5), deps, giga(seconds * between(random, 1, 30)));
        break;
      default:
        for (int r = 0; r < ranks; ++r) maker.collective(TaskKind::all_gather, r, groups, seconds, deps);
        ++groups;
    }
    if (chance(random, 0.15)) {
      const int32_t group = maker.at(size() - 1).group;
      for (Task& task : maker.graph().tasks) {
        if (&task == &maker.at(size() - 1) || (group >= 0 && task.group == group)) task.phases = kUpdatePhases;
      }
    }
  }
  for (Task& task : maker.graph().tasks) {
    if (chance(random, 0.3)) task.previous_deps.push_back(below(random, size()));
  }
  return maker.finish();
}

HardwareSpec random_machine(std::mt19937& random) {
  HardwareSpec machine = round_machine();
  if (chance(random, 0.3)) machine.device.backend = "cpu";
  machine.pcie.h2d.latency_s = between(random, 0, 0.05);
  machine.pcie.d2h.latency_s = between(random, 0, 0.05);
  machine.kernels.launch_latency_s = between(random, 0, 0.02);
  machine.collectives.all_gather.latency_s = between(random, 0, 0.02);
  machine.pcie.duplex_gbps = between(random, 1, 2.2);
  machine.pcie.root_h2d_gbps = between(random, 0.8, 3);
  machine.pcie.root_d2h_gbps = between(random, 0.8, 3);
  machine.host.dram_gbps = between(random, 2, 60);
  machine.host.cpu_stream_gbps = between(random, 2, 60);
  machine.host.cores = 1 + below(random, 6);
  if (chance(random, 0.5)) {
    for (CopyContention* copies : {&machine.contention.h2d, &machine.contention.d2h}) {
      *copies = {between(random, 1, 1.5), between(random, 0, 5), between(random, 0, 50)};
    }
    machine.contention.streams = {between(random, 0, 5), between(random, 0, 30), between(random, 0, 30)};
  }
  return machine;
}

}  // namespace slidedp::testing
