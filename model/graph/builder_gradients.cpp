// From the device's gradient slots to the update: reduction, landing, accumulation over waves, norm.
#include <algorithm>

#include "model/graph/builder.h"

namespace slidedp {

// What leaves the device after a visit: the head's gradients, a layer's, the embedding's.
void Builder::emit_gradients(const Visit& visit) {
  const bool head = layout(visit.unit).kind == UnitKind::head;
  if (!head && !visit.backward) return;
  if (head && graph_.layout.tied) emit_chunk_gradients(0, 0, false, 0, chunks(0).size());
  if (touched() && visit.unit == 0) return emit_touched_gradients();
  const int group = visit.unit == 0 ? gradient_groups(graph_.layout, 0) - 1 : 0;
  // Those of a layer's MLP block have left in the middle of its backward.
  const bool layer = layout(visit.unit).kind == UnitKind::layer;
  const size_t count = layer ? first_mlp_chunk(visit.unit) : chunks(visit.unit).size();
  emit_chunk_gradients(visit.unit, group, true, 0, count);
  if (!touched() || !head) return;
  for (size_t chunk = 0; chunk < chunks(0).size(); ++chunk) emit_untouched(chunk);
}

// Of some of the unit's chunks. `last`: all of their gradients of this wave have landed after this one.
void Builder::emit_chunk_gradients(int unit, int group, bool last, size_t begin, size_t end) {
  for (size_t chunk = begin; chunk < end; ++chunk) {
    if (plan().update == UpdatePolicy::split && wave_ == 0 && group == 0) {
      emit_update(unit, chunk, UpdatePart::moments);
    }
    const std::vector<Place> places = land(unit, group, chunk);
    emit_reduction(unit, places, chunk);
    emit_consumer(unit, group, chunk, places, last);
  }
}

// What happens to a gradient once it has landed.
void Builder::emit_consumer(int unit, int group, size_t chunk, const std::vector<Place>& places, bool last) {
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
std::vector<Place> Builder::land(int unit, int group, size_t chunk) {
  const auto& groups = buffers_.landing[static_cast<size_t>(unit)];
  if (!groups.empty()) return fixed_places(unit, group, chunk);
  const int64_t turn = ring_turn_++;
  std::vector<Place> places;
  for (const auto& slots : buffers_.ring) places.push_back({slots[static_cast<size_t>(turn) % slots.size()], 0});
  return places;
}

std::vector<Place> Builder::fixed_places(int unit, int group, size_t chunk) const {
  std::vector<Place> places;
  for (const BufferId buffer : buffers_.landing[static_cast<size_t>(unit)][static_cast<size_t>(group)]) {
    places.push_back({buffer, chunks(unit)[chunk].begin * wire_bytes_});
  }
  return places;
}

void Builder::emit_reduction(int unit, const std::vector<Place>& places, size_t index, Rows rows) {
  const Chunk& chunk = chunk_of(unit, index, rows);
  const bool gpu = plan().reduction == Reduction::gpu;
  const bool cast = plan().accumulator != plan().wire;
  const size_t turn = wire_turn_++ % static_cast<size_t>(plan().wire_slots);
  std::vector<Place> wire;
  for (int rank = 0; rank < graph_.ranks(); ++rank) {
    wire.push_back(cast ? emit_cast(unit, index, rank, turn, rows)
                        : Place{gradient_slot(rank, unit), chunk.begin * wire_bytes_});
  }
  if (gpu) emit_reduce_scatter(unit, index, wire, turn, rows);
  const int64_t shard = chunk.shard_elements(plan().ranks);
  for (int rank = 0; rank < graph_.ranks(); ++rank) {
    const int64_t elements = gpu ? chunk.shard_valid(rank, plan().ranks) : chunk.elements;
    if (elements == 0) continue;
    Task& task = emit_chunk(TaskKind::d2h, {LaneKind::d2h, rank}, unit, index, rows);
    const Place from = gpu ? Place{rank_buffers(rank).shard[turn], 0} : wire[static_cast<size_t>(rank)];
    const Place to = places[static_cast<size_t>(gpu ? 0 : rank)];
    const int64_t to_begin = to.begin + (gpu ? rank * shard * wire_bytes_ : 0);
    touch(task, Role::source, AccessMode::read, from.buffer, from.begin, elements * wire_bytes_);
    touch(task, Role::target, AccessMode::write, to.buffer, to_begin, elements * wire_bytes_);
    task.work.link_bytes = task.work.host_write_bytes =
        expected_part(chunk, rows, gpu ? rank * shard : 0, elements) * wire_bytes_;
  }
}

// Rounds a rank's chunk to the wire type, into a wire slot.
Place Builder::emit_cast(int unit, size_t index, int rank, size_t turn, Rows rows) {
  const Chunk& chunk = chunk_of(unit, index, rows);
  const Place wire{rank_buffers(rank).wire[turn], 0};
  Task& task = emit_chunk(TaskKind::cast, {LaneKind::comm, rank}, unit, index, rows);
  touch(task, Role::source, AccessMode::read, gradient_slot(rank, unit), chunk.begin * accumulator_bytes_,
        chunk.padded * accumulator_bytes_);
  touch(task, Role::target, AccessMode::write, wire.buffer, 0, chunk.padded * wire_bytes_);
  task.work.device_bytes = expected(chunk, rows).padded * (accumulator_bytes_ + wire_bytes_);
  return wire;
}

void Builder::emit_reduce_scatter(int unit, size_t index, const std::vector<Place>& wire, size_t turn, Rows rows) {
  const Chunk& chunk = chunk_of(unit, index, rows);
  for (int rank = 0; rank < graph_.ranks(); ++rank) {
    Task& task = emit_chunk(TaskKind::reduce_scatter, {LaneKind::comm, rank}, unit, index, rows);
    const Place from = wire[static_cast<size_t>(rank)];
    touch(task, Role::source, AccessMode::read, from.buffer, from.begin, chunk.padded * wire_bytes_);
    touch(task, Role::target, AccessMode::write, rank_buffers(rank).shard[turn], 0,
          chunk.shard_elements(plan().ranks) * wire_bytes_);
    task.work.link_bytes = expected(chunk, rows).padded * wire_bytes_;
    task.group = groups_;
  }
  ++groups_;
}

void Builder::touch_sources(Task& task, const std::vector<Place>& places) {
  for (const Place& place : places) {
    touch(task, Role::source, AccessMode::read, place.buffer, place.begin, task.elements * wire_bytes_);
  }
  task.work.sources += static_cast<int>(places.size());
  task.work.host_read_bytes += static_cast<int64_t>(places.size()) * task.elements * wire_bytes_;
}

// With one wave, what earlier groups landed comes first: gradients are summed in the groups' order (head, lookup).
void Builder::touch_earlier_groups(Task& task) {
  if (plan().waves > 1) return;
  for (int group = 0; group + 1 < gradient_groups(graph_.layout, task.unit); ++group) {
    touch_sources(task, fixed_places(task.unit, group, static_cast<size_t>(task.chunk)));
  }
}

void Builder::touch_accumulator(Task& task, AccessMode mode) {
  if (plan().waves == 1) return;
  touch_host(task, Role::accumulator, mode, buffers_.accumulator[static_cast<size_t>(task.unit)], 4);
  if (mode != AccessMode::write) task.work.host_read_bytes += task.work.elements * 4;
  if (mode != AccessMode::read) task.work.host_write_bytes += task.work.elements * 4;
}

void Builder::touch_partials(Task& task, AccessMode mode) {
  touch_host(task, Role::partials, mode, buffers_.partials, 8, kBlockElements);
}

// The previous step's update of a unit, before its weights are delivered.
void Builder::emit_late_updates(int unit) {
  if (plan().update == UpdatePolicy::eager) return;
  if (touched() && unit == 0) return emit_untouched_updates();
  const bool split = plan().update == UpdatePolicy::split;
  for (size_t chunk = 0; chunk < chunks(unit).size(); ++chunk) {
    emit_update(unit, chunk, split ? UpdatePart::weights : UpdatePart::whole);
  }
  // No delivery of the embedding follows.
  if (touched() && !graph_.layout.tied && layout(unit).kind == UnitKind::head) emit_untouched_updates();
}

// A deferred update, or one part of it: reads what the previous step landed (or accumulated) and its norm.
void Builder::emit_update(int unit, size_t chunk, UpdatePart part, Rows rows) {
  Task& task = emit_chunk(TaskKind::update, {LaneKind::update, -1}, unit, chunk, rows);
  task.phases = kUpdatePhases;
  // After the weights of all units, in the order of landing: a chunk's gradient waits for its moments.
  if (part == UpdatePart::moments) {
    // An untied lookup's gradient lands last of all.
    const bool last = touched() && unit == 0 && !graph_.layout.tied;
    task.need = last ? 3 * total_chunks_ - static_cast<int32_t>(chunks(0).size()) + task.chunk
                     : 2 * total_chunks_ + moments_turn_++;
  }
  // The head's delivery is the first to need them; an untied embedding's are needed in the next wave or step.
  if (rows == Rows::untouched) task.need += graph_.layout.tied ? first_chunk_.back() : total_chunks_;
  if (touched() && unit == 0) {
    touch_head_gradient(task);
    touch_late_lookup(task);
  } else {
    touch_earlier_groups(task);
    if (plan().waves == 1) touch_sources(task, fixed_places(unit, gradient_groups(graph_.layout, unit) - 1, chunk));
  }
  touch_accumulator(task, AccessMode::read);
  touch_state(task, part);
  touch(task, Role::scalars, AccessMode::read, buffers_.scalars, 0, 64);
}

void Builder::emit_eager_update(int unit, size_t chunk, const std::vector<Place>& places) {
  Task& task = emit_chunk(TaskKind::update, {LaneKind::update, -1}, unit, chunk);
  touch_earlier_groups(task);
  touch_sources(task, places);
  touch_accumulator(task, AccessMode::read);
  touch_state(task, UpdatePart::whole);
  touch_partials(task, AccessMode::write);  // the norm is logged only
}

// Weights: hi and lo are written from m and v; moments: m and v alone.
void Builder::touch_state(Task& task, UpdatePart part) {
  task.part = part;
  const auto state = [&](Role role, AccessMode mode, BufferId buffer, int64_t bytes) {
    touch_host(task, role, mode, buffer, bytes);
    task.work.host_read_bytes += task.work.elements * bytes;
    if (writes(mode)) task.work.host_write_bytes += task.work.elements * bytes;
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

void Builder::emit_accumulate(int unit, int group, size_t chunk, const std::vector<Place>& places) {
  Task& task = emit_chunk(TaskKind::host_accumulate, {LaneKind::update, -1}, unit, chunk);
  task.wave = wave_;
  task.first = wave_ == 0 && group == 0;
  task.need += 3 * total_chunks_;  // updates are waited for sooner
  touch_sources(task, places);
  touch_accumulator(task, task.first ? AccessMode::write : AccessMode::read_write);
}

// With several waves the last one is added to the accumulator in the same pass.
void Builder::emit_chunk_norm(int unit, size_t chunk, const std::vector<Place>& places) {
  Task& task = emit_chunk(TaskKind::norm, {LaneKind::update, -1}, unit, chunk);
  task.need += 3 * total_chunks_;  // waited for by the next step only
  touch_earlier_groups(task);
  touch_sources(task, places);
  touch_accumulator(task, AccessMode::read_write);
  touch_partials(task, AccessMode::write);
}

// Combines the partial sums; deferred updates of the next step read the result.
void Builder::emit_norm() {
  Task& task = emit(TaskKind::norm, {LaneKind::update, -1}, -1);
  task.need = 4 * total_chunks_;
  const int64_t bytes = graph_.buffers[static_cast<size_t>(buffers_.partials)].bytes;
  touch(task, Role::partials, AccessMode::read, buffers_.partials, 0, bytes);
  touch(task, Role::scalars, AccessMode::write, buffers_.scalars, 0, 64);
  task.work.host_read_bytes = bytes;
}

}  // namespace slidedp
