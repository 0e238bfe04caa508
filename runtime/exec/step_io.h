// What goes into an execution of a step graph and what comes out.
#pragma once

#include <cstdint>
#include <vector>

#include "model/spec/train_spec.h"
#include "model/timeline/timeline.h"
#include "runtime/data/packed_dataset.h"

namespace slidedp {

struct StepInput {
  int64_t step = 0;  // number in the run, for messages and logs
  AdamSpec adam;
  double max_grad_norm = 0;
  int64_t target_tokens = 0;       // of the global batch, > 0
  std::vector<RankBatch> batches;  // by rank; the tokens themselves are in the executor's batch buffers
};

struct StepOutcome {
  StepInput input;
  Phase phase{};
  double loss = 0;           // mean over the target tokens of the global batch
  double gradient_norm = 0;  // of the mean gradient, before clipping; NaN or infinite if the gradient is
  double clip_factor = 1;
  bool skipped = false;  // non-finite gradients: the update leaves the state as it is
  Timeline timeline;     // measured; seconds since the process's origin
};

}  // namespace slidedp
