#include "runtime/exec/task_bodies.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>

#include "model/base/format.h"

namespace slidedp {

TaskBodies::TaskBodies(const StepGraph& graph, Backend& backend, HostState& state, GraphMemory& memory)
    : graph_(graph), backend_(backend), state_(state), memory_(memory) {}

void* TaskBodies::operand(const Task& task, Role role, const StepContext& context) const {
  const Access* access = task.find(role);
  return access == nullptr ? nullptr : memory_.address(*access, context.sequence);
}

std::vector<const void*> TaskBodies::sources(const Task& task, const StepContext& context) const {
  std::vector<const void*> pointers;
  for (const Access& access : task.accesses) {
    if (access.role == Role::source) pointers.push_back(memory_.address(access, context.sequence));
  }
  return pointers;
}

MicroBatch TaskBodies::micro_batch(const Task& task, const StepContext& context) const {
  const Plan& plan = graph_.plan;
  const auto* tokens = static_cast<const int32_t*>(operand(task, Role::batch, context));
  const int64_t count = plan.micro_batch_tokens();
  const auto index = static_cast<size_t>(task.wave * plan.micro_batches + task.micro_batch);
  const RankBatch& batch = context.input.batches[static_cast<size_t>(task.rank)];
  // With touched rows the embedding knows a token by its row's place in the list.
  const bool places = task.unit == 0 && graph_.touched.capacity > 0;
  return {plan.micro_batch_rows, plan.seq,           tokens + (places ? 3 * count : 0),
          tokens + count,        tokens + 2 * count, batch.document_starts[index]};
}

void TaskBodies::issue(TaskId id, const StepContext& context, Stream& stream) {
  const Task& task = graph_.tasks[static_cast<size_t>(id)];
  Device& device = *backend_.devices[static_cast<size_t>(task.rank)];
  const Access* source = task.find(Role::source);
  void* from = operand(task, Role::source, context);
  void* to = operand(task, Role::target, context);
  if (task.rows == Rows::touched && listed_elements(graph_, task, context.rows.of(task.wave)) == 0) return;
  switch (task.kind) {
    case TaskKind::h2d:
      if (task.rows == Rows::touched) return copy_touched_rows(task, context, stream);
      return device.copy_to_device(stream, to, from, source->end - source->begin);
    case TaskKind::act_h2d:
      return device.copy_to_device(stream, to, from, source->end - source->begin);
    case TaskKind::d2h:
      return device.copy_to_host(stream, to, from, copied_bytes(task, context));
    case TaskKind::act_d2h:
      return device.copy_to_host(stream, to, from, source->end - source->begin);
    case TaskKind::all_gather:
      return backend_.collective->all_gather(task.rank, stream, from, to, source->end - source->begin);
    case TaskKind::reduce_scatter: {
      const Access& target = task.at(Role::target);
      return backend_.collective->reduce_scatter(
          task.rank, stream, from, to, (target.end - target.begin) / size_of(graph_.plan.wire), graph_.plan.wire);
    }
    case TaskKind::broadcast: {
      return backend_.collective->broadcast(task.rank, stream, to, copied_bytes(task, context), task.root);
    }
    case TaskKind::fwd:
    case TaskKind::head:
    case TaskKind::recompute:
    case TaskKind::bwd:
    case TaskKind::cast:
      return issue_compute(task, id, context, stream);
    default:
      throw std::logic_error("no body for " + graph_.describe(id));
  }
}

void TaskBodies::issue_compute(const Task& task, TaskId id, const StepContext& context, Stream& stream) {
  Device& device = *backend_.devices[static_cast<size_t>(task.rank)];
  device.launch(stream, [this, &task, id, &context] {
    try {
      compute(task, context);
    } catch (const Error&) {
      throw;
    } catch (const std::exception& error) {
      failf("{} failed in step {}: {}", graph_.describe(id), context.input.step + 1, error.what());
    }
  });
}

void TaskBodies::compute(const Task& task, const StepContext& context) {
  Compute& compute = *backend_.compute[static_cast<size_t>(task.rank)];
  const auto at = [&](Role role) { return operand(task, role, context); };
  // A block's task touches its share of a layer's slots and saved area, but counts from their beginning.
  const auto base = [&](Role role) { return memory_.base(task.at(role).buffer, context.sequence); };
  const UnitLayout& unit = graph_.layout.units[static_cast<size_t>(task.unit)];
  switch (task.kind) {
    case TaskKind::fwd:
      if (unit.kind == UnitKind::embedding) {
        return compute.embedding_forward(at(Role::weights), micro_batch(task, context), at(Role::hidden_out));
      }
      [[fallthrough]];
    case TaskKind::recompute:
      return compute.block_forward(task.block, unit.layer, base(Role::weights), micro_batch(task, context),
                                   at(Role::hidden_in), base(Role::saved), at(Role::hidden_out));
    case TaskKind::bwd:
      if (unit.kind == UnitKind::embedding) {
        return compute.embedding_backward(micro_batch(task, context), at(Role::hidden_gradient), at(Role::gradients),
                                          gradient_rows(task, context), task.first);
      }
      return compute.block_backward(task.block, unit.layer, base(Role::weights), micro_batch(task, context),
                                    at(Role::hidden_in), base(Role::saved), at(Role::hidden_gradient),
                                    base(Role::gradients), task.first);
    case TaskKind::head:
      return compute.head(at(Role::weights), at(Role::vocabulary), micro_batch(task, context), at(Role::hidden_in),
                          at(Role::hidden_gradient), at(Role::gradients), at(Role::vocabulary_gradients), task.first,
                          static_cast<double*>(at(Role::loss)));
    case TaskKind::cast: {
      const Access& target = task.at(Role::target);
      return compute.cast(at(Role::source), graph_.plan.accumulator, at(Role::target), graph_.plan.wire,
                          (target.end - target.begin) / size_of(graph_.plan.wire));
    }
    default:
      throw std::logic_error("no body for this kind of device task");
  }
}

void TaskBodies::run(TaskId id, StepContext& context) {
  const Task& task = graph_.tasks[static_cast<size_t>(id)];
  if (task.kind == TaskKind::norm && task.chunk < 0) return combine_norm(task, context);
  if (by_rows(task)) return run_by_rows(task, context);
  if (task.kind == TaskKind::update) return update(task, context);
  const auto pointers = sources(task, context);
  const GradientSources gradient{pointers, graph_.sources_per_group(), graph_.plan.wire};
  auto* accumulator = static_cast<float*>(operand(task, Role::accumulator, context));
  const std::span<float> sum(accumulator, accumulator == nullptr ? 0 : static_cast<size_t>(task.elements));
  if (task.kind == TaskKind::host_accumulate) return accumulate(sum, gradient, task.first);
  if (task.kind != TaskKind::norm) throw std::logic_error("no body for " + graph_.describe(id));
  // A non-finite element makes the partial sum, and with it the norm, non-finite: combine_norm sees it.
  const std::span<double> partials(static_cast<double*>(operand(task, Role::partials, context)),
                                   static_cast<size_t>(ceil_div(task.elements, kBlockElements)));
  if (accumulator != nullptr) {
    accumulate_and_square(sum, gradient, task.first, partials);
  } else {
    block_square_sums(gradient, task.elements, partials);
  }
}

void TaskBodies::update(const Task& task, StepContext& context) {
  const UnitLayout& unit = graph_.layout.units[static_cast<size_t>(task.unit)];
  const auto pointers = sources(task, context);
  const GradientSources gradient{pointers, graph_.sources_per_group(), graph_.plan.wire,
                                 static_cast<const float*>(operand(task, Role::accumulator, context))};
  if (graph_.plan.update == UpdatePolicy::eager) {
    auto* partials = static_cast<double*>(operand(task, Role::partials, context));
    return update_eagerly(task, task.elements_begin, task.elements, gradient, partials, context);
  }
  update_chunk(unit, state_.unit(task.unit), task.elements_begin, task.elements, gradient, deferred_, task.part);
}

// Norm and update in pieces that stay in the core's cache between the two, so that memory sees the gradient once.
void TaskBodies::update_eagerly(const Task& task, int64_t begin, int64_t elements, const GradientSources& gradient,
                                double* partials, const StepContext& context) {
  constexpr int64_t most = 256 * kBlockElements;
  const UnitLayout& unit = graph_.layout.units[static_cast<size_t>(task.unit)];
  std::vector<const void*> moved;
  for (int64_t done = 0; done < elements; done += most) {
    const int64_t piece = std::min(most, elements - done);
    const GradientSources part = advance(gradient, done, moved);
    const auto blocks = static_cast<size_t>(ceil_div(piece, kBlockElements));
    if (!block_square_sums(part, piece, {partials + done / kBlockElements, blocks})) {
      failf(
          "step {}: the gradient of tensor {} is not finite. Other layers have already been updated (eager update), so "
          "this state is not exported; lower the learning rate, or plan with --pin update=deferred, which skips such "
          "steps",
          context.input.step + 1, first_nonfinite_tensor(unit, begin + done, piece, part));
    }
    update_chunk(unit, state_.unit(task.unit), begin + done, piece, part, context.scalars);
  }
}

void TaskBodies::begin_eager(StepContext& context) {
  ++state_.updates;
  context.scalars = make_scalars(context.input.adam, 0, 0, context.input.target_tokens, state_.updates);
}

void TaskBodies::combine_norm(const Task& task, StepContext& context) {
  const Access& partials = task.at(Role::partials);
  const auto* sums = static_cast<const double*>(memory_.address(partials, context.sequence));
  const double norm = std::sqrt(combine_block_sums({sums, static_cast<size_t>((partials.end - partials.begin) / 8)}));
  const StepInput& input = context.input;
  context.outcome.gradient_norm = norm / static_cast<double>(input.target_tokens);
  if (graph_.plan.update == UpdatePolicy::eager) return;
  deferred_ = make_scalars(input.adam, input.max_grad_norm, norm, input.target_tokens, state_.updates + 1);
  context.outcome.skipped = deferred_.skip;
  if (deferred_.skip) return;
  ++state_.updates;
  context.outcome.clip_factor = deferred_.clip_factor;
}

}  // namespace slidedp
