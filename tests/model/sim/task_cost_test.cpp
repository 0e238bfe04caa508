#include "model/sim/task_cost.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "model/base/error.h"
#include "tests/model/sim/graphs.h"

namespace slidedp {
namespace {

using testing::GraphMaker;
using testing::round_machine;

// What a cost demands of the resource of that name; 0 if nothing.
double demanded(const CostModel& model, const TaskCost& cost, const std::string& name) {
  for (const Demand& demand : cost.demands) {
    if (model.resources()[static_cast<size_t>(demand.resource)].name == name) return demand.amount;
  }
  return 0;
}

TEST(TaskCost, CopyTakesLatencyAndLinkTime) {
  GraphMaker maker(2);
  const TaskId down = maker.copy(TaskKind::h2d, 1, 0.5);
  const TaskId up = maker.copy(TaskKind::d2h, 0, 0.5);
  const StepGraph graph = maker.finish();
  HardwareSpec machine = round_machine();
  machine.pcie.h2d = {0.25, 2};
  machine.pcie.d2h = {0.125, 4};
  machine.pcie.duplex_gbps = 5;
  const CostModel model(graph, machine);
  const TaskCost h2d = model.cost(graph.tasks[static_cast<size_t>(down)]);
  EXPECT_DOUBLE_EQ(h2d.latency_s, 0.25);
  EXPECT_DOUBLE_EQ(h2d.solo_s, 0.25);
  EXPECT_DOUBLE_EQ(h2d.alone_s(), 0.5);
  for (const char* name : {"rank 1 h2d link", "rank 1 duplex link", "root h2d", "host DRAM"}) {
    EXPECT_DOUBLE_EQ(demanded(model, h2d, name), 5e8) << name;
  }
  EXPECT_EQ(h2d.demands.size(), 4u);
  const TaskCost d2h = model.cost(graph.tasks[static_cast<size_t>(up)]);
  EXPECT_DOUBLE_EQ(d2h.alone_s(), 0.125 + 0.125);
  EXPECT_DOUBLE_EQ(demanded(model, d2h, "rank 0 d2h link"), 5e8);
  EXPECT_DOUBLE_EQ(demanded(model, d2h, "root d2h"), 5e8);
}

TEST(TaskCost, UpdateReadsFurtherSourcesAtTheirOwnRate) {
  GraphMaker maker(1);
  const TaskId id = maker.update(0.1, 0, {}, 1000);
  maker.at(id).work.sources = 3;
  maker.graph().plan.wire = DType::bf16;
  const StepGraph graph = maker.finish();
  HardwareSpec machine = round_machine();
  machine.host.adam_elements_per_s = 5e8;
  machine.host.source_gbps = 4;
  const CostModel model(graph, machine);
  const TaskCost cost = model.cost(graph.tasks[0]);
  // 1e8 elements at 5e8 / s, and twice 2e8 bytes at 4e9 / s.
  EXPECT_DOUBLE_EQ(cost.alone_s(), 0.2 + 0.1);
  EXPECT_DOUBLE_EQ(demanded(model, cost, "CPU cores"), 0.3);
  EXPECT_DOUBLE_EQ(demanded(model, cost, "CPU streaming"), 1000);
  EXPECT_DOUBLE_EQ(demanded(model, cost, "host DRAM"), 1000);

  StepGraph eager = graph;
  eager.plan.update = UpdatePolicy::eager;  // with the norm, 1e8 elements at 1e9 / s
  EXPECT_DOUBLE_EQ(CostModel(eager, machine).cost(eager.tasks[0]).alone_s(), 0.2 + 0.1 + 0.1);

  Task norm = graph.tasks[0];
  norm.kind = TaskKind::norm;
  EXPECT_DOUBLE_EQ(model.cost(norm).alone_s(), 0.1 + 0.1);  // 1e8 elements at 1e9 / s
  Task accumulate = graph.tasks[0];
  accumulate.kind = TaskKind::host_accumulate;
  accumulate.work.host_write_bytes = 7000;
  EXPECT_DOUBLE_EQ(model.cost(accumulate).alone_s(), 8000 / 4e9);
}

TEST(TaskCost, PassesOfASplitUpdateHaveTheirOwnRates) {
  GraphMaker maker(1);
  maker.update(0.1, 0);
  const StepGraph graph = maker.finish();
  HardwareSpec machine = round_machine();
  machine.host.adam_elements_per_s = 9e8;
  Task task = graph.tasks[0];
  const auto seconds = [&](UpdatePart part) {
    task.part = part;
    return CostModel(graph, machine).cost(task).alone_s();
  };
  // Not measured: 18 of the 26 bytes that the whole update moves.
  EXPECT_DOUBLE_EQ(seconds(UpdatePart::whole), 1e8 / 9e8);
  EXPECT_DOUBLE_EQ(seconds(UpdatePart::weights), 1e8 / 13e8);
  EXPECT_DOUBLE_EQ(seconds(UpdatePart::moments), 1e8 / 13e8);
  machine.host.split_weights_elements_per_s = 2e9;
  machine.host.split_moments_elements_per_s = 4e9;
  EXPECT_DOUBLE_EQ(seconds(UpdatePart::whole), 1e8 / 9e8);
  EXPECT_DOUBLE_EQ(seconds(UpdatePart::weights), 0.05);
  EXPECT_DOUBLE_EQ(seconds(UpdatePart::moments), 0.025);
}

TEST(TaskCost, AStreamCapSlowsOneWorkerToo) {
  GraphMaker maker(1);
  maker.update(0.1, 0, {}, 2'000'000'000);
  const StepGraph graph = maker.finish();
  HardwareSpec machine = round_machine();
  machine.host.cpu_stream_gbps = 10;
  EXPECT_DOUBLE_EQ(CostModel(graph, machine).cost(graph.tasks[0]).solo_s, 0.2);
}

TEST(TaskCost, CollectivesMoveTheBusShareOfTheBuffer) {
  GraphMaker maker(4);
  const TaskId id = maker.collective(TaskKind::all_gather, 0, 0, 0.3);
  Task task = maker.finish().tasks[static_cast<size_t>(id)];
  task.work.link_bytes = 400'000'000;
  const StepGraph graph = maker.finish();
  HardwareSpec machine = round_machine();
  machine.collectives.all_gather = {0.5, 1};
  machine.collectives.reduce_scatter = {0.25, 2};
  machine.collectives.broadcast = {0.125, 4};
  const CostModel model(graph, machine);
  EXPECT_DOUBLE_EQ(model.cost(task).alone_s(), 0.5 + 0.3);
  task.kind = TaskKind::reduce_scatter;
  EXPECT_DOUBLE_EQ(model.cost(task).alone_s(), 0.25 + 0.15);
  task.kind = TaskKind::broadcast;  // nccl-tests: the bus carries all of it
  EXPECT_DOUBLE_EQ(model.cost(task).alone_s(), 0.125 + 0.1);
}

TEST(TaskCost, KernelsHaveTheirClassesRate) {
  GraphMaker maker(1);
  maker.compute(0, 2);
  const StepGraph graph = maker.finish();
  HardwareSpec machine = round_machine();
  machine.kernels.launch_latency_s = 0.5;
  machine.kernels.layer_fwd = {1, 1};
  machine.kernels.layer_bwd = {2, 0};
  machine.kernels.head = {4, 0};
  machine.kernels.embedding = {8, 0};
  machine.kernels.elementwise_gbps = 16;
  const CostModel model(graph, machine);
  Task task = graph.tasks[0];
  EXPECT_DOUBLE_EQ(model.cost(task).alone_s(), 0.5 + 3);  // (2 + half) / peak
  task.kind = TaskKind::recompute;
  EXPECT_DOUBLE_EQ(model.cost(task).alone_s(), 0.5 + 3);
  task.kind = TaskKind::bwd;
  EXPECT_DOUBLE_EQ(model.cost(task).alone_s(), 0.5 + 1);
  task.kind = TaskKind::head;
  EXPECT_DOUBLE_EQ(model.cost(task).alone_s(), 0.5 + 0.5);
  task.unit = 0;
  task.kind = TaskKind::bwd;
  EXPECT_DOUBLE_EQ(model.cost(task).alone_s(), 0.5 + 0.25);
  EXPECT_DOUBLE_EQ(demanded(model, model.cost(task), "rank 0 compute units"), 0.25);
  task.kind = TaskKind::cast;
  task.work.device_bytes = 8'000'000'000;
  EXPECT_DOUBLE_EQ(model.cost(task).alone_s(), 0.5 + 0.5);
}

// A layer's kernels are measured as a whole: what they take beside flops is shared out to its blocks.
TEST(TaskCost, BlocksTakeTogetherWhatTheLayerTakes) {
  GraphMaker maker(1);
  maker.compute(0, 2);
  const StepGraph graph = maker.finish();
  HardwareSpec machine = round_machine();
  machine.kernels.launch_latency_s = 0.5;
  machine.kernels.layer_fwd = {1, 1};
  const CostModel model(graph, machine);
  Task task = graph.tasks[0];
  const double whole = model.cost(task).alone_s();
  task.work.flops *= 0.25;
  task.work.share = 0.25;
  EXPECT_DOUBLE_EQ(model.cost(task).alone_s(), 0.25 * whole);
  EXPECT_DOUBLE_EQ(model.cost(task).latency_s, 0.125);
}

TEST(TaskCost, CpuRanksDemandCores) {
  GraphMaker maker(2);
  maker.graph().plan.threads.compute_per_rank = 3;
  maker.compute(0, 2);
  maker.copy(TaskKind::h2d, 0, 0.5);
  maker.collective(TaskKind::all_gather, 0, 0, 0.25);
  const StepGraph graph = maker.finish();
  HardwareSpec machine = round_machine();
  machine.device.backend = "cpu";
  machine.host.cores = 4;
  const CostModel four(graph, machine);
  EXPECT_DOUBLE_EQ(demanded(four, four.cost(graph.tasks[0]), "CPU cores"), 6);
  EXPECT_DOUBLE_EQ(demanded(four, four.cost(graph.tasks[0]), "rank 0 compute units"), 0);
  EXPECT_DOUBLE_EQ(demanded(four, four.cost(graph.tasks[1]), "CPU cores"), 0.5);
  EXPECT_DOUBLE_EQ(demanded(four, four.cost(graph.tasks[2]), "CPU cores"), 0.25);
  machine.host.cores = 2;
  const CostModel two(graph, machine);
  EXPECT_DOUBLE_EQ(demanded(two, two.cost(graph.tasks[0]), "CPU cores"), 4);
  EXPECT_DOUBLE_EQ(two.cost(graph.tasks[0]).solo_s, 2);
}

TEST(TaskCost, SoloTimeCoversEveryDemand) {
  std::mt19937 random(3);
  for (int round = 0; round < 50; ++round) {
    const StepGraph graph = testing::random_graph(random);
    const CostModel model(graph, testing::random_machine(random));
    for (const Task& task : graph.tasks) {
      const TaskCost cost = model.cost(task);
      for (const Demand& demand : cost.demands) {
        // One rounding of the division.
        EXPECT_GE(cost.solo_s * (1 + 1e-15),
                  demand.amount / model.resources()[static_cast<size_t>(demand.resource)].capacity);
      }
    }
  }
}

TEST(TaskCost, AMissingRateIsNamed) {
  GraphMaker maker(1);
  maker.compute(0, 1);
  maker.copy(TaskKind::d2h, 0, 1);
  const StepGraph graph = maker.finish();
  HardwareSpec machine = round_machine();
  machine.collectives = {};  // not needed by one rank
  machine.kernels.layer_fwd = {};
  machine.pcie.root_d2h_gbps = 0;
  const CostModel model(graph, machine);
  const auto message = [&](size_t task) -> std::string {
    try {
      model.cost(graph.tasks[task]);
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  };
  EXPECT_THAT(message(0), ::testing::HasSubstr("kernels.layer_fwd.peak_gflops"));
  EXPECT_THAT(message(1), ::testing::HasSubstr("pcie.root_d2h_gbps"));
}

}  // namespace
}  // namespace slidedp
