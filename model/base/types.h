// Vocabulary types shared by every folder. Names are the ones used in YAML, SQL, CLI and docs.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace slidedp {

enum class DType : uint8_t { bf16, fp32 };
enum class Delivery : uint8_t { replicated, sharded, broadcast };
enum class Reduction : uint8_t { cpu, gpu };
enum class ActivationPolicy : uint8_t { keep, selective, recompute, offload };
// Whether backward runs the layer's forward again, from its input.
inline constexpr bool recomputes(ActivationPolicy policy) {
  return policy == ActivationPolicy::recompute || policy == ActivationPolicy::offload;
}
enum class UpdatePolicy : uint8_t { eager, deferred, split };
// Rows of the embedding's matrix that a step's lookup delivers and gives a gradient of their own: all of them, or those
// that its tokens touch.
enum class VocabularyRows : uint8_t { all, touched };
// What an update pass writes. `weights` (hi, lo) and then `moments` (m, v), with the same gradient and scalars, leave
// the bits of `whole`.
enum class UpdatePart : uint8_t { whole, weights, moments };
inline constexpr int kUpdateParts = 3;
enum class UnitKind : uint8_t { embedding, layer, head };
// The two halves of a layer, in forward order: input norm to the residual after attention, and post-attention norm to
// the layer's output. `whole`: both, or a unit that has no such halves.
enum class LayerBlock : uint8_t { whole, attention, mlp };

// Where tasks run. All but the last are in-order lanes of one rank (offloaded activations have their own, so that they
// never stand behind chunks); `update` is the host's pool of workers.
enum class LaneKind : uint8_t { compute, h2d, d2h, comm, act_d2h, act_h2d, update };
inline constexpr int kDeviceLanes = static_cast<int>(LaneKind::update);

enum class TaskKind : uint8_t {
  h2d,
  all_gather,
  broadcast,
  fwd,
  head,
  recompute,
  bwd,
  act_d2h,
  act_h2d,
  cast,
  reduce_scatter,
  d2h,
  host_accumulate,
  norm,
  update
};
inline constexpr int kTaskKinds = 15;

inline constexpr int64_t size_of(DType type) { return type == DType::bf16 ? 2 : 4; }

// Names as written in files; `parse_*` return nullopt for an unknown name.
std::string_view name(DType);
std::string_view name(Delivery);
std::string_view name(Reduction);
std::string_view name(ActivationPolicy);
std::string_view name(UpdatePolicy);
std::string_view name(VocabularyRows);
std::string_view name(UpdatePart);
std::string_view name(UnitKind);
std::string_view name(LayerBlock);
std::string_view name(LaneKind);
std::string_view name(TaskKind);
std::optional<DType> parse_dtype(std::string_view);
std::optional<Delivery> parse_delivery(std::string_view);
std::optional<Reduction> parse_reduction(std::string_view);
std::optional<ActivationPolicy> parse_activation(std::string_view);
std::optional<UpdatePolicy> parse_update(std::string_view);
std::optional<VocabularyRows> parse_vocabulary_rows(std::string_view);

// A predicted and a measured value never mix by accident: they are different types. Unit: seconds.
template <typename Source>
struct SecondsFrom {
  double seconds = 0;
  auto operator<=>(const SecondsFrom&) const = default;
};
using PredictedSeconds = SecondsFrom<struct PredictedTag>;
using MeasuredSeconds = SecondsFrom<struct MeasuredTag>;

// Blocks of this many elements are the grain of alignment, shards and the gradient norm.
inline constexpr int64_t kBlockElements = 64;

inline constexpr int64_t round_up(int64_t value, int64_t grain) { return (value + grain - 1) / grain * grain; }
inline constexpr int64_t ceil_div(int64_t value, int64_t by) { return (value + by - 1) / by; }

}  // namespace slidedp
