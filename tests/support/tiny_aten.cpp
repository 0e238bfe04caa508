#include "tests/support/tiny_run.h"

namespace slidedp::testing {
namespace {

ModelSpec tiny_model(bool tied, int64_t hidden) {
  ModelSpec model;
  model.name = "tiny";
  model.family = ModelFamily::qwen3;
  model.hidden = hidden;
  model.intermediate = 56;
  model.layers = 4;
  model.heads = 4;
  model.kv_heads = 2;
  model.head_dim = 12;
  model.vocabulary = 97;
  model.max_position = 64;
  model.tied = tied;
  model.qk_norm = true;
  return model;
}

TinyBackend aten_backend() {
  return {[](const ModelSpec& model, const ModelLayout& layout, const Plan& plan) {
            return make_backend(model, layout, plan);
          },
          [] { reset_temporary_peak("cpu"); }, [] { return temporary_memory("cpu").peak; }};
}

}  // namespace

TinyTraining::TinyTraining(bool tied) : TinyTraining(tied, 40) {}

TinyTraining::TinyTraining(bool tied, int64_t hidden) : TinyTraining(tiny_model(tied, hidden), aten_backend()) {}

}  // namespace slidedp::testing
