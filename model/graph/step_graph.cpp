#include "model/graph/step_graph.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <stdexcept>

#include "model/base/format.h"

namespace slidedp {

std::string_view name(BufferKind kind) {
  constexpr std::array<std::string_view, 21> names{
      "state_hi",     "state_lo",   "state_m",    "state_v",      "landing",         "accumulator", "norm_partials",
      "step_scalars", "loss_host",  "batch_host", "touched_rows", "activation_host", "weight_slot", "gradient_slot",
      "wire_slot",    "shard_slot", "hidden",     "saved",        "hidden_gradient", "batch",       "loss"};
  return names[static_cast<size_t>(kind)];
}

const Access* Task::find(Role role) const {
  for (const Access& access : accesses) {
    if (access.role == role) return &access;
  }
  return nullptr;
}

const Access& Task::at(Role role) const {
  const Access* access = find(role);
  if (access == nullptr) {
    throw std::logic_error(fmt::format("{} task has no operand of role {}", name(kind), static_cast<int>(role)));
  }
  return *access;
}

// A chunk's update is one task of one worker, and the last of them are waited for: small ones spread over all workers.
// But a list seldom fills its capacity, and every chunk costs its tasks.
TouchedRows plan_touched_rows(const Plan& plan, const ModelSpec& model, const TrainSpec& train) {
  constexpr int64_t kSmall = 1 << 19;  // elements: 1 MiB of bf16
  constexpr int64_t kChunks = 128;
  TouchedRows touched;
  if (plan.vocabulary_rows == VocabularyRows::all) return touched;
  touched.capacity = plan.touched_rows_limit(model.vocabulary);
  const double expected = std::ceil(train.touched_vocabulary_share * static_cast<double>(model.vocabulary));
  // As many for every rank.
  touched.expected = std::clamp<int64_t>(round_up(static_cast<int64_t>(expected), plan.ranks), 1, touched.capacity);
  const int64_t most = std::max(kSmall / model.hidden, ceil_div(touched.capacity, kChunks));
  const int64_t wanted = std::clamp<int64_t>(plan.chunk_elements / model.hidden, 1, most);
  const int64_t rows = round_up(std::min(wanted, touched.capacity), plan.ranks);
  for (int64_t row = 0; row < touched.capacity; row += rows) {
    const int64_t count = std::min(rows, touched.capacity - row);
    touched.chunks.push_back({row * model.hidden, count * model.hidden, round_up(count, plan.ranks) * model.hidden});
  }
  return touched;
}

std::string StepGraph::describe(TaskId id) const {
  const Task& task = tasks[static_cast<size_t>(id)];
  std::string text(name(task.kind));
  if (task.unit >= 0) text += " " + layout.units[static_cast<size_t>(task.unit)].name;
  if (task.block != LayerBlock::whole) text += fmt::format(" {}", name(task.block));
  if (task.rows != Rows::all) text += task.rows == Rows::touched ? " touched rows" : " untouched rows";
  if (task.chunk >= 0) text += fmt::format(" chunk {}", task.chunk);
  if (task.wave > 0) text += fmt::format(" wave {}", task.wave);
  if (task.micro_batch >= 0) text += fmt::format(" micro-batch {}", task.micro_batch);
  if (task.rank >= 0) text += fmt::format(" rank {}", task.rank);
  return text;
}

}  // namespace slidedp
