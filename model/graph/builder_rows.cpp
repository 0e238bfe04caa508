// Touched rows: of the embedding's matrix only the rows that a wave's tokens touch are delivered for the lookup and get
// a gradient from it, at the very end of backward. So all other rows are final as soon as the head's gradient has
// landed (tied) or at once (untied), and are updated early; and a deferred update begins with the rows that are looked
// up next.
//
// Which rows these are is step data. Host ranges are therefore those of the whole unit for a task of touched rows, and
// those of its chunk for one of untouched rows; the partition says that their rows differ. Work is what the training
// spec expects.
#include <algorithm>

#include "model/graph/builder.h"

namespace slidedp {

// The part of a chunk that the expected rows fill. Collectives work on whole chunks.
Chunk Builder::expected(const Chunk& chunk, Rows rows) const {
  if (rows != Rows::touched) return chunk;
  const int64_t elements =
      std::clamp<int64_t>(graph_.touched.expected * model_.hidden - chunk.begin, 0, chunk.elements);
  return {chunk.begin, elements, elements > 0 ? chunk.padded : 0};
}

// Of a rank's part of a chunk what it copies. The rows of a list that does not fill a chunk are spread over all ranks.
int64_t Builder::expected_part(const Chunk& chunk, Rows rows, int64_t begin, int64_t elements) const {
  const int64_t moved = expected(chunk, rows).elements;
  if (moved == chunk.elements) return elements;
  return moved * (begin + elements) / chunk.elements - moved * begin / chunk.elements;
}

// Of so many elements of the matrix, those in touched rows.
int64_t Builder::expected_lookup(int64_t elements) const {
  return elements * graph_.touched.expected / model_.vocabulary;
}

void Builder::set_rows(Task& task, Rows rows) const {
  task.rows = rows;
  task.work.elements = task.elements;
  if (rows == Rows::all) return;
  task.wave = wave_;
  if (rows == Rows::untouched) task.work.elements -= expected_lookup(task.elements);
  if (rows == Rows::touched) {
    task.work.elements = expected({task.elements_begin, task.elements, task.elements}, rows).elements;
  }
}

// What the task works on, of a host buffer with `element_bytes` for every `block` elements of its unit.
void Builder::touch_host(Task& task, Role role, AccessMode mode, BufferId buffer, int64_t element_bytes,
                         int64_t block) {
  const bool whole = task.rows == Rows::touched;
  const int64_t first = role == Role::partials ? buffers_.partials_begin[static_cast<size_t>(task.unit)] : 0;
  const int64_t begin = whole ? 0 : task.elements_begin, elements = whole ? layout(task.unit).elements : task.elements;
  touch(task, role, mode, buffer, (first + begin / block) * element_bytes, elements / block * element_bytes);
  if (task.rows != Rows::all && writes(mode)) task.accesses.back().partition = task.wave;
}

// One wave and tied: the head's gradient, which landed before the lookup's and comes before it in every sum.
void Builder::touch_head_gradient(Task& task) {
  if (plan().waves > 1 || !graph_.layout.tied) return;
  const auto& sources = buffers_.landing[0][0];
  for (const BufferId buffer : sources) touch_host(task, Role::source, AccessMode::read, buffer, wire_bytes_);
  task.work.sources += static_cast<int>(sources.size());
  task.work.host_read_bytes += static_cast<int64_t>(sources.size()) * task.work.elements * wire_bytes_;
}

void Builder::touch_lookup(Task& task, const std::vector<Place>& places) {
  for (const Place& place : places) {
    touch(task, Role::lookup, AccessMode::read, place.buffer, place.begin, task.elements * wire_bytes_);
  }
  task.work.sources += static_cast<int>(places.size());
  task.work.host_read_bytes += static_cast<int64_t>(places.size()) * task.work.elements * wire_bytes_;
}

// A deferred update of any rows finds among them some that the previous step's tokens touched.
void Builder::touch_late_lookup(Task& task) {
  if (plan().waves > 1) return;
  for (const BufferId buffer : buffers_.lookup) {
    touch(task, Role::lookup, AccessMode::read, buffer, 0, graph_.buffers[static_cast<size_t>(buffer)].bytes);
  }
  task.work.host_read_bytes +=
      static_cast<int64_t>(buffers_.lookup.size()) * expected_lookup(task.work.elements) * wire_bytes_;
}

std::vector<Place> Builder::lookup_places(size_t chunk) const {
  std::vector<Place> places;
  for (const BufferId buffer : buffers_.lookup)
    places.push_back({buffer, graph_.touched.chunks[chunk].begin * wire_bytes_});
  return places;
}

// The previous step's update of the rows that this step's first wave looks up.
void Builder::emit_touched_updates() {
  if (plan().update == UpdatePolicy::eager) return;
  const UpdatePart part = plan().update == UpdatePolicy::split ? UpdatePart::weights : UpdatePart::whole;
  for (size_t chunk = 0; chunk < graph_.touched.chunks.size(); ++chunk) emit_update(0, chunk, part, Rows::touched);
}

// The previous step's update of all other rows.
void Builder::emit_untouched_updates() {
  const UpdatePart part = plan().update == UpdatePolicy::split ? UpdatePart::weights : UpdatePart::whole;
  for (size_t chunk = 0; chunk < chunks(0).size(); ++chunk) emit_update(0, chunk, part, Rows::untouched);
}

// What can be done with a chunk's untouched rows once the head's gradient has landed: after the last wave the update or
// the norm. The first wave of an untied embedding zeroes them in the accumulator; as the first to write gradients it
// waits for the moments.
void Builder::emit_untouched(size_t chunk) {
  const bool several = plan().waves > 1, last = wave_ == plan().waves - 1;
  const auto emit_task = [&](TaskKind kind) -> Task& {
    return emit_chunk(kind, {LaneKind::update, -1}, 0, chunk, Rows::untouched);
  };
  if (plan().update == UpdatePolicy::split && wave_ == 0 && !graph_.layout.tied) {
    emit_update(0, chunk, UpdatePart::moments);
  }
  if (several && wave_ == 0 && !graph_.layout.tied) {
    Task& task = emit_task(TaskKind::host_accumulate);
    task.first = true;
    task.need += 3 * total_chunks_;
    touch_accumulator(task, AccessMode::write);
  }
  if (!last) return;
  const bool eager = plan().update == UpdatePolicy::eager;
  Task& task = emit_task(eager ? TaskKind::update : TaskKind::norm);
  touch_head_gradient(task);
  touch_accumulator(task, AccessMode::read);
  touch_partials(task, AccessMode::write);
  if (eager) {
    // With several waves the layers' updates and the head's accumulation free places that copies wait for; these do
    // not.
    if (several) task.need += 4 * total_chunks_;
    return touch_state(task, UpdatePart::whole);
  }
  task.need += 3 * total_chunks_;
  if (task.work.host_read_bytes == 0) task.work.elements = 0;  // no gradient at all: only the partial sums are zeroed
}

// The lookup's gradient: after the last wave it is added up with the rest.
void Builder::emit_touched_gradients() {
  const bool first_part = wave_ == 0 && !graph_.layout.tied, last = wave_ == plan().waves - 1;
  const bool eager = plan().update == UpdatePolicy::eager;
  for (size_t chunk = 0; chunk < graph_.touched.chunks.size(); ++chunk) {
    const std::vector<Place> places = lookup_places(chunk);
    emit_reduction(0, places, chunk, Rows::touched);
    const TaskKind kind = !last ? TaskKind::host_accumulate : eager ? TaskKind::update : TaskKind::norm;
    Task& task = emit_chunk(kind, {LaneKind::update, -1}, 0, chunk, Rows::touched);
    task.first = !last && first_part;
    if (kind != TaskKind::update) task.need += 3 * total_chunks_;
    touch_head_gradient(task);
    touch_lookup(task, places);
    touch_accumulator(task, task.first                 ? AccessMode::write
                            : kind == TaskKind::update ? AccessMode::read
                                                       : AccessMode::read_write);
    if (kind == TaskKind::update) touch_state(task, UpdatePart::whole);
    if (kind != TaskKind::host_accumulate) touch_partials(task, AccessMode::write);
  }
}

}  // namespace slidedp
