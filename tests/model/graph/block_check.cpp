#include <map>
#include <tuple>
#include <vector>

#include "model/base/format.h"
#include "tests/model/graph/graph_check.h"

namespace slidedp::testing {
namespace {

// A layer's work on one micro-batch of a wave.
using Owner = std::tuple<int, int, int>;  // unit, micro-batch, wave

// What of a saved area has been written for whom, byte by byte: areas of random problems are small.
struct Area {
  Owner owner{-1, -1, -1};
  std::vector<bool> written;
};

class BlockCheck {
 public:
  explicit BlockCheck(const StepGraph& graph) : graph_(graph) {}

  std::string run() {
    for (const Task& task : graph_.tasks) {
      if (task.block == LayerBlock::whole) continue;
      const std::string wrong = check(task);
      if (!wrong.empty()) return graph_.describe(static_cast<TaskId>(&task - graph_.tasks.data())) + ": " + wrong;
    }
    const Plan& plan = graph_.plan;
    const size_t each = static_cast<size_t>(graph_.ranks()) * static_cast<size_t>(graph_.layout.layers) *
                        static_cast<size_t>(plan.micro_batches * plan.waves);
    for (const auto& [owner, order] : orders_) {
      const int layer = std::get<0>(owner.second) - 1;
      const bool again = recomputes(plan.activation[static_cast<size_t>(layer)]);
      if (order != (again ? "fa fm ra rm bm ba " : "fa fm bm ba ")) return "blocks in the order " + order;
    }
    return orders_.size() == each ? "" : "layers without blocks";
  }

 private:
  std::string check(const Task& task) {
    const Owner owner{task.unit, task.micro_batch, task.wave};
    orders_[{task.rank, owner}] += {name(task.kind)[0], name(task.block)[0], ' '};
    const bool forward = task.kind != TaskKind::bwd, attention = task.block == LayerBlock::attention;
    for (const Access& access : task.accesses) {
      if (access.role != Role::saved) continue;
      Area& area = areas_[access.buffer];
      area.written.resize(static_cast<size_t>(graph_.buffers[static_cast<size_t>(access.buffer)].bytes));
      if (forward && attention) area = {owner, std::vector<bool>(area.written.size())};
      if (area.owner != owner) return "the saved area is another's";
      for (auto byte = static_cast<size_t>(access.begin); byte < static_cast<size_t>(access.end); ++byte) {
        if (access.mode != AccessMode::write && !area.written[byte]) return fmt::format("reads saved byte {}", byte);
        if (access.mode != AccessMode::read) area.written[byte] = true;
      }
    }
    if (forward) return "";
    const Access& gradients = task.at(Role::gradients);
    const ElementRange range = graph_.layout.units[static_cast<size_t>(task.unit)].range(task.block);
    const int64_t bytes = size_of(graph_.plan.accumulator);
    if (gradients.begin != range.begin * bytes || gradients.end != range.end * bytes) return "not its own gradients";
    const AccessMode mode = task.micro_batch == 0 ? AccessMode::write : AccessMode::read_write;
    return gradients.mode == mode ? "" : "adds to gradients of before, or loses some";
  }

  const StepGraph& graph_;
  std::map<BufferId, Area> areas_;
  std::map<std::pair<int, Owner>, std::string> orders_;  // by rank and owner: first letters of kinds and blocks
};

}  // namespace

std::string check_blocks(const StepGraph& graph) { return BlockCheck(graph).run(); }

}  // namespace slidedp::testing
