#include "runtime/exec/trainer.h"

#include <algorithm>
#include <utility>

#include "model/base/format.h"

namespace slidedp {
namespace {

// How long a signal may go unnoticed.
constexpr std::chrono::milliseconds kPoll{50};

StepInput next_input(Executor& executor, const StepGraph& graph, const PackedDataset& data, const TrainSpec& train,
                     int64_t step) {
  StepInput input;
  input.step = step;
  input.adam = train.adam;
  input.max_grad_norm = train.max_grad_norm;
  input.target_tokens = data.target_tokens(step, train.batch_rows);
  for (int rank = 0; rank < graph.ranks(); ++rank) {
    input.batches.push_back(data.fill(step, graph.plan, rank, executor.batch(rank)));
  }
  return input;
}

StepOutcome collect(Executor& executor, const TrainingHooks& hooks) {
  for (;;) {
    if (hooks.stop() == StopRequest::now) executor.cancel("stopped at once, nothing was exported");
    if (std::optional<StepOutcome> outcome = executor.collect(kPoll)) return std::move(*outcome);
  }
}

}  // namespace

void check_targets(const PackedDataset& data, const TrainSpec& train, int64_t steps) {
  // Batches repeat after at most this many steps.
  const int64_t distinct = std::min(steps, data.rows());
  for (int64_t step = 0; step < distinct; ++step) {
    if (data.target_tokens(step, train.batch_rows) > 0) continue;
    const int64_t row = step * train.batch_rows % data.rows();
    failf(
        "step {} has no target token: all labels of its {} rows, from row {} of the data set on, are -100. Remove such "
        "rows, or make the batch larger",
        step + 1, train.batch_rows, row);
  }
}

int64_t run_training(Executor& executor, const StepGraph& graph, const PackedDataset& data, const TrainSpec& train,
                     int64_t first_step, int64_t steps, const TrainingHooks& hooks) {
  int64_t submitted = 0, finished = 0;
  const auto more = [&] { return submitted < steps && hooks.stop() == StopRequest::none; };
  while (more() || finished < submitted) {
    while (executor.in_flight() < 2 && more()) {
      executor.submit(next_input(executor, graph, data, train, first_step + submitted));
      ++submitted;
    }
    const StepOutcome outcome = collect(executor, hooks);
    ++finished;
    hooks.on_step(outcome);
  }
  if (executor.submit_flush()) collect(executor, hooks);
  return finished;
}

}  // namespace slidedp
