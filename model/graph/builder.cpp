// Emits the tasks of one steady-state step in program order. Dependencies follow from what the tasks touch
// (dependencies.cpp), slots from the order of visits (visits.cpp), buffers from the plan (buffers.cpp).
#include <map>
#include <utility>

#include "model/cost/activations.h"
#include "model/cost/flops.h"
#include "model/graph/buffers.h"
#include "model/graph/dependencies.h"
#include "model/graph/step_graph.h"
#include "model/graph/visits.h"

namespace slidedp {
namespace {

class Builder {
 public:
  Builder(const ModelSpec& model, const Plan& plan) : model_(model) {
    graph_.plan = plan;
    graph_.layout = make_layout(model);
    int32_t chunks = 0;
    for (const UnitLayout& unit : graph_.layout.units) {
      graph_.chunks.push_back(make_chunks(unit, plan.chunk_elements, plan.ranks));
      first_chunk_.push_back(chunks);
      chunks += static_cast<int32_t>(graph_.chunks.back().size());
    }
    total_chunks_ = chunks;
    buffers_ = declare_buffers(graph_, model);
    visits_ = plan_visits(graph_.layout, plan);
    wire_bytes_ = size_of(plan.wire);
    accumulator_bytes_ = size_of(plan.accumulator);
  }

  StepGraph build() {
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

 private:
  const Plan& plan() const { return graph_.plan; }
  const UnitLayout& layout(int unit) const { return graph_.layout.units[static_cast<size_t>(unit)]; }
  const std::vector<Chunk>& chunks(int unit) const { return graph_.chunks[static_cast<size_t>(unit)]; }
  RankBuffers& rank_buffers(int rank) { return buffers_.ranks[static_cast<size_t>(rank)]; }
  BufferId weight_slot(int rank, const Residency& weights) {
    return rank_buffers(rank).weights[static_cast<size_t>(weights.slot_class)][static_cast<size_t>(weights.slot)];
  }

  // A delivery may run ahead of the visit on the compute lane while its slots are not used by the visits between.
  bool slots_free(size_t visit, size_t ahead) const {
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

  Task& emit(TaskKind kind, Lane lane, int unit) {
    Task& task = graph_.tasks.emplace_back();
    task.kind = kind;
    task.lane = lane;
    task.rank = lane.rank;
    task.unit = unit;
    return task;
  }

  Task& emit_chunk(TaskKind kind, Lane lane, int unit, size_t chunk) {
    Task& task = emit(kind, lane, unit);
    task.chunk = static_cast<int>(chunk);
    task.elements_begin = chunks(unit)[chunk].begin;
    task.elements = chunks(unit)[chunk].elements;
    task.work.elements = task.elements;
    task.need = first_chunk_[static_cast<size_t>(unit)] + task.chunk;
    return task;
  }

  static void touch(Task& task, Role role, AccessMode mode, BufferId buffer, int64_t begin, int64_t bytes) {
    task.accesses.push_back({role, mode, buffer, begin, begin + bytes});
  }

  void emit_batch() {
    const int64_t bytes =
        static_cast<int64_t>(plan().waves) * plan().micro_batches * 3 * plan().micro_batch_tokens() * 4;
    for (int rank = 0; rank < plan().ranks; ++rank) {
      Task& task = emit(TaskKind::h2d, {LaneKind::h2d, rank}, -1);
      touch(task, Role::source, AccessMode::read, rank_buffers(rank).batch_host, 0, bytes);
      touch(task, Role::target, AccessMode::write, rank_buffers(rank).batch, 0, bytes);
      task.work.link_bytes = task.work.host_read_bytes = bytes;
    }
  }

  void emit_deliveries(const Visit& visit) {
    for (const Residency& weights : visit.weights) {
      if (!weights.deliver) continue;
      if (plan().update != UpdatePolicy::eager && !updated(weights.unit)) emit_late_updates(weights.unit);
      for (size_t chunk = 0; chunk < chunks(weights.unit).size(); ++chunk) emit_delivery(weights, chunk);
    }
  }

  // Notes that the unit's (deferred) update stands in the graph; true if it already did.
  bool updated(int unit) {
    const bool seen = updated_[static_cast<size_t>(unit)];
    updated_[static_cast<size_t>(unit)] = true;
    return seen;
  }

  void emit_delivery(const Residency& weights, size_t index) {
    const Chunk& chunk = chunks(weights.unit)[index];
    const bool sharded = plan().delivery == Delivery::sharded;
    const bool broadcast = plan().delivery == Delivery::broadcast;
    const int root = static_cast<int>(index) % plan().ranks;
    const int64_t shard = chunk.shard_elements(plan().ranks);
    for (int rank = 0; rank < plan().ranks; ++rank) {
      if (broadcast && rank != root) continue;
      const int64_t begin = chunk.begin + (sharded ? rank * shard : 0);
      const int64_t elements = sharded ? chunk.shard_valid(rank, plan().ranks) : chunk.elements;
      if (elements == 0) continue;
      Task& task = emit_chunk(TaskKind::h2d, {LaneKind::h2d, rank}, weights.unit, index);
      touch(task, Role::source, AccessMode::read, buffers_.hi[static_cast<size_t>(weights.unit)], begin * 2,
            elements * 2);
      touch(task, Role::target, AccessMode::write, weight_slot(rank, weights), begin * 2, elements * 2);
      task.work.link_bytes = task.work.host_read_bytes = elements * 2;
    }
    if (broadcast) emit_broadcast(weights, index, root);
    if (!sharded) return;
    for (int rank = 0; rank < plan().ranks; ++rank) {
      Task& task = emit_chunk(TaskKind::all_gather, {LaneKind::comm, rank}, weights.unit, index);
      const BufferId slot = weight_slot(rank, weights);
      touch(task, Role::source, AccessMode::read, slot, (chunk.begin + rank * shard) * 2, shard * 2);
      touch(task, Role::target, AccessMode::write, slot, chunk.begin * 2, chunk.padded * 2);
      task.work.link_bytes = chunk.padded * 2;
      task.group = groups_;
    }
    ++groups_;
  }

  void emit_broadcast(const Residency& weights, size_t index, int root) {
    const Chunk& chunk = chunks(weights.unit)[index];
    for (int rank = 0; rank < plan().ranks; ++rank) {
      Task& task = emit_chunk(TaskKind::broadcast, {LaneKind::comm, rank}, weights.unit, index);
      touch(task, Role::target, rank == root ? AccessMode::read : AccessMode::write, weight_slot(rank, weights),
            chunk.begin * 2, chunk.elements * 2);
      task.work.link_bytes = chunk.elements * 2;
      task.root = root;
      task.group = groups_;
    }
    ++groups_;
  }

  void emit_compute(const Visit& visit) {
    for (int m = 0; m < plan().micro_batches; ++m) {
      for (int rank = 0; rank < plan().ranks; ++rank) {
        switch (layout(visit.unit).kind) {
          case UnitKind::embedding:
            visit.backward ? emit_embedding_backward(rank, m) : emit_embedding_forward(visit, rank, m);
            break;
          case UnitKind::layer:
            visit.backward ? emit_layer_backward(visit, rank, m) : emit_layer_forward(visit, rank, m);
            break;
          case UnitKind::head:
            emit_head(visit, rank, m);
            break;
        }
      }
    }
    if (layout(visit.unit).kind == UnitKind::head && wave_ == plan().waves - 1) emit_loss();
  }

  Task& emit_micro_batch(TaskKind kind, int unit, int rank, int m) {
    Task& task = emit(kind, {LaneKind::compute, rank}, unit);
    task.micro_batch = m;
    task.wave = wave_;
    const int64_t bytes = 3 * plan().micro_batch_tokens() * 4;
    touch(task, Role::batch, AccessMode::read, rank_buffers(rank).batch, place_in_step(m) * bytes, bytes);
    task.work.elements = plan().micro_batch_tokens();
    return task;
  }

  // Micro-batches of a step are numbered wave after wave.
  int64_t place_in_step(int m) const { return static_cast<int64_t>(wave_) * plan().micro_batches + m; }

  void touch_weights(Task& task, Role role, const Residency& weights) {
    touch(task, role, AccessMode::read, weight_slot(task.rank, weights), 0, layout(weights.unit).elements * 2);
  }

  void touch_hidden(Task& task, Role role, AccessMode mode, BufferId buffer) {
    touch(task, role, mode, buffer, 0, graph_.buffers[static_cast<size_t>(buffer)].bytes);
  }

  // The slot that holds a unit's gradient; layers take turns.
  BufferId gradient_slot(int rank, int unit) {
    const auto& slots = rank_buffers(rank).gradients[static_cast<size_t>(layout(unit).slot_class)];
    const size_t turn = layout(unit).kind == UnitKind::layer ? static_cast<size_t>(graph_.layout.layers - unit) : 0;
    return slots[turn % slots.size()];
  }

  void touch_gradients(Task& task, Role role, int unit) {
    touch(task, role, task.first ? AccessMode::write : AccessMode::read_write, gradient_slot(task.rank, unit), 0,
          layout(unit).elements * accumulator_bytes_);
  }

  BufferId hidden(int rank, int m, int boundary) {
    return rank_buffers(rank).hidden[static_cast<size_t>(m)][static_cast<size_t>(boundary)];
  }
  BufferId saved(int rank, int m, int layer) {
    return rank_buffers(rank).saved[static_cast<size_t>(m)][static_cast<size_t>(layer)];
  }

  void emit_embedding_forward(const Visit& visit, int rank, int m) {
    Task& task = emit_micro_batch(TaskKind::fwd, visit.unit, rank, m);
    touch_weights(task, Role::weights, visit.weights[0]);
    touch_hidden(task, Role::hidden_out, AccessMode::write, hidden(rank, m, 0));
    task.work.flops = embedding_forward_elements(model_, plan().micro_batch_tokens());
  }

  void emit_layer_forward(const Visit& visit, int rank, int m) {
    const int layer = layout(visit.unit).layer;
    Task& task = emit_micro_batch(TaskKind::fwd, visit.unit, rank, m);
    touch_weights(task, Role::weights, visit.weights[0]);
    touch_hidden(task, Role::hidden_in, AccessMode::read, hidden(rank, m, layer));
    touch_hidden(task, Role::hidden_out, AccessMode::write, hidden(rank, m, layer + 1));
    touch_hidden(task, Role::saved, AccessMode::write, saved(rank, m, layer));
    task.work.flops = layer_forward_flops(model_, plan().micro_batch_rows, plan().seq);
  }

  void emit_head(const Visit& visit, int rank, int m) {
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

  void emit_loss() {
    const int64_t bytes = static_cast<int64_t>(plan().waves) * plan().micro_batches * 8;
    for (int rank = 0; rank < plan().ranks; ++rank) {
      Task& task = emit(TaskKind::d2h, {LaneKind::d2h, rank}, graph_.layout.layers + 1);
      touch(task, Role::source, AccessMode::read, rank_buffers(rank).loss, 0, bytes);
      touch(task, Role::target, AccessMode::write, rank_buffers(rank).loss_host, 0, bytes);
      task.work.link_bytes = task.work.host_write_bytes = bytes;
    }
  }

  void emit_layer_backward(const Visit& visit, int rank, int m) {
    const int layer = layout(visit.unit).layer;
    if (plan().activation[static_cast<size_t>(layer)] == ActivationPolicy::recompute) {
      Task& task = emit_micro_batch(TaskKind::recompute, visit.unit, rank, m);
      touch_weights(task, Role::weights, visit.weights[0]);
      touch_hidden(task, Role::hidden_in, AccessMode::read, hidden(rank, m, layer));
      touch_hidden(task, Role::saved, AccessMode::write, saved(rank, m, layer));
      task.work.flops = layer_forward_flops(model_, plan().micro_batch_rows, plan().seq);
    }
    Task& task = emit_micro_batch(TaskKind::bwd, visit.unit, rank, m);
    task.first = m == 0;
    touch_weights(task, Role::weights, visit.weights[0]);
    touch_hidden(task, Role::hidden_in, AccessMode::read, hidden(rank, m, layer));
    touch_hidden(task, Role::saved, AccessMode::read_write, saved(rank, m, layer));
    touch_hidden(task, Role::hidden_gradient, AccessMode::read_write,
                 rank_buffers(rank).hidden_gradient[static_cast<size_t>(m)]);
    touch_gradients(task, Role::gradients, visit.unit);
    task.work.flops = layer_backward_flops(model_, plan().micro_batch_rows, plan().seq);
    if (plan().activation[static_cast<size_t>(layer)] == ActivationPolicy::selective) {
      task.work.device_bytes =
          static_cast<int64_t>(selective_backward_bytes(model_, plan().micro_batch_tokens(), plan().compute));
    }
  }

  void emit_embedding_backward(int rank, int m) {
    Task& task = emit_micro_batch(TaskKind::bwd, 0, rank, m);
    task.first = m == 0;
    touch_hidden(task, Role::hidden_gradient, AccessMode::read,
                 rank_buffers(rank).hidden_gradient[static_cast<size_t>(m)]);
    touch_gradients(task, Role::gradients, 0);
    task.work.flops = embedding_backward_elements(model_, plan().micro_batch_tokens(), task.first);
  }

  // What leaves the device after a visit: the head's gradients, a layer's, the embedding's.
  void emit_gradients(const Visit& visit) {
    const bool head = layout(visit.unit).kind == UnitKind::head;
    if (!head && !visit.backward) return;
    if (head && graph_.layout.tied) emit_unit_gradients(0, 0, false);
    const int group = visit.unit == 0 ? gradient_groups(graph_.layout, 0) - 1 : 0;
    emit_unit_gradients(visit.unit, group, true);
  }

  // `last`: all of the unit's gradients of this wave have landed after this one.
  void emit_unit_gradients(int unit, int group, bool last) {
    for (size_t chunk = 0; chunk < chunks(unit).size(); ++chunk) {
      // The second pass of the previous step's update still reads what this lands on.
      if (plan().update == UpdatePolicy::split && wave_ == 0 && group == 0) {
        emit_update(unit, chunk, UpdatePart::moments);
      }
      const std::vector<Place> places = land(unit, group, chunk);
      emit_reduction(unit, places, chunk);
      emit_consumer(unit, group, chunk, places, last);
    }
  }

  // What happens to a gradient once it has landed.
  void emit_consumer(int unit, int group, size_t chunk, const std::vector<Place>& places, bool last) {
    const bool several = plan().waves > 1;
    if (several && !(last && wave_ == plan().waves - 1)) return emit_accumulate(unit, group, chunk, places);
    if (!last) return;  // one wave: its places keep it until the update
    if (plan().update == UpdatePolicy::eager) {
      emit_eager_update(unit, chunk, places);
    } else {
      emit_chunk_norm(unit, chunk, places);
    }
  }

  // Places for a chunk's gradient, one a source. A ring's slots are taken in landing order.
  std::vector<Place> land(int unit, int group, size_t chunk) {
    const auto& groups = buffers_.landing[static_cast<size_t>(unit)];
    if (!groups.empty()) return fixed_places(unit, group, chunk);
    const int64_t turn = ring_turn_++;
    std::vector<Place> places;
    for (const auto& slots : buffers_.ring) places.push_back({slots[static_cast<size_t>(turn) % slots.size()], 0});
    return places;
  }

  std::vector<Place> fixed_places(int unit, int group, size_t chunk) const {
    std::vector<Place> places;
    for (const BufferId buffer : buffers_.landing[static_cast<size_t>(unit)][static_cast<size_t>(group)]) {
      places.push_back({buffer, chunks(unit)[chunk].begin * wire_bytes_});
    }
    return places;
  }

  void emit_reduction(int unit, const std::vector<Place>& places, size_t index) {
    const Chunk& chunk = chunks(unit)[index];
    const bool gpu = plan().reduction == Reduction::gpu;
    const bool cast = plan().accumulator != plan().wire;
    const size_t turn = wire_turn_++ % static_cast<size_t>(plan().wire_slots);
    std::vector<Place> wire(static_cast<size_t>(plan().ranks));
    for (int rank = 0; rank < plan().ranks; ++rank) {
      const BufferId slot = gradient_slot(rank, unit);
      if (!cast) {
        wire[static_cast<size_t>(rank)] = {slot, chunk.begin * wire_bytes_};
        continue;
      }
      wire[static_cast<size_t>(rank)] = {rank_buffers(rank).wire[turn], 0};
      Task& task = emit_chunk(TaskKind::cast, {LaneKind::comm, rank}, unit, index);
      touch(task, Role::source, AccessMode::read, slot, chunk.begin * accumulator_bytes_,
            chunk.padded * accumulator_bytes_);
      touch(task, Role::target, AccessMode::write, wire[static_cast<size_t>(rank)].buffer, 0,
            chunk.padded * wire_bytes_);
      task.work.device_bytes = chunk.padded * (accumulator_bytes_ + wire_bytes_);
    }
    if (gpu) emit_reduce_scatter(unit, index, wire, turn);
    const int64_t shard = chunk.shard_elements(plan().ranks);
    for (int rank = 0; rank < plan().ranks; ++rank) {
      const int64_t elements = gpu ? chunk.shard_valid(rank, plan().ranks) : chunk.elements;
      if (elements == 0) continue;
      Task& task = emit_chunk(TaskKind::d2h, {LaneKind::d2h, rank}, unit, index);
      const Place from = gpu ? Place{rank_buffers(rank).shard[turn], 0} : wire[static_cast<size_t>(rank)];
      const Place to = places[static_cast<size_t>(gpu ? 0 : rank)];
      const int64_t to_begin = to.begin + (gpu ? rank * shard * wire_bytes_ : 0);
      touch(task, Role::source, AccessMode::read, from.buffer, from.begin, elements * wire_bytes_);
      touch(task, Role::target, AccessMode::write, to.buffer, to_begin, elements * wire_bytes_);
      task.work.link_bytes = task.work.host_write_bytes = elements * wire_bytes_;
    }
  }

  void emit_reduce_scatter(int unit, size_t index, const std::vector<Place>& wire, size_t turn) {
    const Chunk& chunk = chunks(unit)[index];
    for (int rank = 0; rank < plan().ranks; ++rank) {
      Task& task = emit_chunk(TaskKind::reduce_scatter, {LaneKind::comm, rank}, unit, index);
      const Place from = wire[static_cast<size_t>(rank)];
      touch(task, Role::source, AccessMode::read, from.buffer, from.begin, chunk.padded * wire_bytes_);
      touch(task, Role::target, AccessMode::write, rank_buffers(rank).shard[turn], 0,
            chunk.shard_elements(plan().ranks) * wire_bytes_);
      task.work.link_bytes = chunk.padded * wire_bytes_;
      task.group = groups_;
    }
    ++groups_;
  }

  void touch_sources(Task& task, const std::vector<Place>& places) {
    for (const Place& place : places) {
      touch(task, Role::source, AccessMode::read, place.buffer, place.begin, task.elements * wire_bytes_);
    }
    task.work.sources += static_cast<int>(places.size());
    task.work.host_read_bytes += static_cast<int64_t>(places.size()) * task.elements * wire_bytes_;
  }

  // With one wave, what earlier groups landed comes first: gradients are summed in the groups' order (head, lookup).
  void touch_earlier_groups(Task& task) {
    if (plan().waves > 1) return;
    for (int group = 0; group + 1 < gradient_groups(graph_.layout, task.unit); ++group) {
      touch_sources(task, fixed_places(task.unit, group, static_cast<size_t>(task.chunk)));
    }
  }

  void touch_accumulator(Task& task, AccessMode mode) {
    if (plan().waves == 1) return;
    touch(task, Role::accumulator, mode, buffers_.accumulator[static_cast<size_t>(task.unit)], task.elements_begin * 4,
          task.elements * 4);
    if (mode != AccessMode::write) task.work.host_read_bytes += task.elements * 4;
    if (mode != AccessMode::read) task.work.host_write_bytes += task.elements * 4;
  }

  void touch_partials(Task& task, AccessMode mode) {
    const int64_t begin =
        buffers_.partials_begin[static_cast<size_t>(task.unit)] + task.elements_begin / kBlockElements;
    touch(task, Role::partials, mode, buffers_.partials, begin * 8, task.elements / kBlockElements * 8);
  }

  // The previous step's update of a unit, before its weights are delivered.
  void emit_late_updates(int unit) {
    const bool split = plan().update == UpdatePolicy::split;
    for (size_t chunk = 0; chunk < chunks(unit).size(); ++chunk) {
      emit_update(unit, chunk, split ? UpdatePart::weights : UpdatePart::whole);
    }
  }

  // A deferred update, or one part of it: reads what the previous step landed (or accumulated) and its norm.
  void emit_update(int unit, size_t chunk, UpdatePart part) {
    Task& task = emit_chunk(TaskKind::update, {LaneKind::update, -1}, unit, chunk);
    task.phases = kUpdatePhases;
    // After the weights of all units, in the order of landing: a chunk's gradient waits for its moments.
    if (part == UpdatePart::moments) task.need = total_chunks_ + moments_turn_++;
    touch_earlier_groups(task);
    if (plan().waves == 1) touch_sources(task, fixed_places(unit, gradient_groups(graph_.layout, unit) - 1, chunk));
    touch_accumulator(task, AccessMode::read);
    touch_state(task, part);
    touch(task, Role::scalars, AccessMode::read, buffers_.scalars, 0, 64);
  }

  void emit_eager_update(int unit, size_t chunk, const std::vector<Place>& places) {
    Task& task = emit_chunk(TaskKind::update, {LaneKind::update, -1}, unit, chunk);
    touch_earlier_groups(task);
    touch_sources(task, places);
    touch_accumulator(task, AccessMode::read);
    touch_state(task, UpdatePart::whole);
    touch_partials(task, AccessMode::write);  // the norm is logged only
  }

  // Weights: hi and lo are written from m and v; moments: m and v alone.
  void touch_state(Task& task, UpdatePart part) {
    task.part = part;
    const auto state = [&](Role role, AccessMode mode, BufferId buffer, int64_t bytes) {
      touch(task, role, mode, buffer, task.elements_begin * bytes, task.elements * bytes);
      task.work.host_read_bytes += task.elements * bytes;
      if (writes(mode)) task.work.host_write_bytes += task.elements * bytes;
    };
    const auto u = static_cast<size_t>(task.unit);
    const AccessMode moments = part == UpdatePart::weights ? AccessMode::read : AccessMode::read_write;
    if (part != UpdatePart::moments) {
      state(Role::hi, AccessMode::read_write, buffers_.hi[u], 2);
      state(Role::lo, AccessMode::read_write, buffers_.lo[u], 2);
    }
    state(Role::m, moments, buffers_.m[u], 4);
    state(Role::v, moments, buffers_.v[u], 4);
  }

  void emit_accumulate(int unit, int group, size_t chunk, const std::vector<Place>& places) {
    Task& task = emit_chunk(TaskKind::host_accumulate, {LaneKind::update, -1}, unit, chunk);
    task.wave = wave_;
    task.first = wave_ == 0 && group == 0;
    task.need += 2 * total_chunks_;  // updates are waited for sooner
    touch_sources(task, places);
    touch_accumulator(task, task.first ? AccessMode::write : AccessMode::read_write);
  }

  // With several waves the last one is added to the accumulator in the same pass.
  void emit_chunk_norm(int unit, size_t chunk, const std::vector<Place>& places) {
    Task& task = emit_chunk(TaskKind::norm, {LaneKind::update, -1}, unit, chunk);
    task.need += 2 * total_chunks_;  // waited for by the next step only
    touch_earlier_groups(task);
    touch_sources(task, places);
    touch_accumulator(task, AccessMode::read_write);
    touch_partials(task, AccessMode::write);
  }

  // Combines the partial sums; deferred updates of the next step read the result.
  void emit_norm() {
    Task& task = emit(TaskKind::norm, {LaneKind::update, -1}, -1);
    task.need = 3 * total_chunks_;
    const int64_t bytes = graph_.buffers[static_cast<size_t>(buffers_.partials)].bytes;
    touch(task, Role::partials, AccessMode::read, buffers_.partials, 0, bytes);
    touch(task, Role::scalars, AccessMode::write, buffers_.scalars, 0, 64);
    task.work.host_read_bytes = bytes;
  }

  const ModelSpec& model_;
  StepGraph graph_;
  BufferTable buffers_;
  std::vector<Visit> visits_;
  std::vector<int32_t> first_chunk_;  // by unit: chunks of the units before it
  int32_t total_chunks_ = 0;
  int64_t ring_turn_ = 0;
  int32_t moments_turn_ = 0;
  std::map<size_t, bool> updated_;
  int wave_ = 0;
  int64_t wire_bytes_ = 0, accumulator_bytes_ = 0;
  size_t wire_turn_ = 0;
  int32_t groups_ = 0;
};

}  // namespace

StepGraph build_step_graph(const ModelSpec& model, const TrainSpec&, const Plan& plan) {
  return Builder(model, plan).build();
}

}  // namespace slidedp
