#include "model/graph/step_graph.h"

#include <array>
#include <stdexcept>

#include "model/base/format.h"

namespace slidedp {

std::string_view name(BufferKind kind) {
  constexpr std::array<std::string_view, 20> names{
      "state_hi",     "state_lo",  "state_m",    "state_v",         "landing",     "accumulator",   "norm_partials",
      "step_scalars", "loss_host", "batch_host", "activation_host", "weight_slot", "gradient_slot", "wire_slot",
      "shard_slot",   "hidden",    "saved",      "hidden_gradient", "batch",       "loss"};
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

std::string StepGraph::describe(TaskId id) const {
  const Task& task = tasks[static_cast<size_t>(id)];
  std::string text(name(task.kind));
  if (task.unit >= 0) text += " " + layout.units[static_cast<size_t>(task.unit)].name;
  if (task.chunk >= 0) text += fmt::format(" chunk {}", task.chunk);
  if (task.wave > 0) text += fmt::format(" wave {}", task.wave);
  if (task.micro_batch >= 0) text += fmt::format(" micro-batch {}", task.micro_batch);
  if (task.rank >= 0) text += fmt::format(" rank {}", task.rank);
  return text;
}

}  // namespace slidedp
