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
      if (plan().update != UpdatePolicy::eager && !updated(weights.unit)) emit_updates(weights.unit, kUpdatePhases);
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
    const int64_t shard = chunk.shard_elements(plan().ranks);
    for (int rank = 0; rank < plan().ranks; ++rank) {
      const int64_t begin = chunk.begin + (sharded ? rank * shard : 0);
      const int64_t elements = sharded ? chunk.shard_valid(rank, plan().ranks) : chunk.elements;
      if (elements == 0) continue;
      Task& task = emit_chunk(TaskKind::h2d, {LaneKind::h2d, rank}, weights.unit, index);
      touch(task, Role::source, AccessMode::read, buffers_.hi[static_cast<size_t>(weights.unit)], begin * 2,
            elements * 2);
      touch(task, Role::target, AccessMode::write, weight_slot(rank, weights), begin * 2, elements * 2);
      task.work.link_bytes = task.work.host_read_bytes = elements * 2;
    }
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
    if (layout(visit.unit).kind == UnitKind::head) emit_loss();
  }

  Task& emit_micro_batch(TaskKind kind, int unit, int rank, int m) {
    Task& task = emit(kind, {LaneKind::compute, rank}, unit);
    task.micro_batch = m;
    task.wave = 0;
    const int64_t bytes = 3 * plan().micro_batch_tokens() * 4;
    touch(task, Role::batch, AccessMode::read, rank_buffers(rank).batch, m * bytes, bytes);
    task.work.elements = plan().micro_batch_tokens();
    return task;
  }

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
    touch(task, Role::loss, AccessMode::write, rank_buffers(rank).loss, m * 8, 8);
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

  // `last`: all gradients of the unit have landed after this one.
  void emit_unit_gradients(int unit, int group, bool last) {
    for (size_t chunk = 0; chunk < chunks(unit).size(); ++chunk) {
      const Place landing = landing_place(unit, group, 0, chunk);
      emit_reduction(unit, group, chunk, landing.begin);
      if (!last) continue;
      if (plan().update == UpdatePolicy::eager) {
        emit_update(unit, chunk, kStepPhases);
      } else {
        emit_chunk_norm(unit, chunk);
      }
    }
  }

  // Landing buffers by source are alike, so `begin` holds for all of them. A ring slot is taken at the first call for a
  // chunk, in landing order.
  Place landing_place(int unit, int group, int source, size_t chunk) {
    const auto& groups = buffers_.landing[static_cast<size_t>(unit)];
    if (!groups.empty()) {
      return {groups[static_cast<size_t>(group)][static_cast<size_t>(source)], chunks(unit)[chunk].begin * wire_bytes_};
    }
    const auto [turn, fresh] = ring_turn_.try_emplace({unit, chunk}, static_cast<int64_t>(ring_turn_.size()));
    const auto& slots = buffers_.ring[static_cast<size_t>(source)];
    return {slots[static_cast<size_t>(turn->second) % slots.size()], 0};
  }

  void emit_reduction(int unit, int group, size_t index, int64_t landing_begin) {
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
      const Place to = landing_place(unit, group, gpu ? 0 : rank, index);
      const int64_t to_begin = landing_begin + (gpu ? rank * shard * wire_bytes_ : 0);
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

  // Gradient sources in order of summation: the groups (head, lookup), and in a group the ranks.
  void touch_sources(Task& task) {
    const auto chunk = static_cast<size_t>(task.chunk);
    for (int group = 0; group < gradient_groups(graph_.layout, task.unit); ++group) {
      for (int source = 0; source < graph_.sources_per_group(); ++source) {
        const Place place = landing_place(task.unit, group, source, chunk);
        touch(task, Role::source, AccessMode::read, place.buffer, place.begin, task.elements * wire_bytes_);
        ++task.work.sources;
      }
    }
    task.work.host_read_bytes += task.work.sources * task.elements * wire_bytes_;
  }

  void touch_partials(Task& task, AccessMode mode) {
    const int64_t begin =
        buffers_.partials_begin[static_cast<size_t>(task.unit)] + task.elements_begin / kBlockElements;
    touch(task, Role::partials, mode, buffers_.partials, begin * 8, task.elements / kBlockElements * 8);
  }

  void emit_updates(int unit, uint8_t phases) {
    for (size_t chunk = 0; chunk < chunks(unit).size(); ++chunk) emit_update(unit, chunk, phases);
  }

  void emit_update(int unit, size_t chunk, uint8_t phases) {
    Task& task = emit_chunk(TaskKind::update, {LaneKind::update, -1}, unit, chunk);
    task.phases = phases;
    touch_sources(task);
    const auto state = [&](Role role, BufferId buffer, int64_t bytes) {
      touch(task, role, AccessMode::read_write, buffer, task.elements_begin * bytes, task.elements * bytes);
      task.work.host_read_bytes += task.elements * bytes;
      task.work.host_write_bytes += task.elements * bytes;
    };
    const auto u = static_cast<size_t>(unit);
    state(Role::hi, buffers_.hi[u], 2);
    state(Role::lo, buffers_.lo[u], 2);
    state(Role::m, buffers_.m[u], 4);
    state(Role::v, buffers_.v[u], 4);
    if (plan().update == UpdatePolicy::eager) {
      touch_partials(task, AccessMode::write);  // the norm is logged only
    } else {
      touch(task, Role::scalars, AccessMode::read, buffers_.scalars, 0, 64);
    }
  }

  void emit_chunk_norm(int unit, size_t chunk) {
    Task& task = emit_chunk(TaskKind::norm, {LaneKind::update, -1}, unit, chunk);
    task.need = -1;  // every update waits for the norm
    touch_sources(task);
    touch_partials(task, AccessMode::write);
  }

  // Combines the partial sums; deferred updates of the next step read the result.
  void emit_norm() {
    Task& task = emit(TaskKind::norm, {LaneKind::update, -1}, -1);
    task.need = -1;
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
  std::map<std::pair<int, size_t>, int64_t> ring_turn_;
  std::map<size_t, bool> updated_;
  int64_t wire_bytes_ = 0, accumulator_bytes_ = 0;
  size_t wire_turn_ = 0;
  int32_t groups_ = 0;
};

}  // namespace

StepGraph build_step_graph(const ModelSpec& model, const TrainSpec&, const Plan& plan) {
  return Builder(model, plan).build();
}

}  // namespace slidedp
