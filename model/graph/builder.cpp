// Deliveries and compute tasks of one steady-state step.
#include "model/graph/builder.h"

#include <algorithm>
#include <utility>

#include "model/cost/flops.h"
#include "model/cost/layer_work.h"
#include "model/graph/dependencies.h"

namespace slidedp {

Builder::Builder(const ModelSpec& model, const TrainSpec& train, const Plan& plan, int alike) : model_(model) {
  graph_.plan = plan;
  graph_.alike = alike;
  graph_.layout = make_layout(model);
  int32_t chunks = 0;
  for (const UnitLayout& unit : graph_.layout.units) {
    graph_.chunks.push_back(make_chunks(unit, plan.chunk_elements, plan.ranks));
    first_chunk_.push_back(chunks);
    chunks += static_cast<int32_t>(graph_.chunks.back().size());
  }
  total_chunks_ = chunks;
  graph_.touched = plan_touched_rows(plan, model, train);
  buffers_ = declare_buffers(graph_, model, graph_.ranks());
  for (const ActivationPolicy policy : plan.activation) {
    saved_.push_back(saved_layout(model, plan.micro_batch_tokens(), plan.compute, policy));
  }
  price_blocks();
  visits_ = plan_visits(graph_.layout, plan);
  wire_bytes_ = size_of(plan.wire);
  accumulator_bytes_ = size_of(plan.accumulator);
}

StepGraph Builder::build() {
  emit_batch();
  size_t delivered = 0;
  for (size_t visit = 0; visit < visits_.size(); ++visit) {
    for (; delivered < visits_.size() && (delivered == visit || slots_free(visit, delivered)); ++delivered) {
      emit_deliveries(visits_[delivered]);
    }
    wave_ = visits_[visit].wave;
    emit_compute(visits_[visit]);
    emit_gradients(visits_[visit]);
  }
  emit_norm();
  derive_dependencies(graph_);
  return std::move(graph_);
}

BufferId Builder::weight_slot(int rank, const Residency& weights) {
  return rank_buffers(rank).weights[static_cast<size_t>(weights.slot_class)][static_cast<size_t>(weights.slot)];
}

// A delivery may run ahead of the visit on the compute lane while its slots are not used by the visits between.
bool Builder::slots_free(size_t visit, size_t ahead) const {
  for (const Residency& wanted : visits_[ahead].weights) {
    if (!wanted.deliver) continue;
    for (size_t i = visit; i < ahead; ++i) {
      for (const Residency& used : visits_[i].weights) {
        if (used.slot_class == wanted.slot_class && used.slot == wanted.slot) return false;
      }
    }
  }
  return true;
}

Task& Builder::emit(TaskKind kind, Lane lane, int unit) {
  Task& task = graph_.tasks.emplace_back();
  task.kind = kind;
  task.lane = lane;
  task.rank = lane.rank;
  task.unit = unit;
  return task;
}

Task& Builder::emit_chunk(TaskKind kind, Lane lane, int unit, size_t chunk, Rows rows) {
  Task& task = emit(kind, lane, unit);
  task.chunk = static_cast<int>(chunk);
  task.elements_begin = chunk_of(unit, chunk, rows).begin;
  task.elements = chunk_of(unit, chunk, rows).elements;
  set_rows(task, rows);
  task.need = first_chunk_[static_cast<size_t>(unit)] + task.chunk;
  return task;
}

void Builder::touch(Task& task, Role role, AccessMode mode, BufferId buffer, int64_t begin, int64_t bytes) {
  task.accesses.push_back({role, mode, buffer, begin, begin + bytes});
}

void Builder::emit_batch() {
  const int64_t bytes = plan().batch_bytes();
  for (int rank = 0; rank < graph_.ranks(); ++rank) {
    Task& task = emit(TaskKind::h2d, {LaneKind::h2d, rank}, -1);
    touch(task, Role::source, AccessMode::read, rank_buffers(rank).batch_host, 0, bytes);
    touch(task, Role::target, AccessMode::write, rank_buffers(rank).batch, 0, bytes);
    task.work.link_bytes = task.work.host_read_bytes = bytes;
  }
}

void Builder::emit_deliveries(const Visit& visit) {
  wave_ = visit.wave;
  for (const Residency& weights : visit.weights) {
    if (!weights.deliver) continue;
    if (weights.touched) {
      if (visit.wave == 0) emit_touched_updates();
    } else if (!updated(weights.unit)) {
      emit_late_updates(weights.unit);
    }
    const size_t count = weights.touched ? graph_.touched.chunks.size() : chunks(weights.unit).size();
    // In the order of need: backward begins with the MLP block, unless it runs the forward again.
    const bool mlp_first = visit.backward && !recomputes(plan().activation[static_cast<size_t>(visit.unit) - 1]);
    const size_t first = mlp_first ? chunk_at(visit.unit, layout(visit.unit).range(LayerBlock::mlp).begin) : 0;
    for (size_t i = 0; i < count; ++i) emit_delivery(weights, (first + i) % count);
  }
}

// The chunk that holds an element.
size_t Builder::chunk_at(int unit, int64_t element) const {
  const auto ends_after = [element](const Chunk& chunk) { return chunk.begin + chunk.elements > element; };
  return static_cast<size_t>(std::ranges::find_if(chunks(unit), ends_after) - chunks(unit).begin());
}

// The first chunk that has nothing of a layer's attention block; their number if there is none.
size_t Builder::first_mlp_chunk(int unit) const {
  return chunk_at(unit, layout(unit).range(LayerBlock::attention).end - 1) + 1;
}

// Notes that the unit's (deferred) update stands in the graph; true if it already did.
bool Builder::updated(int unit) {
  const bool seen = updated_[static_cast<size_t>(unit)];
  updated_[static_cast<size_t>(unit)] = true;
  return seen;
}

void Builder::emit_delivery(const Residency& weights, size_t index) {
  const Chunk& chunk = chunk_of(weights.unit, index, weights.touched ? Rows::touched : Rows::all);
  const bool sharded = plan().delivery == Delivery::sharded;
  const bool broadcast = plan().delivery == Delivery::broadcast;
  const int root = static_cast<int>(index) % plan().ranks;
  const int64_t shard = chunk.shard_elements(plan().ranks);
  for (int rank = 0; rank < graph_.ranks(); ++rank) {
    if (broadcast && rank != root) continue;
    const int64_t begin = chunk.begin + (sharded ? rank * shard : 0);
    const int64_t elements = sharded ? chunk.shard_valid(rank, plan().ranks) : chunk.elements;
    if (elements > 0) emit_copy(weights, index, rank, begin, elements);
  }
  if (broadcast) emit_broadcast(weights, index, root);
  if (sharded) emit_all_gather(weights, index);
  ++groups_;
}

// One rank's h2d of a chunk, or of its part. Touched rows come from anywhere in the matrix.
void Builder::emit_copy(const Residency& weights, size_t index, int rank, int64_t begin, int64_t elements) {
  const Rows rows = weights.touched ? Rows::touched : Rows::all;
  const Chunk& chunk = chunk_of(weights.unit, index, rows);
  Task& task = emit_chunk(TaskKind::h2d, {LaneKind::h2d, rank}, weights.unit, index, rows);
  task.work.link_bytes = task.work.host_read_bytes = expected_part(chunk, rows, begin - chunk.begin, elements) * 2;
  if (plan().delivery == Delivery::broadcast && graph_.alike > 1) {
    // One rank that stands for all roots: what the others copy at the same time.
    const std::vector<Chunk>& all = weights.touched ? graph_.touched.chunks : chunks(weights.unit);
    const Chunk& last = all[std::min(index + static_cast<size_t>(graph_.alike), all.size()) - 1];
    elements = last.begin + last.elements - begin;
  }
  const BufferId hi = buffers_.hi[static_cast<size_t>(weights.unit)];
  if (weights.touched) {
    touch(task, Role::source, AccessMode::read, hi, 0, layout(weights.unit).elements * 2);
    touch(task, Role::touched_rows, AccessMode::read, buffers_.touched_rows,
          (wave_ * graph_.touched.capacity + begin / model_.hidden) * 4, elements / model_.hidden * 4);
  } else {
    touch(task, Role::source, AccessMode::read, hi, begin * 2, elements * 2);
  }
  touch(task, Role::target, AccessMode::write, weight_slot(rank, weights), begin * 2, elements * 2);
}

void Builder::emit_all_gather(const Residency& weights, size_t index) {
  const Rows rows = weights.touched ? Rows::touched : Rows::all;
  const Chunk& chunk = chunk_of(weights.unit, index, rows);
  const int64_t shard = chunk.shard_elements(plan().ranks);
  for (int rank = 0; rank < graph_.ranks(); ++rank) {
    Task& task = emit_chunk(TaskKind::all_gather, {LaneKind::comm, rank}, weights.unit, index, rows);
    const BufferId slot = weight_slot(rank, weights);
    touch(task, Role::source, AccessMode::read, slot, (chunk.begin + rank * shard) * 2, shard * 2);
    touch(task, Role::target, AccessMode::write, slot, chunk.begin * 2, chunk.padded * 2);
    task.work.link_bytes = expected(chunk, rows).padded * 2;
    task.group = groups_;
  }
}

void Builder::emit_broadcast(const Residency& weights, size_t index, int root) {
  const Rows rows = weights.touched ? Rows::touched : Rows::all;
  const Chunk& chunk = chunk_of(weights.unit, index, rows);
  for (int rank = 0; rank < graph_.ranks(); ++rank) {
    Task& task = emit_chunk(TaskKind::broadcast, {LaneKind::comm, rank}, weights.unit, index, rows);
    touch(task, Role::target, rank == root ? AccessMode::read : AccessMode::write, weight_slot(rank, weights),
          chunk.begin * 2, chunk.elements * 2);
    task.work.link_bytes = expected(chunk, rows).elements * 2;
    task.root = root;
    task.group = groups_;
  }
}

void Builder::emit_compute(const Visit& visit) {
  if (visit.backward && layout(visit.unit).kind == UnitKind::layer) return emit_layer_backward(visit);
  for (int m = 0; m < plan().micro_batches; ++m) {
    for (int rank = 0; rank < graph_.ranks(); ++rank) {
      switch (layout(visit.unit).kind) {
        case UnitKind::embedding:
          visit.backward ? emit_embedding_backward(rank, m) : emit_embedding_forward(visit, rank, m);
          break;
        case UnitKind::layer:
          emit_layer_forward(visit, rank, m);
          break;
        case UnitKind::head:
          emit_head(visit, rank, m);
          break;
      }
    }
  }
  if (layout(visit.unit).kind == UnitKind::head && wave_ == plan().waves - 1) emit_loss();
}

Task& Builder::emit_micro_batch(TaskKind kind, int unit, int rank, int m) {
  Task& task = emit(kind, {LaneKind::compute, rank}, unit);
  task.micro_batch = m;
  task.wave = wave_;
  const int64_t bytes = plan().micro_batch_bytes();
  touch(task, Role::batch, AccessMode::read, rank_buffers(rank).batch, place_in_step(m) * bytes, bytes);
  task.work.elements = plan().micro_batch_tokens();
  return task;
}

// Micro-batches of a step are numbered wave after wave.
int64_t Builder::place_in_step(int m) const { return static_cast<int64_t>(wave_) * plan().micro_batches + m; }

void Builder::touch_weights(Task& task, Role role, const Residency& weights) {
  ElementRange range = layout(weights.unit).range(task.block);
  if (weights.touched) range.end = graph_.touched.chunks.back().begin + graph_.touched.chunks.back().elements;
  touch(task, role, AccessMode::read, weight_slot(task.rank, weights), range.begin * 2, (range.end - range.begin) * 2);
}

void Builder::touch_hidden(Task& task, Role role, AccessMode mode, BufferId buffer) {
  touch(task, role, mode, buffer, 0, graph_.buffers[static_cast<size_t>(buffer)].bytes);
}

// The slot that holds a unit's gradient; layers take turns.
BufferId Builder::gradient_slot(int rank, int unit) {
  const auto& slots = rank_buffers(rank).gradients[static_cast<size_t>(layout(unit).slot_class)];
  const size_t turn = layout(unit).kind == UnitKind::layer ? static_cast<size_t>(graph_.layout.layers - unit) : 0;
  return slots[turn % slots.size()];
}

void Builder::touch_gradients(Task& task, Role role, int unit) {
  const ElementRange range = layout(unit).range(task.block);
  touch(task, role, task.first ? AccessMode::write : AccessMode::read_write, gradient_slot(task.rank, unit),
        range.begin * accumulator_bytes_, (range.end - range.begin) * accumulator_bytes_);
}

void Builder::touch_saved(Task& task, AccessMode mode, int64_t begin, int64_t end) {
  const auto m = static_cast<size_t>(task.micro_batch), layer = static_cast<size_t>(task.unit) - 1;
  touch(task, Role::saved, mode, rank_buffers(task.rank).saved[m][layer], begin, end - begin);
}

void Builder::emit_embedding_forward(const Visit& visit, int rank, int m) {
  Task& task = emit_micro_batch(TaskKind::fwd, visit.unit, rank, m);
  touch_weights(task, Role::weights, visit.weights[0]);
  touch_hidden(task, Role::hidden_out, AccessMode::write, hidden(rank, m, 0));
  task.work.flops = embedding_forward_elements(model_, plan().micro_batch_tokens());
  emit_act_d2h(rank, m, 0);
}

void Builder::price_blocks() {
  const int64_t rows = plan().micro_batch_rows, seq = plan().seq;
  for (const LayerBlock block : {LayerBlock::attention, LayerBlock::mlp}) {
    const auto backward = [&](bool first) {
      return layer_backward_work(model_, rows, seq, plan().compute, plan().accumulator, first, block);
    };
    block_work_[block] = {layer_forward_work(model_, rows, seq, plan().compute, block), backward(false), backward(true),
                          layer_forward_flops(model_, rows, seq, block) / layer_forward_flops(model_, rows, seq)};
  }
}

// One block of a layer: which weights and which share of the layer's work.
Task& Builder::emit_block(TaskKind kind, LayerBlock block, const Visit& visit, int rank, int m) {
  Task& task = emit_micro_batch(kind, visit.unit, rank, m);
  task.block = block;
  task.first = kind == TaskKind::bwd && m == 0;
  touch_weights(task, Role::weights, visit.weights[0]);
  const BlockWork& of_block = block_work_.at(block);
  const LayerWork& work = kind != TaskKind::bwd ? of_block.forward
                          : task.first          ? of_block.first_backward
                                                : of_block.backward;
  task.work.flops = work.flops();
  task.work.attention_flops = work.attention_flops;
  task.work.layer_bytes = work.bytes;
  task.work.share = of_block.share;
  return task;
}

// Forward, or again for backward. Between the blocks stands the residual, which is saved.
Task& Builder::emit_forward_block(TaskKind kind, LayerBlock block, const Visit& visit, int rank, int m) {
  const int layer = layout(visit.unit).layer;
  const SavedLayout& saved = saved_[static_cast<size_t>(layer)];
  Task& task = emit_block(kind, block, visit, rank, m);
  if (block == LayerBlock::attention) {
    touch_hidden(task, Role::hidden_in, AccessMode::read, hidden(rank, m, layer, kind == TaskKind::recompute));
    touch_saved(task, AccessMode::write, 0, saved.mlp);
  } else {
    touch_saved(task, AccessMode::read, saved.residual, saved.mlp);
    touch_saved(task, AccessMode::write, saved.mlp, saved.bytes);
  }
  return task;
}

void Builder::emit_layer_forward(const Visit& visit, int rank, int m) {
  const int layer = layout(visit.unit).layer;
  emit_forward_block(TaskKind::fwd, LayerBlock::attention, visit, rank, m);
  Task& task = emit_forward_block(TaskKind::fwd, LayerBlock::mlp, visit, rank, m);
  touch_hidden(task, Role::hidden_out, AccessMode::write, hidden(rank, m, layer + 1));
  emit_act_d2h(rank, m, layer + 1);
}

void Builder::emit_head(const Visit& visit, int rank, int m) {
  Task& task = emit_micro_batch(TaskKind::head, visit.unit, rank, m);
  task.first = m == 0;
  touch_weights(task, Role::weights, visit.weights[0]);
  touch_gradients(task, Role::gradients, visit.unit);
  if (graph_.layout.tied) {
    touch_weights(task, Role::vocabulary, visit.weights[1]);
    touch_gradients(task, Role::vocabulary_gradients, 0);
  }
  touch_hidden(task, Role::hidden_in, AccessMode::read, hidden(rank, m, graph_.layout.layers));
  touch_hidden(task, Role::hidden_gradient, AccessMode::write,
               rank_buffers(rank).hidden_gradient[static_cast<size_t>(m)]);
  touch(task, Role::loss, AccessMode::write, rank_buffers(rank).loss, place_in_step(m) * 8, 8);
  task.work.flops = head_flops(model_, plan().micro_batch_tokens());
}

void Builder::emit_loss() {
  const int64_t bytes = plan().loss_bytes();
  for (int rank = 0; rank < graph_.ranks(); ++rank) {
    Task& task = emit(TaskKind::d2h, {LaneKind::d2h, rank}, graph_.layout.layers + 1);
    touch(task, Role::source, AccessMode::read, rank_buffers(rank).loss, 0, bytes);
    touch(task, Role::target, AccessMode::write, rank_buffers(rank).loss_host, 0, bytes);
    task.work.link_bytes = task.work.host_write_bytes = bytes;
  }
}

// MLP block, then attention block, one micro-batch after another. The MLP's gradients leave once the last micro-batch
// has added its own.
void Builder::emit_layer_backward(const Visit& visit) {
  for (int m = 0; m < plan().micro_batches; ++m) {
    for (int rank = 0; rank < graph_.ranks(); ++rank) {
      emit_act_h2d(rank, m, layout(visit.unit).layer);
      emit_recompute(visit, rank, m);
      emit_backward_block(LayerBlock::mlp, visit, rank, m);
    }
    if (m == plan().micro_batches - 1) {
      emit_chunk_gradients(visit.unit, 0, true, first_mlp_chunk(visit.unit), chunks(visit.unit).size());
    }
    for (int rank = 0; rank < graph_.ranks(); ++rank) emit_backward_block(LayerBlock::attention, visit, rank, m);
  }
}

void Builder::emit_recompute(const Visit& visit, int rank, int m) {
  if (!recomputes(plan().activation[static_cast<size_t>(visit.unit) - 1])) return;
  emit_forward_block(TaskKind::recompute, LayerBlock::attention, visit, rank, m);
  emit_forward_block(TaskKind::recompute, LayerBlock::mlp, visit, rank, m);
}

void Builder::emit_backward_block(LayerBlock block, const Visit& visit, int rank, int m) {
  const int layer = layout(visit.unit).layer;
  const ActivationPolicy policy = plan().activation[static_cast<size_t>(layer)];
  const SavedLayout& saved = saved_[static_cast<size_t>(layer)];
  Task& task = emit_block(TaskKind::bwd, block, visit, rank, m);
  if (block == LayerBlock::mlp) {
    touch_saved(task, AccessMode::read, saved.residual, saved.mlp);
    touch_saved(task, AccessMode::read_write, saved.mlp, saved.bytes);
  } else {
    touch_hidden(task, Role::hidden_in, AccessMode::read, hidden(rank, m, layer, true));
    touch_saved(task, AccessMode::read_write, 0, saved.residual);
    // The gradient of the attention output takes the place of gate and up.
    const int64_t queries = plan().micro_batch_tokens() * model_.heads * model_.head_dim;
    touch_saved(task, AccessMode::write, saved.gate_up, saved.gate_up + queries * size_of(plan().compute));
  }
  touch_hidden(task, Role::hidden_gradient, AccessMode::read_write,
               rank_buffers(rank).hidden_gradient[static_cast<size_t>(m)]);
  touch_gradients(task, Role::gradients, visit.unit);
  task.work.device_bytes =
      static_cast<int64_t>(formed_again_bytes(model_, plan().micro_batch_tokens(), plan().compute, policy, block));
}

void Builder::emit_embedding_backward(int rank, int m) {
  Task& task = emit_micro_batch(TaskKind::bwd, 0, rank, m);
  task.first = m == 0;
  touch_hidden(task, Role::hidden_gradient, AccessMode::read,
               rank_buffers(rank).hidden_gradient[static_cast<size_t>(m)]);
  if (!touched()) {
    touch_gradients(task, Role::gradients, 0);
    task.work.flops = embedding_backward_elements(model_, plan().micro_batch_tokens(), task.first);
    return;
  }
  const Chunk& last = graph_.touched.chunks.back();
  touch(task, Role::gradients, task.first ? AccessMode::write : AccessMode::read_write, gradient_slot(rank, 0), 0,
        (last.begin + last.elements) * accumulator_bytes_);
  const int64_t zeroed = task.first ? graph_.touched.expected : 0;
  task.work.flops = embedding_backward_elements(model_, plan().micro_batch_tokens() + zeroed, false);
}

StepGraph build_step_graph(const ModelSpec& model, const TrainSpec& train, const Plan& plan) {
  return Builder(model, train, plan, 1).build();
}

StepGraph build_rank_graph(const ModelSpec& model, const TrainSpec& train, const Plan& plan) {
  return Builder(model, train, plan, plan.ranks).build();
}

bool ranks_alike(const StepGraph& graph) {
  const Plan& plan = graph.plan;
  if (plan.ranks == 1) return true;
  if (plan.delivery == Delivery::broadcast) return false;
  if (plan.delivery == Delivery::replicated && plan.reduction == Reduction::cpu) return true;
  const auto full = [](const std::vector<Chunk>& chunks) { return chunks.back().padded == chunks.back().elements; };
  return std::ranges::all_of(graph.chunks, full) && (graph.touched.chunks.empty() || full(graph.touched.chunks));
}

}  // namespace slidedp
