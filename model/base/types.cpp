#include "model/base/types.h"

#include <array>
#include <span>

namespace slidedp {
namespace {

constexpr std::array<std::string_view, 2> kDTypes{"bf16", "fp32"};
constexpr std::array<std::string_view, 3> kDeliveries{"replicated", "sharded", "broadcast"};
constexpr std::array<std::string_view, 2> kReductions{"cpu", "gpu"};
constexpr std::array<std::string_view, 4> kActivations{"keep", "selective", "recompute", "offload"};
constexpr std::array<std::string_view, 3> kUpdates{"eager", "deferred", "split"};
constexpr std::array<std::string_view, 2> kVocabularyRows{"all", "touched"};
constexpr std::array<std::string_view, kUpdateParts> kParts{"whole", "weights", "moments"};
constexpr std::array<std::string_view, 3> kUnits{"embedding", "layer", "head"};
constexpr std::array<std::string_view, 3> kBlocks{"whole", "attention", "mlp"};
constexpr std::array<std::string_view, kDeviceLanes + 1> kLanes{"compute", "h2d",     "d2h",   "comm",
                                                                "act_d2h", "act_h2d", "update"};
constexpr std::array<std::string_view, kTaskKinds> kTasks{"h2d",
                                                          "all_gather",
                                                          "broadcast",
                                                          "fwd",
                                                          "head",
                                                          "recompute",
                                                          "bwd",
                                                          "act_d2h",
                                                          "act_h2d",
                                                          "cast",
                                                          "reduce_scatter",
                                                          "d2h",
                                                          "host_accumulate",
                                                          "norm",
                                                          "update"};

template <typename E>
std::optional<E> parse(std::span<const std::string_view> names, std::string_view text) {
  for (size_t i = 0; i < names.size(); ++i) {
    if (names[i] == text) return static_cast<E>(i);
  }
  return std::nullopt;
}

}  // namespace

std::string_view name(DType value) { return kDTypes[static_cast<size_t>(value)]; }
std::string_view name(Delivery value) { return kDeliveries[static_cast<size_t>(value)]; }
std::string_view name(Reduction value) { return kReductions[static_cast<size_t>(value)]; }
std::string_view name(ActivationPolicy value) { return kActivations[static_cast<size_t>(value)]; }
std::string_view name(UpdatePolicy value) { return kUpdates[static_cast<size_t>(value)]; }
std::string_view name(VocabularyRows value) { return kVocabularyRows[static_cast<size_t>(value)]; }
std::string_view name(UpdatePart value) { return kParts[static_cast<size_t>(value)]; }
std::string_view name(UnitKind value) { return kUnits[static_cast<size_t>(value)]; }
std::string_view name(LayerBlock value) { return kBlocks[static_cast<size_t>(value)]; }
std::string_view name(LaneKind value) { return kLanes[static_cast<size_t>(value)]; }
std::string_view name(TaskKind value) { return kTasks[static_cast<size_t>(value)]; }
std::optional<DType> parse_dtype(std::string_view text) { return parse<DType>(kDTypes, text); }
std::optional<Delivery> parse_delivery(std::string_view text) { return parse<Delivery>(kDeliveries, text); }
std::optional<Reduction> parse_reduction(std::string_view text) { return parse<Reduction>(kReductions, text); }
std::optional<ActivationPolicy> parse_activation(std::string_view text) {
  return parse<ActivationPolicy>(kActivations, text);
}
std::optional<UpdatePolicy> parse_update(std::string_view text) { return parse<UpdatePolicy>(kUpdates, text); }
std::optional<VocabularyRows> parse_vocabulary_rows(std::string_view text) {
  return parse<VocabularyRows>(kVocabularyRows, text);
}

}  // namespace slidedp
