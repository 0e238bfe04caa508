#include <map>
#include <set>

#include "tests/model/graph/graph_check.h"

namespace slidedp::testing {

std::string check_activations(const StepGraph& graph) {
  struct Content {
    int boundary = -1, micro_batch = -1, wave = -1;
    bool operator==(const Content&) const = default;
  };
  std::map<BufferId, Content> held;  // device and host
  std::set<BufferId> returned;       // device buffers whose content has come back from the host
  for (const Task& task : graph.tasks) {
    if (task.micro_batch < 0) continue;
    const auto id = static_cast<TaskId>(&task - graph.tasks.data());
    const int layer = task.unit - 1;  // the head counts as one; its input is the boundary above the last layer
    const Content own{layer, task.micro_batch, task.wave};
    const bool copy = task.kind == TaskKind::act_d2h || task.kind == TaskKind::act_h2d;
    if (const Access* in = task.find(copy ? Role::source : Role::hidden_in)) {
      if (held[in->buffer] != own) return graph.describe(id) + ": wrong input";
      const bool backward = task.kind == TaskKind::bwd || task.kind == TaskKind::recompute;
      const bool offloads = backward && graph.plan.activation[static_cast<size_t>(layer)] == ActivationPolicy::offload;
      if (backward && offloads != returned.contains(in->buffer)) return graph.describe(id) + ": not by way of the host";
    }
    const Access* out = task.find(copy ? Role::target : Role::hidden_out);
    if (out == nullptr) continue;
    held[out->buffer] = copy ? own : Content{layer + 1, task.micro_batch, task.wave};
    returned.erase(out->buffer);
    if (task.kind == TaskKind::act_h2d) returned.insert(out->buffer);
    const bool on_host = graph.buffers[static_cast<size_t>(out->buffer)].on_host();
    if (on_host != (task.kind == TaskKind::act_d2h)) return graph.describe(id) + ": wrong target";
  }
  return "";
}

}  // namespace slidedp::testing
