// Layer inputs between forward and backward: in buffers of their own, or, for layers that offload, in pinned host
// memory and for the time of their use in a ring on the device.
#include "model/graph/builder.h"

namespace slidedp {

// Boundary `boundary` (a layer's input, or with the number of layers the head's) of a micro-batch in the wave that is
// being emitted; `backward`: where it is for backward. The ring's slots are taken in program order: boundary after
// boundary in forward, those of the layers in reverse in backward, the micro-batches of each one after another. So in
// forward one is written over after it has been read by the next layer's forward, and in backward copies run ahead of
// compute by the ring's size.
BufferId Builder::hidden(int rank, int m, int boundary, bool backward) {
  const RankBuffers& buffers = rank_buffers(rank);
  const int place = buffers_.ring_place[static_cast<size_t>(boundary)];
  if (place < 0) return buffers.hidden[static_cast<size_t>(m)][static_cast<size_t>(boundary)];
  const int head = buffers_.ring_place.back();
  const int64_t boundaries = int64_t{wave_} * (2 * head + 1) + (backward ? 2 * head - place : place);
  return buffers.hidden_ring[static_cast<size_t>(boundaries * plan().micro_batches + m) % buffers.hidden_ring.size()];
}

// Once the boundary is written, if a layer that offloads reads it.
void Builder::emit_act_d2h(int rank, int m, int boundary) {
  if (boundary < graph_.layout.layers) emit_act_copy(TaskKind::act_d2h, {LaneKind::act_d2h, rank}, m, boundary);
}

// Before the layer's recomputation, if it offloads.
void Builder::emit_act_h2d(int rank, int m, int layer) {
  emit_act_copy(TaskKind::act_h2d, {LaneKind::act_h2d, rank}, m, layer);
}

void Builder::emit_act_copy(TaskKind kind, Lane lane, int m, int layer) {
  const BufferId host = rank_buffers(lane.rank).activation_host[static_cast<size_t>(m)][static_cast<size_t>(layer)];
  if (host < 0) return;
  const bool down = kind == TaskKind::act_h2d;  // host to device
  const BufferId device = hidden(lane.rank, m, layer, down);
  const int64_t bytes = graph_.buffers[static_cast<size_t>(host)].bytes;
  Task& task = emit(kind, lane, layer + 1);
  task.micro_batch = m;
  task.wave = wave_;
  touch(task, Role::source, AccessMode::read, down ? host : device, 0, bytes);
  touch(task, Role::target, AccessMode::write, down ? device : host, 0, bytes);
  task.work.link_bytes = bytes;
  (down ? task.work.host_read_bytes : task.work.host_write_bytes) = bytes;
}

}  // namespace slidedp
