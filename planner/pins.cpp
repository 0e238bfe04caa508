#include "planner/pins.h"

#include <charconv>
#include <functional>
#include <string_view>
#include <utility>

#include "model/base/format.h"

namespace slidedp {
namespace {

[[noreturn]] void bad_value(std::string_view field, std::string_view value, std::string_view valid) {
  failf("Pin {}={}: \"{}\" is not a value of {}; valid are {}.", field, value, value, field, valid);
}

int64_t parse_integer(std::string_view field, std::string_view value, int64_t least) {
  int64_t number = 0;
  const auto [end, status] = std::from_chars(value.data(), value.data() + value.size(), number);
  constexpr int64_t kMost = int64_t{1} << 40;
  if (status != std::errc() || end != value.data() + value.size() || number < least || number > kMost) {
    bad_value(field, value, fmt::format("whole numbers from {}", least));
  }
  return number;
}

int parse_count(std::string_view field, std::string_view value, int64_t least) {
  const int64_t number = parse_integer(field, value, least);
  constexpr int64_t kMost = 1 << 20;
  if (number > kMost) bad_value(field, value, fmt::format("whole numbers from {} to {}", least, kMost));
  return static_cast<int>(number);
}

bool parse_bool(std::string_view field, std::string_view value) {
  if (value == "true") return true;
  if (value == "false") return false;
  bad_value(field, value, "true, false");
}

// `valid` lists what this version plans; the parser knows names that it does not plan yet.
template <typename T>
T parse_name(std::string_view field, std::string_view value, std::optional<T> (*parse)(std::string_view),
             std::initializer_list<T> valid) {
  const std::optional<T> parsed = parse(value);
  std::string names;
  for (const T candidate : valid) {
    if (parsed == candidate) return candidate;
    names += (names.empty() ? "" : ", ") + std::string(name(candidate));
  }
  bad_value(field, value, names);
}

ActivationPolicy parse_policy(std::string_view value) {
  return parse_name<ActivationPolicy>(
      "activation", value, parse_activation,
      {ActivationPolicy::keep, ActivationPolicy::selective, ActivationPolicy::recompute, ActivationPolicy::offload});
}

// "keep" for all layers, or run-length from the first layer: "recompute:4,selective:10,keep:16".
std::vector<ActivationPolicy> parse_activations(std::string_view value, int64_t layers) {
  if (value.find(':') == std::string_view::npos) {
    return std::vector<ActivationPolicy>(static_cast<size_t>(layers), parse_policy(value));
  }
  std::vector<ActivationPolicy> policies;
  for (std::string_view rest = value; !rest.empty();) {
    const size_t comma = rest.find(',');
    const std::string_view run = rest.substr(0, comma);
    rest = comma == std::string_view::npos ? std::string_view() : rest.substr(comma + 1);
    const size_t colon = run.find(':');
    if (colon == std::string_view::npos) bad_value("activation", value, "POLICY or POLICY:COUNT,POLICY:COUNT,...");
    const ActivationPolicy policy = parse_policy(run.substr(0, colon));
    const int64_t count = parse_integer("activation", run.substr(colon + 1), 1);
    if (count > layers - static_cast<int64_t>(policies.size())) {
      failf("Pin activation={}: the counts must add up to the model's {} layers.", value, layers);
    }
    policies.insert(policies.end(), static_cast<size_t>(count), policy);
  }
  if (static_cast<int64_t>(policies.size()) != layers) {
    failf("Pin activation={}: the counts add up to {}, but the model has {} layers.", value, policies.size(), layers);
  }
  return policies;
}

int64_t parse_chunk_bytes(std::string_view value) {
  const int64_t bytes = parse_bytes(value, "pin chunk");
  if (bytes < 2) bad_value("chunk", value, "sizes from 2 B (bytes of bf16, such as 16MiB)");
  return bytes / 2;
}

using Setter = std::function<void(PinnedFields&, std::string_view value, int64_t layers)>;

Setter count_setter(std::optional<int> PinnedFields::*member, std::string_view field, int64_t least) {
  return [=](PinnedFields& pins, std::string_view value, int64_t) { pins.*member = parse_count(field, value, least); };
}

Setter dtype_setter(std::optional<DType> PinnedFields::*member, std::string_view field) {
  return [=](PinnedFields& pins, std::string_view value, int64_t) {
    pins.*member = parse_name<DType>(field, value, parse_dtype, {DType::bf16, DType::fp32});
  };
}

std::vector<std::pair<std::string_view, Setter>> route_setters() {
  using P = PinnedFields;
  return {
      {"ranks", count_setter(&P::ranks, "ranks", 1)},
      {"delivery",
       [](P& p, std::string_view v, int64_t) {
         p.delivery = parse_name<Delivery>("delivery", v, parse_delivery,
                                           {Delivery::replicated, Delivery::sharded, Delivery::broadcast});
       }},
      {"reduction",
       [](P& p, std::string_view v, int64_t) {
         p.reduction = parse_name<Reduction>("reduction", v, parse_reduction, {Reduction::cpu, Reduction::gpu});
       }},
      {"chunk", [](P& p, std::string_view v, int64_t) { p.chunk_elements = parse_chunk_bytes(v); }},
      {"chunk_elements",
       [](P& p, std::string_view v, int64_t) { p.chunk_elements = parse_integer("chunk_elements", v, 1); }},
      {"activation", [](P& p, std::string_view v, int64_t layers) { p.activation = parse_activations(v, layers); }},
      {"update",
       [](P& p, std::string_view v, int64_t) {
         p.update = parse_name<UpdatePolicy>("update", v, parse_update,
                                             {UpdatePolicy::eager, UpdatePolicy::deferred, UpdatePolicy::split});
       }},
      {"wire", dtype_setter(&P::wire, "wire")},
      {"accumulator", dtype_setter(&P::accumulator, "accumulator")},
  };
}

std::vector<std::pair<std::string_view, Setter>> size_setters() {
  using P = PinnedFields;
  return {
      {"micro_batch_rows",
       [](P& p, std::string_view v, int64_t) { p.micro_batch_rows = parse_integer("micro_batch_rows", v, 1); }},
      {"micro_batches", count_setter(&P::micro_batches, "micro_batches", 1)},
      {"waves", count_setter(&P::waves, "waves", 1)},
      {"wave", count_setter(&P::waves, "wave", 1)},
      {"head_chunk_tokens",
       [](P& p, std::string_view v, int64_t) { p.head_chunk_tokens = parse_integer("head_chunk_tokens", v, 1); }},
      {"layer_slots", count_setter(&P::layer_slots, "layer_slots", 1)},
      {"gradient_slots", count_setter(&P::gradient_slots, "gradient_slots", 1)},
      {"vocabulary_slots", count_setter(&P::vocabulary_slots, "vocabulary_slots", 1)},
      {"vocabulary_kept",
       [](P& p, std::string_view v, int64_t) { p.vocabulary_kept = parse_bool("vocabulary_kept", v); }},
      {"vocabulary_rows",
       [](P& p, std::string_view v, int64_t) {
         p.vocabulary_rows = parse_name<VocabularyRows>("vocabulary_rows", v, parse_vocabulary_rows,
                                                        {VocabularyRows::all, VocabularyRows::touched});
       }},
      {"wire_slots", count_setter(&P::wire_slots, "wire_slots", 1)},
      {"landing_slots", count_setter(&P::landing_slots, "landing_slots", 0)},
      {"threads.update", count_setter(&P::update_threads, "threads.update", 1)},
      {"threads.compute_per_rank", count_setter(&P::compute_threads, "threads.compute_per_rank", 1)},
  };
}

}  // namespace

PinnedFields parse_pins(const Pins& pins, int64_t layers) {
  auto setters = route_setters();
  for (auto& setter : size_setters()) setters.push_back(std::move(setter));
  for (const auto& [first, second] : {std::pair("chunk", "chunk_elements"), std::pair("wave", "waves")}) {
    if (pins.contains(first) && pins.contains(second)) {
      failf("Pins {} and {} name the same plan field; give one of them.", first, second);
    }
  }
  PinnedFields parsed;
  for (const auto& [field, value] : pins) {
    std::string valid;
    bool found = false;
    for (const auto& [known, set] : setters) {
      valid += (valid.empty() ? "" : ", ") + std::string(known);
      if (known != field) continue;
      set(parsed, value, layers);
      found = true;
    }
    if (!found)
      failf("Pin {}={}: a plan has no field \"{}\" that can be pinned; valid are {}.", field, value, field, valid);
  }
  return parsed;
}

void add_pin(const std::string& assignment, Pins& pins) {
  const size_t equals = assignment.find('=');
  if (equals == std::string::npos || equals == 0) {
    failf("Pin \"{}\" must have the form field=value, such as delivery=sharded.", assignment);
  }
  const std::string field = assignment.substr(0, equals);
  if (!pins.emplace(field, assignment.substr(equals + 1)).second) failf("Pin {} is given twice.", field);
}

}  // namespace slidedp
