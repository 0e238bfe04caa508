#include "model/sim/simulator.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <stdexcept>

#include "tests/model/sim/graphs.h"

namespace slidedp {
namespace {

using testing::GraphMaker;
using testing::round_machine;

// Hand-computed times are exact up to rounding.
constexpr double kRounding = 1e-9;

double start(const Simulation& s, TaskId id) { return s.timeline.records[static_cast<size_t>(id)].start_s; }
double end(const Simulation& s, TaskId id) { return s.timeline.records[static_cast<size_t>(id)].end_s; }
double use(const Simulation& s, const std::string& name) {
  for (const ResourceUse& use : s.uses) {
    if (use.name == name) return use.share;
  }
  return -1;
}

TEST(Simulate, CopiesOfTwoRanksShareTheRoot) {
  GraphMaker maker(2);
  const TaskId a = maker.copy(TaskKind::h2d, 0, 2);
  const TaskId b = maker.copy(TaskKind::h2d, 1, 1);
  maker.at(a).previous_deps = maker.at(b).previous_deps = {a, b};
  HardwareSpec machine = round_machine();
  machine.pcie.root_h2d_gbps = 1.6;
  const Simulation s = simulate(maker.finish(), machine);
  // Both at 0.8 of their speed until b ends at 1.25 s; then a has 1 s of work left.
  EXPECT_NEAR(end(s, b), 1.25, kRounding);
  EXPECT_NEAR(end(s, a), 2.25, kRounding);
  EXPECT_NEAR(s.step.seconds, 2.25, kRounding);
  EXPECT_TRUE(s.settled);
  EXPECT_NEAR(use(s, "root h2d"), 3 / (1.6 * 2.25), kRounding);
  EXPECT_NEAR(use(s, "rank 1 h2d lane"), 1 / 2.25, kRounding);
  EXPECT_EQ(s.bottleneck, "rank 0 h2d lane");
}

TEST(Simulate, BothDirectionsOfOneRankShareTheDuplexLink) {
  GraphMaker maker(1);
  const TaskId down = maker.copy(TaskKind::h2d, 0, 1);
  const TaskId up = maker.copy(TaskKind::d2h, 0, 1);
  maker.at(down).previous_deps = maker.at(up).previous_deps = {down, up};
  HardwareSpec machine = round_machine();
  machine.pcie.duplex_gbps = 1.25;
  const Simulation s = simulate(maker.finish(), machine);
  EXPECT_NEAR(s.step.seconds, 1.6, kRounding);
  EXPECT_EQ(s.bottleneck, "rank 0 duplex link");
  EXPECT_NEAR(s.uses.front().share, 1, kRounding);
}

TEST(Simulate, AdamBesideDmaSharesTheMemoryController) {
  GraphMaker maker(1);
  const TaskId copy = maker.copy(TaskKind::h2d, 0, 1);                 // 1 GB/s of DRAM
  const TaskId adam = maker.update(2, 0, {}, int64_t{6'000'000'000});  // 3 GB/s
  maker.at(copy).previous_deps = maker.at(adam).previous_deps = {copy, adam};
  HardwareSpec machine = round_machine();
  machine.host.dram_gbps = 3.2;
  const Simulation s = simulate(maker.finish(), machine);
  // 4 GB/s wanted, 3.2 there: both at 0.8 until the copy ends at 1.25 s; Adam has 1 s of work left.
  EXPECT_NEAR(end(s, copy), 1.25, kRounding);
  EXPECT_NEAR(end(s, adam), 2.25, kRounding);
}

TEST(Simulate, CopiesAreSlowerBesideStreamingCores) {
  GraphMaker maker(1);
  const TaskId copy = maker.copy(TaskKind::h2d, 0, 1);
  const TaskId adam = maker.update(2, 0, {}, 1'000'000'000);  // half a GB/s
  const TaskId back = maker.copy(TaskKind::d2h, 0, 2);
  for (TaskId id : {copy, adam, back}) maker.at(id).previous_deps = {copy, adam, back};
  HardwareSpec machine = round_machine();
  machine.host.dram_gbps = 100;
  machine.contention.h2d.beside_streams = 200;  // 100 GB/s beside it would make it 201 times as long
  machine.contention.d2h = {1.25, 100, 0};
  const Simulation s = simulate(maker.finish(), machine);
  // h2d takes 2 times as long, d2h 1.5 / 1.25 times until Adam ends at 2 s, with 2 - 2 / 1.2 s left.
  EXPECT_NEAR(end(s, copy), 2, kRounding);
  EXPECT_NEAR(end(s, adam), 2, kRounding);
  EXPECT_NEAR(end(s, back), 2 + 2 - 2 / 1.2, kRounding);
}

TEST(Simulate, StreamingCoresAreSlowerBesideCopiesAndEachOther) {
  GraphMaker maker(1);
  const TaskId copy = maker.copy(TaskKind::h2d, 0, 1);
  const TaskId back = maker.copy(TaskKind::d2h, 0, 1);
  const TaskId adam = maker.update(2, 0, {}, 4'000'000'000);  // 2 GB/s
  for (TaskId id : {copy, adam, back}) maker.at(id).previous_deps = {copy, adam, back};
  HardwareSpec machine = round_machine();
  machine.host.dram_gbps = 100;
  machine.contention.streams = {50, 25, 60};
  const Simulation s = simulate(maker.finish(), machine);
  EXPECT_NEAR(end(s, copy), 1, kRounding);
  // 2 * 1.25 * 1.6 times as long for a second, then 2 times.
  EXPECT_NEAR(end(s, adam), 1 + 2 * (2 - 1 / 4.0), kRounding);
  EXPECT_NEAR(bound(maker.finish(), machine).step.seconds, 2, kRounding);  // knows of no contention
}

// What was measured on this machine (see the file): Adam on 14 threads alone, copies alone, and all at once.
TEST(Simulate, TheCatalogueMachineContendsAsMeasured) {
  const HardwareSpec machine =
      load_hardware_spec(std::filesystem::path(SLIDEDP_SOURCE_DIR) / "configs" / "hardware" / "h200.yaml");
  constexpr double kAdamBytes = 20e9;  // of each worker: busy for longer than the copies
  constexpr int kWorkers = 14;
  // Copies of sizes that end together at the rates measured (0: none). Gives rates; `alone_gbps`: of Adam alone.
  const auto rates = [&](bool adam, double down_gbps, double up_gbps, double alone_gbps = 0) {
    constexpr double kCopies_s = 0.3;
    GraphMaker maker(1, kWorkers);
    std::vector<TaskId> all;
    for (int i = 0; adam && i < kWorkers; ++i) {
      all.push_back(maker.update(0, 0, {}, static_cast<int64_t>(kAdamBytes)));
      maker.at(all.back()).work.elements = static_cast<int64_t>(kAdamBytes / 26);
    }
    const TaskId down = down_gbps > 0 ? maker.copy(TaskKind::h2d, 0, kCopies_s * down_gbps) : -1;
    const TaskId up = up_gbps > 0 ? maker.copy(TaskKind::d2h, 0, kCopies_s * up_gbps) : -1;
    for (TaskId id : {down, up}) {
      if (id >= 0) all.push_back(id);
    }
    for (TaskId id : all) maker.at(id).previous_deps = all;
    const Simulation s = simulate(maker.finish(), machine);
    const auto gbps = [&](TaskId id, double measured) { return kCopies_s * measured / (end(s, id) - start(s, id)); };
    const double copies_s = std::max(down >= 0 ? end(s, down) : 0, up >= 0 ? end(s, up) : 0);
    // From what Adam had done when the copies ended, if there were any.
    const double adam_gb = kWorkers * kAdamBytes / 1e9;
    const double adam_gbps = !adam          ? 0
                             : copies_s > 0 ? (adam_gb - (end(s, 0) - copies_s) * alone_gbps) / copies_s
                                            : adam_gb / end(s, 0);
    return std::array{adam_gbps, down >= 0 ? gbps(down, down_gbps) : 0, up >= 0 ? gbps(up, up_gbps) : 0};
  };
  // The law describes the rates within 4 %; its rounded values and the caps do within 1 % more.
  const auto near = [](double measured) { return ::testing::DoubleNear(measured, 0.05 * measured); };
  using ::testing::ElementsAre;
  const auto alone = rates(true, 0, 0);
  EXPECT_THAT(alone, ElementsAre(near(171.8), 0, 0));
  EXPECT_THAT(rates(false, 54.0, 0), ElementsAre(0, near(54.0), 0));
  EXPECT_THAT(rates(false, 46.2, 50.0), ElementsAre(0, near(46.2), near(50.0)));
  EXPECT_THAT(rates(true, 29.8, 44.6, alone[0]), ElementsAre(near(137.5), near(29.8), near(44.6)));
}

TEST(Simulate, WorkersShareWhatTheCoresCanStream) {
  GraphMaker maker(1, 2);
  const TaskId a = maker.update(1, 0, {}, 1'000'000'000);
  const TaskId b = maker.update(1, 1, {}, 1'000'000'000);
  maker.at(a).previous_deps = maker.at(b).previous_deps = {a, b};
  HardwareSpec machine = round_machine();
  machine.host.cpu_stream_gbps = 1.6;
  const Simulation s = simulate(maker.finish(), machine);
  EXPECT_NEAR(s.step.seconds, 1.25, kRounding);
  EXPECT_EQ(s.bottleneck, "CPU streaming");
}

TEST(Simulate, CpuRanksShareTheCores) {
  GraphMaker maker(2, 1);
  const TaskId a = maker.compute(0, 1), b = maker.compute(1, 1), c = maker.update(0.5, 0);
  for (TaskId id : {a, b, c}) maker.at(id).previous_deps = {a, b, c};
  HardwareSpec machine = round_machine();
  machine.device.backend = "cpu";
  machine.host.cores = 2;
  const Simulation s = simulate(maker.finish(), machine);
  // Three threads on two cores at 2/3 until the update ends at 0.75 s, then both ranks alone.
  EXPECT_NEAR(end(s, c), 0.75, kRounding);
  EXPECT_NEAR(s.step.seconds, 1.25, kRounding);
  EXPECT_EQ(s.bottleneck, "CPU cores");
}

TEST(Simulate, LatencyDemandsNothing) {
  GraphMaker maker(2);
  const TaskId a = maker.copy(TaskKind::h2d, 0, 1), b = maker.copy(TaskKind::h2d, 0, 1);
  const TaskId c = maker.copy(TaskKind::h2d, 1, 1.5);
  for (TaskId id : {a, b, c}) maker.at(id).previous_deps = {a, b, c};
  HardwareSpec machine = round_machine();
  machine.pcie.h2d.latency_s = 0.5;
  machine.pcie.root_h2d_gbps = 1;
  const Simulation s = simulate(maker.finish(), machine);
  // From 0.5 both ranks at half speed: a ends at 2.5. While b's latency passes, c runs alone from 1.0 done to 1.5 done.
  EXPECT_NEAR(end(s, a), 2.5, kRounding);
  EXPECT_NEAR(end(s, c), 3.0, kRounding);
  EXPECT_NEAR(end(s, b), 4.0, kRounding);
}

TEST(Simulate, ThePoolTakesTheSmallestNeedFirst) {
  GraphMaker maker(1, 2);
  const TaskId gradients = maker.copy(TaskKind::d2h, 0, 1);
  const TaskId late = maker.update(1, 9, {gradients});
  const TaskId soon = maker.update(1, 1, {gradients});
  const TaskId next = maker.update(1, 1, {gradients});
  const TaskId last = maker.update(1, 10, {gradients});
  maker.at(gradients).previous_deps = {late, soon, next, last};
  const Simulation s = simulate(maker.finish(), round_machine());
  EXPECT_NEAR(start(s, soon), 1, kRounding);
  EXPECT_NEAR(start(s, next), 1, kRounding);
  EXPECT_NEAR(start(s, late), 2, kRounding);
  EXPECT_NEAR(start(s, last), 2, kRounding);
  EXPECT_NEAR(s.step.seconds, 3, kRounding);
  EXPECT_NEAR(use(s, "update workers"), 4.0 / (2 * 3), kRounding);
}

TEST(Simulate, ThePoolPrefersTheEarlierStepToTheSmallerNeed) {
  GraphMaker maker(1, 1);
  const TaskId soon = maker.update(1, 0);
  const TaskId late = maker.update(1, 5);
  const Simulation s = simulate(maker.finish(), round_machine());
  // Both tasks of the next step are ready, too: taking its `soon` before this step's `late` would pull them apart.
  EXPECT_NEAR(start(s, late), end(s, soon), kRounding);
  EXPECT_NEAR(s.step.seconds, 2, kRounding);
}

TEST(Simulate, MembersOfACollectiveStartTogether) {
  GraphMaker maker(2);
  const TaskId fast = maker.compute(0, 1), slow = maker.compute(1, 3);
  const TaskId a = maker.collective(TaskKind::reduce_scatter, 0, 0, 1, {fast});
  const TaskId b = maker.collective(TaskKind::reduce_scatter, 1, 0, 1, {slow});
  maker.at(fast).previous_deps = maker.at(slow).previous_deps = {a, b};
  const Simulation s = simulate(maker.finish(), round_machine());
  EXPECT_NEAR(start(s, a), 3, kRounding);
  EXPECT_NEAR(start(s, b), 3, kRounding);
  EXPECT_NEAR(s.step.seconds, 4, kRounding);
  EXPECT_NEAR(s.exposed.seconds, ((4 - 1) + (4 - 3)) / 2.0, kRounding);
}

TEST(Simulate, StepsOverlapWhereNoEdgeForbidsIt) {
  GraphMaker maker(1);
  const TaskId first = maker.compute(0, 10), second = maker.compute(0, 10);
  const TaskId update = maker.update(6, 0, {second});
  EXPECT_NEAR(simulate(maker.finish(), round_machine()).step.seconds, 20, kRounding);
  // Needed by the next step's second task only: hidden under the first.
  maker.at(second).previous_deps = {update};
  const Simulation hidden = simulate(maker.finish(), round_machine());
  EXPECT_NEAR(hidden.step.seconds, 20, kRounding);
  EXPECT_NEAR(hidden.exposed.seconds, 0, kRounding);
  // Four seconds too long to hide.
  maker.at(update).work.elements = 14'000'000'000;
  const Simulation exposed = simulate(maker.finish(), round_machine());
  EXPECT_NEAR(exposed.step.seconds, 24, kRounding);
  EXPECT_NEAR(exposed.exposed.seconds, 4, kRounding);
  // Needed at once: nothing is hidden.
  maker.at(first).previous_deps = {update};
  EXPECT_NEAR(simulate(maker.finish(), round_machine()).step.seconds, 34, kRounding);
}

TEST(Simulate, TheStepAfterNextWaitsForTheWholeStep) {
  GraphMaker maker(1);
  const TaskId copy = maker.copy(TaskKind::h2d, 0, 1);
  const TaskId compute = maker.compute(0, 10);
  const Simulation s = simulate(maker.finish(), round_machine());
  // The copy of step s runs when step s - 2 is complete, that is a whole step before the compute of step s.
  EXPECT_NEAR(s.step.seconds, 10, kRounding);
  EXPECT_NEAR(start(s, copy), 0, kRounding);
  EXPECT_NEAR(start(s, compute), 10, kRounding);
}

TEST(Simulate, TasksOutsideThePhaseTakeNoTimeButKeepTheirPlace) {
  GraphMaker maker(1);
  const TaskId before = maker.compute(0, 1);
  const TaskId only_first = maker.compute(0, 5, {before});
  const TaskId after = maker.copy(TaskKind::d2h, 0, 1, {only_first});
  maker.at(only_first).phases = phase_bit(Phase::first);
  maker.at(before).previous_deps = {after};
  const Simulation s = simulate(maker.finish(), round_machine());
  EXPECT_NEAR(s.step.seconds, 2, kRounding);
  EXPECT_NEAR(start(s, only_first), 1, kRounding);
  EXPECT_EQ(start(s, only_first), end(s, only_first));
  EXPECT_NEAR(start(s, after), 1, kRounding);
  EXPECT_NEAR(bound(maker.finish(), round_machine()).step.seconds, 1, kRounding);
}

TEST(Simulate, TheFirstStepsShortcutIsNotReported) {
  // Deferred: the update of the last step's gradients runs before this step's compute; the first step has none.
  GraphMaker maker(1);
  const TaskId update = maker.update(3, 0);
  const TaskId compute = maker.compute(0, 2, {update});
  maker.at(update).phases = kUpdatePhases;
  maker.at(update).previous_deps = {compute};
  const Simulation s = simulate(maker.finish(), round_machine());
  EXPECT_NEAR(s.step.seconds, 5, kRounding);
  EXPECT_TRUE(s.settled);
}

TEST(Simulate, ABlockedGraphNamesATask) {
  GraphMaker maker(1);
  const TaskId head = maker.compute(0, 1);
  const TaskId behind = maker.compute(0, 1);
  maker.at(head).deps = {behind};
  maker.at(head).micro_batch = 7;
  try {
    simulate(maker.finish(), round_machine());
    FAIL() << "a deadlocked graph ran";
  } catch (const std::logic_error& error) {
    EXPECT_THAT(error.what(), ::testing::HasSubstr(maker.finish().describe(head)));
  }
}

TEST(Simulate, GivesTheSameTwice) {
  std::mt19937 random(11);
  const StepGraph graph = testing::random_graph(random);
  const HardwareSpec machine = testing::random_machine(random);
  const Simulation a = simulate(graph, machine), b = simulate(graph, machine);
  EXPECT_EQ(a.step.seconds, b.step.seconds);
  for (size_t i = 0; i < a.timeline.records.size(); ++i) {
    EXPECT_EQ(a.timeline.records[i].start_s, b.timeline.records[i].start_s);
    EXPECT_EQ(a.timeline.records[i].end_s, b.timeline.records[i].end_s);
  }
}

TEST(Bound, IsTheGreatestOfLanesPoolAndResources) {
  GraphMaker maker(2, 2);
  maker.compute(0, 1);
  maker.compute(1, 1.5);
  maker.copy(TaskKind::h2d, 0, 1);
  maker.copy(TaskKind::h2d, 1, 1);
  maker.update(1, 0);
  maker.update(2, 0);
  maker.update(1, 0);
  const StepGraph graph = maker.finish();
  HardwareSpec machine = round_machine();
  EXPECT_NEAR(bound(graph, machine).step.seconds, 2, kRounding);
  EXPECT_EQ(bound(graph, machine).bottleneck, "update workers");
  machine.pcie.root_h2d_gbps = 0.8;
  EXPECT_NEAR(bound(graph, machine).step.seconds, 2.5, kRounding);
  EXPECT_EQ(bound(graph, machine).bottleneck, "root h2d");
  machine.pcie.h2d.latency_s = 2;
  EXPECT_NEAR(bound(graph, machine).step.seconds, 2 + 1 / 0.8, kRounding);
  EXPECT_EQ(bound(graph, machine).bottleneck, "rank 0 h2d lane");
}

TEST(PriceGraph, SimulatesUnlessTheBoundIsEnough) {
  GraphMaker maker(1, 1);
  maker.compute(0, 1);
  maker.copy(TaskKind::h2d, 0, 3);
  const StepGraph graph = maker.finish();
  const HardwareSpec machine = round_machine();
  const Price both = price_graph(graph, machine, [](const Bound&) { return false; });
  EXPECT_EQ(both.bound.step.seconds, bound(graph, machine).step.seconds);
  EXPECT_EQ(both.bound.bottleneck, bound(graph, machine).bottleneck);
  ASSERT_TRUE(both.simulation);
  EXPECT_EQ(both.simulation->step.seconds, simulate(graph, machine).step.seconds);
  const Price bounded = price_graph(graph, machine, [](const Bound& bound) { return bound.step.seconds > 2; });
  EXPECT_EQ(bounded.bound.step.seconds, both.bound.step.seconds);
  EXPECT_FALSE(bounded.simulation);
}

}  // namespace
}  // namespace slidedp
