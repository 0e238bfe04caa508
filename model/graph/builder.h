// The builder's parts, internal to model/graph: tasks are emitted in program order, deliveries and compute in
// builder.cpp, layer inputs in builder_activations.cpp, gradients and updates in builder_gradients.cpp, those of
// touched rows in builder_rows.cpp. Dependencies follow from what the tasks touch (dependencies.h), slots from the
// order of visits (visits.h), buffers from the plan (buffers.h).
#pragma once

#include <map>
#include <vector>

#include "model/cost/activations.h"
#include "model/cost/layer_work.h"
#include "model/graph/buffers.h"
#include "model/graph/step_graph.h"
#include "model/graph/visits.h"

namespace slidedp {

class Builder {
 public:
  // `alike`: 1, or all of the plan's ranks (build_rank_graph).
  Builder(const ModelSpec& model, const TrainSpec& train, const Plan& plan, int alike);
  StepGraph build();

 private:
  const Plan& plan() const { return graph_.plan; }
  const UnitLayout& layout(int unit) const { return graph_.layout.units[static_cast<size_t>(unit)]; }
  const std::vector<Chunk>& chunks(int unit) const { return graph_.chunks[static_cast<size_t>(unit)]; }
  const Chunk& chunk_of(int unit, size_t index, Rows rows) const {
    return rows == Rows::touched ? graph_.touched.chunks[index] : chunks(unit)[index];
  }
  RankBuffers& rank_buffers(int rank) { return buffers_.ranks[static_cast<size_t>(rank)]; }
  BufferId weight_slot(int rank, const Residency& weights);
  bool slots_free(size_t visit, size_t ahead) const;
  Task& emit(TaskKind kind, Lane lane, int unit);
  Task& emit_chunk(TaskKind kind, Lane lane, int unit, size_t chunk, Rows rows = Rows::all);
  static void touch(Task& task, Role role, AccessMode mode, BufferId buffer, int64_t begin, int64_t bytes);
  void emit_batch();
  void emit_deliveries(const Visit& visit);
  size_t chunk_at(int unit, int64_t element) const;
  size_t first_mlp_chunk(int unit) const;
  bool updated(int unit);
  void emit_delivery(const Residency& weights, size_t index);
  void emit_copy(const Residency& weights, size_t index, int rank, int64_t begin, int64_t elements);
  void emit_all_gather(const Residency& weights, size_t index);
  void emit_broadcast(const Residency& weights, size_t index, int root);
  void emit_compute(const Visit& visit);
  Task& emit_micro_batch(TaskKind kind, int unit, int rank, int m);
  int64_t place_in_step(int m) const;
  void touch_weights(Task& task, Role role, const Residency& weights);
  void touch_saved(Task& task, AccessMode mode, int64_t begin, int64_t end);
  void touch_hidden(Task& task, Role role, AccessMode mode, BufferId buffer);
  BufferId gradient_slot(int rank, int unit);
  void touch_gradients(Task& task, Role role, int unit);
  void emit_embedding_forward(const Visit& visit, int rank, int m);
  void price_blocks();
  Task& emit_block(TaskKind kind, LayerBlock block, const Visit& visit, int rank, int m);
  Task& emit_forward_block(TaskKind kind, LayerBlock block, const Visit& visit, int rank, int m);
  void emit_layer_forward(const Visit& visit, int rank, int m);
  void emit_head(const Visit& visit, int rank, int m);
  void emit_loss();
  void emit_layer_backward(const Visit& visit);
  void emit_recompute(const Visit& visit, int rank, int m);
  void emit_backward_block(LayerBlock block, const Visit& visit, int rank, int m);
  void emit_embedding_backward(int rank, int m);

  // builder_activations.cpp
  BufferId hidden(int rank, int m, int boundary, bool backward = false);
  void emit_act_d2h(int rank, int m, int boundary);
  void emit_act_h2d(int rank, int m, int layer);
  void emit_act_copy(TaskKind kind, Lane lane, int m, int layer);

  // builder_gradients.cpp
  void emit_gradients(const Visit& visit);
  void emit_chunk_gradients(int unit, int group, bool last, size_t begin, size_t end);
  void emit_consumer(int unit, int group, size_t chunk, const std::vector<Place>& places, bool last);
  std::vector<Place> land(int unit, int group, size_t chunk);
  std::vector<Place> fixed_places(int unit, int group, size_t chunk) const;
  void emit_reduction(int unit, const std::vector<Place>& places, size_t index, Rows rows = Rows::all);
  void emit_reduce_scatter(int unit, size_t index, const std::vector<Place>& wire, size_t turn, Rows rows);
  Place emit_cast(int unit, size_t index, int rank, size_t turn, Rows rows);
  void touch_sources(Task& task, const std::vector<Place>& places);
  void touch_earlier_groups(Task& task);
  void touch_accumulator(Task& task, AccessMode mode);
  void touch_partials(Task& task, AccessMode mode);
  void emit_late_updates(int unit);
  void emit_update(int unit, size_t chunk, UpdatePart part, Rows rows = Rows::all);
  void emit_eager_update(int unit, size_t chunk, const std::vector<Place>& places);
  void touch_state(Task& task, UpdatePart part);
  void emit_accumulate(int unit, int group, size_t chunk, const std::vector<Place>& places);
  void emit_chunk_norm(int unit, size_t chunk, const std::vector<Place>& places);
  void emit_norm();

  // builder_rows.cpp
  bool touched() const { return graph_.touched.capacity > 0; }
  Chunk expected(const Chunk& chunk, Rows rows) const;
  int64_t expected_part(const Chunk& chunk, Rows rows, int64_t begin, int64_t elements) const;
  int64_t expected_lookup(int64_t elements) const;
  void set_rows(Task& task, Rows rows) const;
  void touch_host(Task& task, Role role, AccessMode mode, BufferId buffer, int64_t element_bytes, int64_t block = 1);
  void touch_head_gradient(Task& task);
  void touch_lookup(Task& task, const std::vector<Place>& places);
  void touch_late_lookup(Task& task);
  std::vector<Place> lookup_places(size_t chunk) const;
  void emit_touched_updates();
  void emit_untouched_updates();
  void emit_untouched(size_t chunk);
  void emit_touched_gradients();

  const ModelSpec& model_;
  StepGraph graph_;
  BufferTable buffers_;
  std::vector<SavedLayout> saved_;  // by layer
  // Layers are alike: what one block does for a micro-batch, by LayerBlock.
  struct BlockWork {
    LayerWork forward, backward;
    LayerWork first_backward;  // of a wave's first micro-batch
    double share = 0;          // of the layer
  };
  std::map<LayerBlock, BlockWork> block_work_;
  std::vector<Visit> visits_;
  std::vector<int32_t> first_chunk_;  // by unit: chunks of the units before it
  int32_t total_chunks_ = 0;
  int64_t ring_turn_ = 0;           // landing ring slots taken so far
  int32_t moments_turn_ = 0;        // second passes of split updates so far
  std::map<size_t, bool> updated_;  // units whose deferred update stands in the graph
  int wave_ = 0;                    // of the visit that is being emitted
  int64_t wire_bytes_ = 0, accumulator_bytes_ = 0;
  size_t wire_turn_ = 0;  // wire slots taken so far
  int32_t groups_ = 0;
};

}  // namespace slidedp
