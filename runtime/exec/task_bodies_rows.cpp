// Task bodies that depend on the step's lists of touched vocabulary rows.
#include <algorithm>
#include <array>
#include <stdexcept>

#include "runtime/exec/task_bodies.h"

namespace slidedp {

// Not the head's dense gradient on its way into the accumulator.
bool TaskBodies::by_rows(const Task& task) const {
  return task.rows != Rows::all || task.find(Role::lookup) != nullptr ||
         (task.kind == TaskKind::update && task.unit == 0 && graph_.touched.capacity > 0);
}

void TaskBodies::copy_touched_rows(const Task& task, const StepContext& context, Stream& stream) {
  const Access& target = task.at(Role::target);
  const Access& places = task.at(Role::touched_rows);
  const int64_t hidden = graph_.layout.embedding().tensors.front().shape.back();
  const Chunk& chunk = graph_.touched.chunks[static_cast<size_t>(task.chunk)];
  const int64_t end = chunk.begin + listed_elements(graph_, task, context.rows.of(task.wave));
  const int64_t rows = std::clamp<int64_t>(end - target.begin / 2, 0, (target.end - target.begin) / 2) / hidden;
  Device& device = *backend_.devices[static_cast<size_t>(task.rank)];
  device.copy_rows_to_device(stream, memory_.address(target, context.sequence), operand(task, Role::source, context),
                             static_cast<const int32_t*>(memory_.address(places, context.sequence)), rows, hidden * 2);
}

// d2h, broadcast: of a chunk of touched rows only what the list fills.
int64_t TaskBodies::copied_bytes(const Task& task, const StepContext& context) const {
  const Access& target = task.at(Role::target);
  if (task.rows != Rows::touched) return target.end - target.begin;
  const int64_t filled = listed_elements(graph_, task, context.rows.of(task.wave));
  if (task.kind == TaskKind::broadcast) return filled * 2;
  const Chunk& chunk = graph_.touched.chunks[static_cast<size_t>(task.chunk)];
  const int64_t skipped =
      graph_.plan.reduction == Reduction::gpu ? task.rank * chunk.shard_elements(graph_.ranks()) : 0;
  return std::clamp<int64_t>((filled - skipped) * size_of(graph_.plan.wire), 0, target.end - target.begin);
}

// Of the matrix that the lookup's gradient goes into.
int64_t TaskBodies::gradient_rows(const Task& task, const StepContext& context) const {
  if (graph_.touched.capacity > 0) return static_cast<int64_t>(context.rows.of(task.wave).size());
  return graph_.layout.embedding().tensors.front().shape.front();
}

void TaskBodies::run_by_rows(const Task& task, StepContext& context) {
  const Plan& plan = graph_.plan;
  const bool late = task.kind == TaskKind::update && plan.update != UpdatePolicy::eager;
  const std::span<const int32_t> list = context.rows.of(std::max(task.wave, 0));
  std::span<const int32_t> gradients = list;
  if (late) gradients = plan.waves == 1 ? context.previous_rows->of(0) : std::span<const int32_t>();
  const int64_t hidden = graph_.layout.embedding().tensors.front().shape.back();
  for (const RowRange& range : row_ranges(task, hidden, list, gradients)) run_range(task, range, context);
}

// Pieces bound the array of zeros, which stands for the gradient of rows that have none.
void TaskBodies::run_range(const Task& task, const RowRange& range, const StepContext& context) {
  constexpr int64_t most = 256 * kBlockElements;
  static const std::array<float, most> zeros{};
  const int64_t wire = size_of(graph_.plan.wire);
  const auto at = [&](BufferId buffer, int64_t bytes) {
    return static_cast<std::byte*>(memory_.base(buffer, context.sequence)) + bytes;
  };
  for (int64_t done = 0; done < range.elements; done += most) {
    const int64_t begin = range.begin + done, elements = std::min(most, range.elements - done);
    std::vector<const void*> sources;
    float* accumulator = nullptr;
    double* partials = nullptr;
    for (const Access& access : task.accesses) {
      // Of the unit's buffers a task of touched rows has the whole range, others the chunk's.
      const int64_t offset = begin - (task.rows == Rows::touched ? 0 : task.elements_begin);
      if (access.role == Role::source) sources.push_back(at(access.buffer, access.begin + offset * wire));
      if (access.role == Role::lookup && range.lookup >= 0) {
        sources.push_back(at(access.buffer, (range.lookup + done) * wire));
      }
      if (access.role == Role::accumulator) {
        accumulator = reinterpret_cast<float*>(at(access.buffer, access.begin + offset * 4));
      }
      if (access.role == Role::partials) {
        partials = reinterpret_cast<double*>(at(access.buffer, access.begin + offset / kBlockElements * 8));
      }
    }
    GradientSources gradient{sources, graph_.sources_per_group(), graph_.plan.wire};
    if (sources.empty() && (accumulator == nullptr || task.first)) {
      sources.assign(1, zeros.data());
      gradient = {sources, 1, graph_.plan.wire};
    }
    work_on(task, begin, elements, gradient, accumulator, partials, context);
  }
}

void TaskBodies::work_on(const Task& task, int64_t begin, int64_t elements, const GradientSources& gradient,
                         float* accumulator, double* partials, const StepContext& context) {
  const auto blocks = static_cast<size_t>(ceil_div(elements, kBlockElements));
  const std::span<float> sum(accumulator, accumulator == nullptr ? 0 : static_cast<size_t>(elements));
  GradientSources with_sum = gradient;
  with_sum.accumulator = accumulator;
  switch (task.kind) {
    case TaskKind::host_accumulate:
      return accumulate(sum, gradient, task.first);
    case TaskKind::norm:
      if (accumulator != nullptr && !gradient.sources.empty()) {
        accumulate_and_square(sum, gradient, false, {partials, blocks});
      } else {
        block_square_sums(with_sum, elements, {partials, blocks});
      }
      return;
    case TaskKind::update:
      if (graph_.plan.update == UpdatePolicy::eager) {
        return update_eagerly(task, begin, elements, with_sum, partials, context);
      }
      return update_chunk(graph_.layout.units[static_cast<size_t>(task.unit)], state_.unit(task.unit), begin, elements,
                          with_sum, deferred_, task.part);
    default:
      throw std::logic_error("no body for this kind of task of some rows");
  }
}

}  // namespace slidedp
