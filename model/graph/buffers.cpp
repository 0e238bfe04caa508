#include "model/graph/buffers.h"

#include <algorithm>

#include "model/base/format.h"
#include "model/cost/activations.h"

namespace slidedp {
namespace {

class Declarer {
 public:
  Declarer(StepGraph& graph, const ModelSpec& model)
      : graph_(graph), plan_(graph.plan), model_(model), largest_chunk_(largest_chunk()) {}

  BufferTable declare(int ranks) {
    place_in_ring();
    declare_state();
    declare_landing();
    if (touched()) declare_touched_rows();
    for (int rank = 0; rank < ranks; ++rank) {
      table_.ranks.emplace_back();
      declare_slots(rank);
      declare_hidden(rank);
      declare_activations(rank);
      declare_step_data(rank);
    }
    return std::move(table_);
  }

 private:
  BufferId add(BufferKind kind, int rank, int unit, int64_t bytes, std::string name) {
    graph_.buffers.push_back({kind, rank, unit, bytes, std::move(name), -1});
    return static_cast<BufferId>(graph_.buffers.size()) - 1;
  }

  void declare_state() {
    int64_t blocks = 0;
    for (const UnitLayout& unit : graph_.layout.units) {
      const auto state = [&](BufferKind kind, int64_t element_bytes) {
        return add(kind, -1, unit.unit, unit.elements * element_bytes, fmt::format("{} {}", name(kind), unit.name));
      };
      table_.hi.push_back(state(BufferKind::state_hi, 2));
      table_.lo.push_back(state(BufferKind::state_lo, 2));
      table_.m.push_back(state(BufferKind::state_m, 4));
      table_.v.push_back(state(BufferKind::state_v, 4));
      if (plan_.waves > 1) table_.accumulator.push_back(state(BufferKind::accumulator, 4));
      table_.partials_begin.push_back(blocks);
      blocks += unit.elements / kBlockElements;
    }
    table_.partials = add(BufferKind::norm_partials, -1, -1, blocks * 8, "gradient norm partial sums");
    // Orders the updates after the norm; the few numbers themselves are the executor's.
    table_.scalars = add(BufferKind::step_scalars, -1, -1, 64, "gradient norm and clip factor");
  }

  bool touched() const { return graph_.touched.capacity > 0; }
  int64_t touched_elements() const {  // of the compact matrix, padded
    const Chunk& last = graph_.touched.chunks.back();
    return last.begin + last.padded;
  }

  // The lookup's gradient always has places of its own: it is the last to land, and its chunks are small.
  void declare_touched_rows() {
    const Chunk& last = graph_.touched.chunks.back();
    for (int source = 0; source < graph_.sources_per_group(); ++source) {
      table_.lookup.push_back(add(BufferKind::landing, -1, -1, (last.begin + last.elements) * size_of(plan_.wire),
                                  fmt::format("landing touched rows source {}", source)));
    }
    table_.touched_rows =
        add(BufferKind::touched_rows, -1, -1, 2 * plan_.waves * graph_.touched.capacity * 4, "lists of touched rows");
  }

  int64_t largest_chunk() const {
    int64_t largest = 0;
    for (const Chunk& chunk : graph_.touched.chunks) largest = std::max(largest, chunk.padded);
    for (const auto& chunks : graph_.chunks) {
      for (const Chunk& chunk : chunks) largest = std::max(largest, chunk.padded);
    }
    return largest;
  }

  // One wave, deferred: every source of every gradient has a place until its update. Eager, or several waves, whose
  // gradients go into the accumulators: a ring, if the plan wants one. With one wave a tied matrix' head gradient waits
  // for the lookup's, so it then always has a place of its own.
  void declare_landing() {
    const bool ring = plan_.landing_slots > 0;
    const int sources = graph_.sources_per_group();
    const int64_t wire_bytes = size_of(plan_.wire);
    for (const UnitLayout& unit : graph_.layout.units) {
      auto& groups = table_.landing.emplace_back();
      const int count = gradient_groups(graph_.layout, unit.unit);
      if (ring && (count == 1 || plan_.waves > 1)) continue;
      const int dense = unit.unit == 0 && touched() ? count - 1 : count;
      for (int group = 0; group < dense; ++group) {
        auto& of_group = groups.emplace_back();
        for (int source = 0; source < sources; ++source) {
          of_group.push_back(add(BufferKind::landing, -1, unit.unit, unit.elements * wire_bytes,
                                 fmt::format("landing {} gradient {} source {}", unit.name, group, source)));
        }
      }
    }
    for (int source = 0; ring && source < sources; ++source) {
      auto& of_source = table_.ring.emplace_back();
      for (int slot = 0; slot < plan_.landing_slots; ++slot) {
        of_source.push_back(add(BufferKind::landing, -1, -1, largest_chunk_ * wire_bytes,
                                fmt::format("landing ring source {} slot {}", source, slot)));
      }
    }
  }

  int64_t slot_elements(SlotClass slot_class) const {
    const bool compact = slot_class == SlotClass::touched_rows || slot_class == SlotClass::vocabulary;
    int64_t elements = touched() && compact ? touched_elements() : 0;
    for (const UnitLayout& unit : graph_.layout.units) {
      // With touched rows no slot ever holds the whole matrix of an embedding that is not the head's too.
      if (touched() && unit.unit == 0 && !graph_.layout.tied) continue;
      if (unit.slot_class == slot_class) {
        elements = std::max(elements, padded_elements(unit, plan_.chunk_elements, plan_.ranks));
      }
    }
    return elements;
  }

  // The lookup's gradient goes into the vocabulary's slot, which the head's has left by then.
  int gradient_slots(SlotClass slot_class, int weight_slots) const {
    if (slot_class == SlotClass::layer) return std::min(plan_.gradient_slots, graph_.layout.layers);
    return slot_class == SlotClass::touched_rows ? 0 : std::min(weight_slots, 1);
  }

  void declare_slots(int rank) {
    RankBuffers& buffers = table_.ranks.back();
    for (int c = 0; c < kSlotClasses; ++c) {
      const auto slot_class = static_cast<SlotClass>(c);
      const int64_t elements = slot_elements(slot_class);
      const int weight = weight_slots(graph_.layout, plan_, slot_class);
      for (int slot = 0; slot < weight; ++slot) {
        buffers.weights[static_cast<size_t>(c)].push_back(
            add(BufferKind::weight_slot, rank, -1, elements * 2,
                fmt::format("rank {} weight slot {}[{}]", rank, name(slot_class), slot)));
      }
      for (int slot = 0; slot < gradient_slots(slot_class, weight); ++slot) {
        buffers.gradients[static_cast<size_t>(c)].push_back(
            add(BufferKind::gradient_slot, rank, -1, elements * size_of(plan_.accumulator),
                fmt::format("rank {} gradient slot {}[{}]", rank, name(slot_class), slot)));
      }
    }
    const int64_t chunk_bytes = largest_chunk_ * size_of(plan_.wire);
    for (int slot = 0; plan_.accumulator != plan_.wire && slot < plan_.wire_slots; ++slot) {
      buffers.wire.push_back(
          add(BufferKind::wire_slot, rank, -1, chunk_bytes, fmt::format("rank {} wire slot {}", rank, slot)));
    }
    for (int slot = 0; plan_.reduction == Reduction::gpu && slot < plan_.wire_slots; ++slot) {
      buffers.shard.push_back(add(BufferKind::shard_slot, rank, -1, chunk_bytes / plan_.ranks,
                                  fmt::format("rank {} shard slot {}", rank, slot)));
    }
  }

  void place_in_ring() {
    int places = 0;
    for (const ActivationPolicy policy : plan_.activation) {
      table_.ring_place.push_back(policy == ActivationPolicy::offload ? places++ : -1);
    }
    table_.ring_place.push_back(places > 0 ? places : -1);
  }

  // The ring has a slot more than a wave has micro-batches: a layer's input is read before a whole layer's outputs and
  // one more have been written. Layers and micro-batches share it, and what comes back for backward.
  void declare_hidden(int rank) {
    RankBuffers& buffers = table_.ranks.back();
    const int64_t bytes = hidden_bytes(model_, plan_.micro_batch_tokens(), plan_.compute);
    const size_t boundaries = table_.ring_place.size();
    for (int m = 0; m < plan_.micro_batches; ++m) {
      auto& own = buffers.hidden.emplace_back(boundaries, -1);
      auto& host = buffers.activation_host.emplace_back(boundaries - 1, -1);
      for (size_t i = 0; i < boundaries; ++i) {
        const std::string what = fmt::format("rank {} micro-batch {} hidden {}", rank, m, i);
        if (table_.ring_place[i] < 0) {
          own[i] = add(BufferKind::hidden, rank, -1, bytes, what);
        } else if (i < host.size()) {
          host[i] = add(BufferKind::activation_host, -1, -1, bytes, "offloaded " + what);
          graph_.buffers.back().owner = rank;
        }
      }
    }
    if (table_.ring_place.back() < 0) return;
    for (int slot = 0; slot <= plan_.micro_batches; ++slot) {
      buffers.hidden_ring.push_back(
          add(BufferKind::hidden, rank, -1, bytes, fmt::format("rank {} hidden ring slot {}", rank, slot)));
    }
  }

  void declare_activations(int rank) {
    RankBuffers& buffers = table_.ranks.back();
    const int64_t tokens = plan_.micro_batch_tokens();
    const int64_t hidden = hidden_bytes(model_, tokens, plan_.compute);
    const auto saved = [&](ActivationPolicy policy) {
      return saved_layout(model_, tokens, plan_.compute, policy).bytes;
    };
    BufferId scratch = -1;  // layers that recompute share it
    for (int m = 0; m < plan_.micro_batches; ++m) {
      auto& layers = buffers.saved.emplace_back();
      for (int i = 0; i < graph_.layout.layers; ++i) {
        const ActivationPolicy policy = plan_.activation[static_cast<size_t>(i)];
        if (!recomputes(policy)) {
          layers.push_back(add(BufferKind::saved, rank, -1, saved(policy),
                               fmt::format("rank {} micro-batch {} saved layer {}", rank, m, i)));
          continue;
        }
        if (scratch < 0) {
          scratch = add(BufferKind::saved, rank, -1, saved(policy), fmt::format("rank {} saved scratch", rank));
        }
        layers.push_back(scratch);
      }
      buffers.hidden_gradient.push_back(add(BufferKind::hidden_gradient, rank, -1, hidden,
                                            fmt::format("rank {} micro-batch {} hidden gradient", rank, m)));
    }
  }

  void declare_step_data(int rank) {
    RankBuffers& buffers = table_.ranks.back();
    const int64_t batch = plan_.batch_bytes(), loss = plan_.loss_bytes();
    buffers.batch = add(BufferKind::batch, rank, -1, 2 * batch, fmt::format("rank {} batch", rank));
    buffers.loss = add(BufferKind::loss, rank, -1, 2 * loss, fmt::format("rank {} loss", rank));
    buffers.batch_host = add(BufferKind::batch_host, -1, -1, 2 * batch, fmt::format("batch of rank {}", rank));
    buffers.loss_host = add(BufferKind::loss_host, -1, -1, 2 * loss, fmt::format("loss of rank {}", rank));
    for (const BufferId id : {buffers.batch_host, buffers.loss_host}) {
      graph_.buffers[static_cast<size_t>(id)].owner = rank;
    }
  }

  StepGraph& graph_;
  const Plan& plan_;
  const ModelSpec& model_;
  const int64_t largest_chunk_;  // padded elements
  BufferTable table_;
};

}  // namespace

int gradient_groups(const ModelLayout& layout, int unit) { return layout.tied && unit == 0 ? 2 : 1; }

BufferTable declare_buffers(StepGraph& graph, const ModelSpec& model, int ranks) {
  return Declarer(graph, model).declare(ranks);
}

}  // namespace slidedp
