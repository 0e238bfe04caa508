// The step graph: one steady-state training step as plain data. simulate() prices it, the executor runs it.
//
// Tasks stand in program order: running them one after another is a correct execution. Dependencies are exactly the
// orderings between tasks that touch overlapping bytes, one of them writing, less those that in-order lanes and other
// dependencies already imply. Cross-step dependencies point to the same graph's previous execution.
//
// First step and flush are the same graph with another Phase: a task outside the phase keeps its place (it waits for
// what it depends on and can be waited for) but does nothing.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "model/base/types.h"
#include "model/spec/layout.h"
#include "model/spec/plan.h"

namespace slidedp {

using TaskId = int32_t;
using BufferId = int32_t;

enum class Phase : uint8_t { first, steady, flush };
inline constexpr uint8_t phase_bit(Phase phase) { return static_cast<uint8_t>(1u << static_cast<int>(phase)); }
inline constexpr uint8_t kStepPhases = 0b011;    // first and steady
inline constexpr uint8_t kUpdatePhases = 0b110;  // steady and flush: deferred work of the previous step

// What a buffer holds. Host buffers with unit >= 0 that are `state_*` are bound to the host state.
enum class BufferKind : uint8_t {
  // host
  state_hi,
  state_lo,
  state_m,
  state_v,
  landing,
  accumulator,
  norm_partials,
  step_scalars,
  loss_host,
  batch_host,
  touched_rows,  // each wave's list
  activation_host,
  // device
  weight_slot,
  gradient_slot,
  wire_slot,
  shard_slot,
  hidden,
  saved,
  hidden_gradient,
  batch,
  loss
};
std::string_view name(BufferKind);

struct Buffer {
  BufferKind kind{};
  int rank = -1;  // -1: host
  int unit = -1;  // host state and landing
  int64_t bytes = 0;
  std::string name;  // "rank 0 weight slot layer[1]"
  int owner = -1;    // host buffers that serve one rank (batch_host, loss_host, activation_host)
  bool on_host() const { return rank < 0; }
};

enum class AccessMode : uint8_t { read, write, read_write };
inline bool writes(AccessMode mode) { return mode != AccessMode::read; }

// What the access is to the task: the executor finds its operands by role.
enum class Role : uint8_t {
  source,                // copies, cast, collectives: input. norm, update: gradient sources in order of summation
  target,                // copies, cast, collectives: output
  weights,               // fwd, bwd, recompute, head: the unit's weight slot
  vocabulary,            // head: weight slot of the vocabulary matrix when it is another unit's (tied)
  gradients,             // bwd, head: the unit's gradient slot
  vocabulary_gradients,  // head, tied: gradient slot of the vocabulary matrix
  hidden_in,
  hidden_out,
  hidden_gradient,
  saved,
  batch,
  loss,
  hi,
  lo,
  m,
  v,
  partials,
  scalars,
  accumulator,  // fp32 sum over waves
  lookup,       // like source: the lookup's gradient of touched rows, by place in their list
  touched_rows  // h2d: the list of the rows to copy
};

struct Access {
  Role role{};
  AccessMode mode{};
  BufferId buffer = -1;
  int64_t begin = 0, end = 0;  // bytes
  // Writes of one step with the same partition (>= 0) never touch the same byte, though their ranges overlap: each
  // writes those rows of its range that are its own (OpenMP's inoutset).
  int32_t partition = -1;
};

struct Lane {
  LaneKind kind{};
  int rank = -1;  // -1 for the update pool
  bool operator==(const Lane&) const = default;
};

// Work that the cost model prices. Bytes on the host's DRAM are counted separately from bytes on a link.
struct Work {
  int64_t link_bytes = 0;       // over PCIe or the fabric
  int64_t host_read_bytes = 0;  // host DRAM
  int64_t host_write_bytes = 0;
  int64_t device_bytes = 0;  // read + written on the device by memory-bound kernels
  double flops = 0;
  // Of a layer's forward or backward: the part of the flops that is attention's, and what the layer's kernels other
  // than products and attention read and write on the device.
  double attention_flops = 0, layer_bytes = 0;
  double share = 1;      // of a layer's kernels: the part of their fixed time (launch, half-peak size) that is in here
  int64_t elements = 0;  // parameters (update, norm), tokens (embedding)
  int sources = 0;       // update, norm: gradient sources
};

// Which rows of the vocabulary's matrix a task works on. A list of touched rows divides them; it is step data.
enum class Rows : uint8_t {
  all,
  untouched,  // of the task's elements, those whose row is not in the list
  touched     // the task's elements count in the compact matrix of the list's rows
};

struct Task {
  TaskKind kind{};
  Lane lane;
  int unit = -1, chunk = -1, micro_batch = -1, wave = -1, rank = -1;
  uint8_t phases = kStepPhases;
  int64_t elements_begin = 0, elements = 0;  // chunk tasks: parameter range inside the unit that exists on the host
  Rows rows = Rows::all;                     // not all: by the list of `wave`
  LayerBlock block = LayerBlock::whole;      // fwd, recompute, bwd of a layer: which of its blocks
  // bwd, head: first micro-batch of the wave overwrites the gradient slot. host_accumulate: first wave overwrites.
  bool first = false;
  // Ranks of one collective carry the same group (>= 0); they start together.
  int32_t group = -1;
  int32_t root = -1;                    // broadcast
  UpdatePart part = UpdatePart::whole;  // update
  // Pool order: the task whose result is needed first runs first (smaller is sooner), after earlier steps' tasks.
  int32_t need = 0;
  Work work;
  std::vector<Access> accesses;
  std::vector<TaskId> deps;           // this step
  std::vector<TaskId> previous_deps;  // the previous step's execution of these tasks

  const Access& at(Role role) const;  // throws std::logic_error if absent
  const Access* find(Role role) const;
};

// Lists of touched rows of the embedding's matrix, one a wave: ascending, the union over ranks and micro-batches. Row
// list[i] lies in row i of the compact matrices on the device and in the lookup's landing buffers.
struct TouchedRows {
  int64_t capacity = 0;       // rows of a list at most; 0: the plan does without
  int64_t expected = 0;       // rows of a list, as the training spec estimates
  std::vector<Chunk> chunks;  // of the compact matrix [capacity, hidden]; whole rows, as many for every rank
};
TouchedRows plan_touched_rows(const Plan& plan, const ModelSpec& model, const TrainSpec& train);

struct StepGraph {
  Plan plan;
  ModelLayout layout;
  std::vector<std::vector<Chunk>> chunks;  // by unit
  TouchedRows touched;
  std::vector<Buffer> buffers;
  std::vector<Task> tasks;                 // program order; order of each in-order lane
  std::vector<std::vector<TaskId>> lanes;  // by lane_index(); the last is the update pool
  int alike = 1;                           // ranks that each rank of the graph stands for
  int ranks() const { return plan.ranks / alike; }
  int lane_index(Lane lane) const {
    return lane.kind == LaneKind::update ? ranks() * kDeviceLanes
                                         : lane.rank * kDeviceLanes + static_cast<int>(lane.kind);
  }
  // "bwd layer 3 micro-batch 0 rank 1"
  std::string describe(TaskId task) const;
  // Wire sources that an update sums: groups (head, lookup of a tied matrix) x ranks for cpu reduction.
  int sources_per_group() const { return plan.reduction == Reduction::cpu ? plan.ranks : 1; }
};

// The builder. The plan must have passed validate_plan. Deterministic; throws std::logic_error on a bug only.
StepGraph build_step_graph(const ModelSpec& model, const TrainSpec& train, const Plan& plan);

// The same of rank 0 alone, which stands for all ranks: for simulate() and bound() only, and much smaller. The times
// are those of the whole graph if ranks_alike() (but for ties, which rounding may break otherwise), else close to them:
// every rank is taken to have as large a part of a unit's last chunk as rank 0, and N chunks that N roots copy at once,
// to broadcast them, are one copy.
StepGraph build_rank_graph(const ModelSpec& model, const TrainSpec& train, const Plan& plan);

// Whether all ranks do exactly the same work at the same time.
bool ranks_alike(const StepGraph& graph);

}  // namespace slidedp
