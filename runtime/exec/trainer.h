// The training loop: feeds an executor with the data set's batches, keeps two steps under way, hands out outcomes.
#pragma once

#include <cstdint>
#include <functional>

#include "model/spec/train_spec.h"
#include "runtime/data/packed_dataset.h"
#include "runtime/exec/executor.h"

namespace slidedp {

enum class StopRequest : uint8_t { none, finish_step, now };

struct TrainingHooks {
  // Called for every finished step, in order, on the calling thread.
  std::function<void(const StepOutcome&)> on_step;
  // Asked often: finish_step ends the run after the steps under way, now stops at once (an Error with
  // ExitCode::interrupted).
  std::function<StopRequest()> stop = [] { return StopRequest::none; };
};

// Throws Error if any of the first `steps` steps has no target token.
void check_targets(const PackedDataset& data, const TrainSpec& train, int64_t steps);

// Runs up to `steps` steps, numbered from `first_step` on, and the flush, after which the host state's weights are
// those of the last finished step. Returns the number of finished steps. Throws the executor's first failure.
int64_t run_training(Executor& executor, const StepGraph& graph, const PackedDataset& data, const TrainSpec& train,
                     int64_t first_step, int64_t steps, const TrainingHooks& hooks);

}  // namespace slidedp
