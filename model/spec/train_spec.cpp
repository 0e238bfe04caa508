#include "model/spec/train_spec.h"

#include <limits>

#include "model/base/format.h"
#include "model/spec/spec_fields.h"

namespace slidedp {

// Token counts of a step must fit 64 bits whatever they are multiplied with later.
std::optional<Problem> check_train(const TrainSpec& spec) {
  constexpr int64_t limit = std::numeric_limits<int32_t>::max();
  if (spec.seq > limit) return Problem{"seq", fmt::format("is {}, but must be at most {}", spec.seq, limit)};
  if (spec.batch_rows > limit) {
    return Problem{"batch_rows", fmt::format("is {}, but must be at most {}", spec.batch_rows, limit)};
  }
  return std::nullopt;
}

TrainSpec load_train_spec(const std::filesystem::path& file) {
  return read_yaml<TrainSpec>(file, kTrainSchema, check_train);
}

std::string to_yaml(const TrainSpec& spec) { return write_yaml(spec, kTrainSchema); }

}  // namespace slidedp
