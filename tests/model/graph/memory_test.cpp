// Which buffers a plan needs, and how large they are.
#include "model/graph/memory.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "model/cost/activations.h"
#include "tests/model/graph/graph_check.h"
#include "tests/support/random_problem.h"

namespace slidedp::testing {
namespace {

int64_t bytes_of(const StepGraph& graph, BufferKind kind, const std::string& name) {
  int64_t bytes = 0;
  for (const Buffer& buffer : graph.buffers) {
    if (buffer.kind == kind && buffer.rank <= 0 && buffer.name.find(name) != std::string::npos) bytes += buffer.bytes;
  }
  return bytes;
}

// Room for as many rows as there are tokens, instead of the matrix, wherever only the lookup needs it.
TEST(Buffers, TouchedRowsNeedRoomForTheTokensOnly) {
  RandomProblem problem(1);
  problem.model.hidden = 64;
  problem.model.vocabulary = 1000;
  Plan& plan = problem.plan;
  plan.ranks = 1;
  plan.delivery = Delivery::replicated;
  plan.reduction = Reduction::cpu;
  plan.waves = 1;
  plan.update = UpdatePolicy::deferred;
  plan.landing_slots = 0;
  plan.chunk_elements = 1 << 20;
  plan.vocabulary_rows = VocabularyRows::touched;
  const int64_t tokens = plan.micro_batches * plan.micro_batch_tokens(), matrix = 1000 * 64, rows = tokens * 64;
  ASSERT_LT(tokens, 100);
  for (const bool tied : {true, false}) {
    for (const bool apart : {false, true}) {
      problem.model.tied = tied;
      plan.model = problem.model.fingerprint();
      plan.vocabulary_kept = tied && apart;
      plan.vocabulary_slots = !tied && apart ? 2 : 1;
      problem.train.batch_rows = plan.batch_rows();
      problem.train.max_grad_norm = 0;
      const StepGraph graph = build(problem);
      EXPECT_EQ(graph.touched.capacity, tokens);
      const int64_t head = tied ? matrix : graph.layout.head().elements;
      EXPECT_EQ(bytes_of(graph, BufferKind::weight_slot, "vocabulary"), head * 2);
      EXPECT_EQ(bytes_of(graph, BufferKind::weight_slot, "touched_rows"), apart ? rows * 2 : 0);
      EXPECT_EQ(bytes_of(graph, BufferKind::gradient_slot, "vocabulary"), head * size_of(plan.accumulator));
      EXPECT_EQ(bytes_of(graph, BufferKind::gradient_slot, "touched_rows"), 0);
      EXPECT_EQ(bytes_of(graph, BufferKind::landing, "touched rows"), rows * size_of(plan.wire));
      EXPECT_EQ(bytes_of(graph, BufferKind::landing, "embedding"), tied ? matrix * size_of(plan.wire) : 0);
      EXPECT_EQ(bytes_of(graph, BufferKind::touched_rows, ""), 2 * tokens * 4);
    }
  }
}

// Every layer that saves has an area a micro-batch, of its policy's size; those that recompute share one.
TEST(Buffers, SizesSavedAreasByPolicy) {
  RandomProblem problem(1);
  problem.model.layers = 5;
  problem.model.qk_norm = true;
  using enum ActivationPolicy;
  problem.plan.activation = {recompute, selective, keep, selective, recompute};
  problem.plan.ranks = 1;
  problem.plan.delivery = Delivery::replicated;
  problem.plan.reduction = Reduction::cpu;
  problem.plan.micro_batches = 2;
  problem.plan.accumulator = DType::fp32;
  problem.plan.model = problem.model.fingerprint();
  problem.train.batch_rows = problem.plan.batch_rows();
  const StepGraph graph = build(problem);
  std::vector<int64_t> sizes, expected;
  for (const Buffer& buffer : graph.buffers) {
    if (buffer.kind == BufferKind::saved) sizes.push_back(buffer.bytes);
  }
  for (const ActivationPolicy policy : {keep, keep, recompute, selective, selective, selective, selective}) {
    expected.push_back(
        saved_layout(problem.model, problem.plan.micro_batch_tokens(), problem.plan.compute, policy).bytes);
  }
  EXPECT_LT(expected.back(), expected.front());
  std::sort(sizes.begin(), sizes.end(), std::greater<>());
  EXPECT_EQ(sizes, expected);
}

// Layers that offload hold no input on the device: a ring of a slot more than micro-batches serves all of them and the
// head, and the inputs lie on the host.
TEST(MemoryTable, HoldsOffloadedInputsOnTheHost) {
  RandomProblem problem(1);
  problem.model.layers = 5;
  problem.plan.ranks = 2;
  problem.plan.micro_batches = 3;
  problem.plan.accumulator = DType::fp32;
  problem.plan.model = problem.model.fingerprint();
  problem.train.batch_rows = problem.plan.batch_rows();
  const int64_t hidden = hidden_bytes(problem.model, problem.plan.micro_batch_tokens(), problem.plan.compute);
  const auto bytes = [&](std::vector<ActivationPolicy> activation) {
    problem.plan.activation = std::move(activation);
    std::map<BufferKind, int64_t> sums;
    for (const Buffer& buffer : build(problem).buffers) {
      if (buffer.rank <= 0) sums[buffer.kind] += buffer.bytes;
    }
    return sums;
  };
  using enum ActivationPolicy;
  auto recomputed = bytes({recompute, recompute, recompute, recompute, recompute});
  EXPECT_EQ(recomputed[BufferKind::hidden], 6 * 3 * hidden);
  auto offloaded = bytes({offload, offload, offload, offload, offload});
  EXPECT_EQ(offloaded[BufferKind::hidden], (3 + 1) * hidden);
  EXPECT_EQ(offloaded[BufferKind::activation_host], 2 * 5 * 3 * hidden);
  EXPECT_EQ(offloaded[BufferKind::saved], recomputed[BufferKind::saved]);
  auto mixed = bytes({offload, keep, recompute, offload, selective});
  EXPECT_EQ(mixed[BufferKind::hidden], (3 * 3 + 3 + 1) * hidden);
  EXPECT_EQ(mixed[BufferKind::activation_host], 2 * 2 * 3 * hidden);
}

TEST(MemoryTable, IsTheSumOfTheBuffers) {
  for (uint32_t seed = 0; seed < 50; ++seed) {
    const RandomProblem problem(seed);
    const StepGraph graph = build(problem);
    HardwareSpec hardware;
    hardware.device.context_bytes = 1000;
    const MemoryTable table = memory_table(graph, problem.model, hardware);
    int64_t device = 0, host = 0, other_rank = 0;
    for (const Buffer& buffer : graph.buffers) {
      if (buffer.on_host()) host += buffer.bytes;
      if (buffer.rank == 0) device += buffer.bytes;
      if (buffer.rank == problem.plan.ranks - 1) other_rank += buffer.bytes;
    }
    EXPECT_EQ(table.host_bytes(), host);
    EXPECT_EQ(table.device_buffer_bytes, device);
    EXPECT_EQ(device, other_rank);
    EXPECT_EQ(table.device_bytes(), device + table.temporary_bytes + 1000);
    // 12 bytes a parameter, and the gradients: nothing else is per parameter (but the norm's 1/8 byte).
    const int64_t elements = graph.layout.elements;
    EXPECT_GE(host, elements * 12);
  }
}

}  // namespace
}  // namespace slidedp::testing
