// The buffers of a step graph: the memory table is their sum, the executor allocates exactly them.
#pragma once

#include <array>
#include <vector>

#include "model/graph/step_graph.h"
#include "model/graph/visits.h"

namespace slidedp {

// A place for one chunk's gradient.
struct Place {
  BufferId buffer = -1;
  int64_t begin = 0;  // bytes
};

struct RankBuffers {
  std::array<std::vector<BufferId>, kSlotClasses> weights, gradients;  // by class, slot
  std::vector<BufferId> wire, shard;                                   // by ring slot; empty if not needed
  std::vector<std::vector<BufferId>> hidden;                           // by micro-batch, boundary 0..layers; -1: ring
  std::vector<BufferId> hidden_ring;                                   // empty without offload
  std::vector<std::vector<BufferId>> activation_host;                  // by micro-batch, layer; -1: not offloaded
  std::vector<std::vector<BufferId>> saved;                            // by micro-batch, layer
  std::vector<BufferId> hidden_gradient;                               // by micro-batch
  BufferId batch = -1, loss = -1, batch_host = -1, loss_host = -1;
};

// Ids of all buffers that a plan needs, by what they are for.
struct BufferTable {
  std::vector<BufferId> hi, lo, m, v;                       // by unit
  std::vector<BufferId> accumulator;                        // by unit; empty with one wave
  std::vector<std::vector<std::vector<BufferId>>> landing;  // by unit, gradient group, source; empty unit: ring
  std::vector<std::vector<BufferId>> ring;                  // by source, ring slot
  std::vector<BufferId> lookup;                             // touched rows: landing of their gradient, by source
  BufferId touched_rows = -1;
  BufferId partials = -1, scalars = -1;
  std::vector<int64_t> partials_begin;  // by unit: first block
  // By boundary: its place among the boundaries in the ring of hidden states, -1 if it is not there. They are the
  // inputs of layers that offload and, if there are any, the head's input, which backward does not need.
  std::vector<int> ring_place;
  std::vector<RankBuffers> ranks;
};

// Gradients that land separately for a unit: a tied embedding has two (head, lookup), every other unit one.
int gradient_groups(const ModelLayout& layout, int unit);

// Appends the buffers of the host and of the first `ranks` ranks (all are alike) to graph.buffers. graph.plan, layout,
// chunks and touched must be set.
BufferTable declare_buffers(StepGraph& graph, const ModelSpec& model, int ranks);

}  // namespace slidedp
