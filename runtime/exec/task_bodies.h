// What each kind of task does, given its operands. Knows nothing of when or in which order tasks run.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "runtime/device/backends.h"
#include "runtime/exec/graph_memory.h"
#include "runtime/exec/step_io.h"
#include "runtime/exec/touched_rows.h"
#include "runtime/host/chunk_update.h"

namespace slidedp {

// One execution of the graph, as task bodies see it.
struct StepContext {
  int64_t sequence = 0;  // executions of the graph so far: picks the halves of alternating buffers
  Phase phase{};
  StepInput input;
  RowLists rows;                            // that the step's tokens touch
  const RowLists* previous_rows = nullptr;  // of the execution before it, whose gradients a deferred update reads
  AdamScalars scalars;                      // eager: of this step
  StepOutcome outcome;                      // norm, clip_factor, skipped are filled by the norm task
};

class TaskBodies {
 public:
  TaskBodies(const StepGraph& graph, Backend& backend, HostState& state, GraphMemory& memory);

  // Enqueues a device task's work on its lane's stream. Called by the rank's issuing thread. The context must live
  // until the work is done.
  void issue(TaskId task, const StepContext& context, Stream& stream);
  // Runs a pool task (norm, update) on the calling worker.
  void run(TaskId task, StepContext& context);
  // Computes the scalars of an eager step; counts the update.
  void begin_eager(StepContext& context);

 private:
  void issue_compute(const Task& task, TaskId id, const StepContext& context, Stream& stream);
  void compute(const Task& task, const StepContext& context);
  void update(const Task& task, StepContext& context);
  void update_eagerly(const Task& task, int64_t begin, int64_t elements, const GradientSources& gradient,
                      double* partials, const StepContext& context);
  // Tasks of the embedding's unit that depend on the lists of touched rows (task_bodies_rows.cpp).
  bool by_rows(const Task& task) const;
  void copy_touched_rows(const Task& task, const StepContext& context, Stream& stream);
  int64_t copied_bytes(const Task& task, const StepContext& context) const;
  int64_t gradient_rows(const Task& task, const StepContext& context) const;
  void run_by_rows(const Task& task, StepContext& context);
  void run_range(const Task& task, const RowRange& range, const StepContext& context);
  void work_on(const Task& task, int64_t begin, int64_t elements, const GradientSources& gradient, float* accumulator,
               double* partials, const StepContext& context);
  void combine_norm(const Task& task, StepContext& context);
  MicroBatch micro_batch(const Task& task, const StepContext& context) const;
  void* operand(const Task& task, Role role, const StepContext& context) const;  // nullptr if the task has none
  std::vector<const void*> sources(const Task& task, const StepContext& context) const;

  const StepGraph& graph_;
  Backend& backend_;
  HostState& state_;
  GraphMemory& memory_;
  AdamScalars deferred_;  // written by the norm task, read by the next step's updates; the graph orders them
};

}  // namespace slidedp
