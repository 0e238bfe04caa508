#include "planner/space.h"

#include <algorithm>
#include <array>
#include <utility>

#include "model/base/format.h"
#include "model/cost/activations.h"
#include "model/cost/flops.h"
#include "model/graph/buffers.h"

namespace slidedp {
namespace {

constexpr int kMaxRanks = 8;                // without a pin
constexpr int64_t kMaxChunks = 2048;        // of a model, unless chunks are as large as kLargestStep
constexpr int64_t kSmallestStep = 1 << 19;  // elements: 1 MiB of bf16
constexpr int64_t kLargestStep = 1 << 25;   // elements: 64 MiB of bf16
constexpr int64_t kMaxPasses = 64;          // waves x micro_batches, without a pin of either
constexpr int64_t kMaxTasks = 2'000'000;    // of a plan: a gigabyte of graph

std::vector<int64_t> divisors(int64_t number) {
  std::vector<int64_t> found;
  for (int64_t divisor = 1; divisor * divisor <= number; ++divisor) {
    if (number % divisor != 0) continue;
    found.push_back(divisor);
    if (divisor != number / divisor) found.push_back(number / divisor);
  }
  std::sort(found.begin(), found.end());
  return found;
}

template <typename T>
std::vector<T> pinned_or(const std::optional<T>& pin, std::vector<T> values) {
  return pin ? std::vector<T>{*pin} : values;
}

std::vector<int> rank_counts(const SearchProblem& problem) {
  if (problem.pins.ranks) {
    const int ranks = *problem.pins.ranks;
    if (ranks > problem.hardware.gpus) {
      failf("Pin ranks={}: the hardware has {} GPUs (key gpus).", ranks, problem.hardware.gpus);
    }
    if (problem.train.batch_rows % ranks != 0) {
      failf("Pin ranks={}: train.batch_rows = {} cannot be divided among them.", ranks, problem.train.batch_rows);
    }
    return {ranks};
  }
  std::vector<int> counts;
  for (const int64_t divisor : divisors(problem.train.batch_rows)) {
    if (divisor <= std::min(problem.hardware.gpus, kMaxRanks)) counts.push_back(static_cast<int>(divisor));
  }
  return counts;
}

struct Batching {
  int64_t rows;
  int micro_batches;
  int waves;
};

// Values of a divisor of `number`: the pinned one, or all of them up to `most`, thinned to steps of at least two, since
// the difference between neighbouring divisors is small. Ascending.
std::vector<int64_t> thinned_divisors(int64_t number, const std::optional<int>& pin, int64_t most) {
  std::vector<int64_t> kept;
  for (const int64_t divisor : divisors(number)) {
    if (pin ? divisor != *pin : divisor > most) continue;
    // The largest stays: it is one row a micro-batch, which needs the least memory.
    if (kept.empty() || divisor >= 2 * kept.back() || divisor == number) kept.push_back(divisor);
  }
  return kept;
}

// How the rows of one rank are cut into waves and micro-batches.
std::vector<Batching> batchings(const SearchProblem& problem, int ranks) {
  const PinnedFields& pins = problem.pins;
  const int64_t rank_rows = problem.train.batch_rows / ranks;
  const bool pinned = pins.micro_batch_rows || pins.micro_batches || pins.waves;
  std::vector<Batching> kept;
  for (const int64_t waves : thinned_divisors(rank_rows, pins.waves, pinned ? rank_rows : kMaxPasses)) {
    const int64_t wave_rows = rank_rows / waves;
    if (pins.micro_batch_rows) {
      const int64_t rows = *pins.micro_batch_rows;
      const bool fits = wave_rows % rows == 0 && (!pins.micro_batches || wave_rows / rows == *pins.micro_batches);
      if (fits) kept.push_back({rows, static_cast<int>(wave_rows / rows), static_cast<int>(waves)});
      continue;
    }
    for (const int64_t count :
         thinned_divisors(wave_rows, pins.micro_batches, pinned ? wave_rows : kMaxPasses / waves)) {
      kept.push_back({wave_rows / count, static_cast<int>(count), static_cast<int>(waves)});
    }
  }
  return kept;
}

struct Route {
  Delivery delivery;
  Reduction reduction;
};

// With one rank there is nothing to share: every route is replicated x cpu.
std::vector<Route> routes(const SearchProblem& problem, int ranks) {
  std::vector<Route> found;
  for (const Delivery delivery : {Delivery::sharded, Delivery::replicated, Delivery::broadcast}) {
    for (const Reduction reduction : {Reduction::gpu, Reduction::cpu}) {
      if (ranks == 1 && (delivery != Delivery::replicated || reduction != Reduction::cpu)) continue;
      if (problem.pins.delivery.value_or(delivery) != delivery) continue;
      if (problem.pins.reduction.value_or(reduction) != reduction) continue;
      found.push_back({delivery, reduction});
    }
  }
  return found;
}

std::vector<UpdatePolicy> updates(const SearchProblem& problem) {
  if (problem.train.max_grad_norm > 0) {
    if (problem.pins.update.value_or(UpdatePolicy::deferred) == UpdatePolicy::eager) {
      failf(
          "Pin update=eager: train.max_grad_norm = {} needs the norm of all gradients before any update; pin "
          "update=deferred or update=split, or set train.max_grad_norm=0.",
          problem.train.max_grad_norm);
    }
    return pinned_or(problem.pins.update, {UpdatePolicy::deferred, UpdatePolicy::split});
  }
  return pinned_or(problem.pins.update, {UpdatePolicy::eager, UpdatePolicy::deferred});
}

// One micro-batch has nothing to add up: its gradients are rounded to the wire type once, in the slot (which halves the
// slot, but the head's matrix gradient then needs fp32 temporaries) or on the way out.
std::vector<DType> accumulators(const SearchProblem& problem, int micro_batches) {
  if (problem.pins.accumulator) return {*problem.pins.accumulator};
  const bool single = micro_batches == 1 && problem.pins.wire.value_or(DType::bf16) == DType::bf16;
  return single ? std::vector{DType::bf16, DType::fp32} : std::vector{DType::fp32};
}

// CUDA: each rank's launching thread and the program itself keep a core. CPU ranks compute on the cores that the
// update workers share, so both ways of sharing are tried: workers on what the ranks leave, or one on every core for
// the times when the ranks wait.
std::vector<ThreadSplit> thread_splits(const SearchProblem& problem, int ranks) {
  const int cores = problem.hardware.host.cores;
  const bool cpu = problem.hardware.device.backend == "cpu";
  const int compute = problem.pins.compute_threads.value_or(1);
  const int free = cpu ? cores - ranks * compute : cores - ranks - 1;
  std::vector<int> workers{std::max(1, free)};
  if (cpu && cores > workers.front()) workers.push_back(cores);
  std::vector<ThreadSplit> splits;
  for (const int update : pinned_or(problem.pins.update_threads, workers)) splits.push_back({update, compute});
  return splits;
}

// Touched rows take work off the step's end. When most rows are touched nothing is left to do early.
VocabularyRows vocabulary_rows(const SearchProblem& problem) {
  constexpr double kMost = 0.5;
  if (problem.pins.vocabulary_rows) return *problem.pins.vocabulary_rows;
  const bool possible = problem.model.hidden % kBlockElements == 0;
  return possible && problem.train.touched_vocabulary_share <= kMost ? VocabularyRows::touched : VocabularyRows::all;
}

// The fields whose value does not depend on others.
Combination base_plan(const SearchProblem& problem) {
  const PinnedFields& pins = problem.pins;
  Combination plan;
  plan.model = problem.model.fingerprint();
  plan.backend = problem.hardware.device.backend;
  plan.compute = plan.backend == "cpu" ? DType::fp32 : DType::bf16;
  plan.seq = problem.train.seq;
  plan.wire = pins.wire.value_or(DType::bf16);
  plan.gradient_slots = pins.gradient_slots.value_or(2);
  plan.vocabulary_slots = pins.vocabulary_slots.value_or(1);
  plan.vocabulary_rows = vocabulary_rows(problem);
  plan.wire_slots = pins.wire_slots.value_or(2);
  return plan;
}

// Chunk-sized landing buffers per source. Gradients of several waves go into the accumulators at once: room for two
// layers' chunks lets one layer land while the one before is added. With split updates the first wave waits for the
// second pass to leave the accumulators, and may need a place for every chunk (0).
std::vector<int> landing_choices(const SearchProblem& problem, const Combination& plan) {
  if (problem.pins.landing_slots) return {*problem.pins.landing_slots};
  if (plan.waves == 1) return {0};
  const int64_t layer = problem.layout.class_elements(SlotClass::layer);
  const auto ring = static_cast<int>(2 * ceil_div(layer, plan.chunk_elements));
  return plan.update == UpdatePolicy::split ? std::vector<int>{ring, 0} : std::vector<int>{ring};
}

// Adds the combinations of one number of ranks, route, batching and update policy.
void add_variants(const SearchProblem& problem, const Combination& plan, std::vector<Combination>& all) {
  const PinnedFields& pins = problem.pins;
  std::vector<bool> kept_choices{false};
  if (problem.layout.tied) kept_choices.push_back(true);
  if (pins.vocabulary_kept) kept_choices = {*pins.vocabulary_kept};
  std::vector<int> slot_choices{2};
  if (problem.layout.layers > 2) slot_choices.push_back(3);
  for (const int64_t chunk : pinned_or(pins.chunk_elements, chunk_ladder(problem, plan.ranks))) {
    Combination chunked = plan;
    chunked.chunk_elements = chunk;
    for (const int slots : pinned_or(pins.layer_slots, slot_choices)) {
      for (const int landing : landing_choices(problem, chunked)) {
        for (const bool kept : kept_choices) {
          for (const ThreadSplit& threads : thread_splits(problem, plan.ranks)) {
            Combination& added = all.emplace_back(chunked);
            added.layer_slots = slots;
            added.landing_slots = landing;
            added.vocabulary_kept = kept;
            added.threads = threads;
          }
        }
      }
    }
  }
}

// Buffers of the plan, without tasks. `ranks`: those whose buffers are declared.
StepGraph with_buffers(const SearchProblem& problem, const Plan& plan, const TouchedRows& touched, int ranks) {
  StepGraph graph;
  graph.plan = plan;
  graph.touched = touched;
  graph.layout = problem.layout;
  for (const UnitLayout& unit : problem.layout.units) {
    graph.chunks.push_back(make_chunks(unit, plan.chunk_elements, plan.ranks));
  }
  declare_buffers(graph, problem.model, ranks);
  return graph;
}

std::vector<Combination> every_combination(const SearchProblem& problem) {
  std::vector<Combination> all;
  const Combination base = base_plan(problem);
  const std::vector<int> ranks = rank_counts(problem);
  for (auto count = ranks.rbegin(); count != ranks.rend(); ++count) {
    for (const Route& route : routes(problem, *count)) {
      for (const Batching& batching : batchings(problem, *count)) {
        for (const UpdatePolicy update : updates(problem)) {
          for (const DType accumulator : accumulators(problem, batching.micro_batches)) {
            Combination plan = base;
            plan.ranks = *count;
            plan.delivery = route.delivery;
            plan.reduction = route.reduction;
            plan.micro_batch_rows = batching.rows;
            plan.micro_batches = batching.micro_batches;
            plan.waves = batching.waves;
            plan.update = update;
            plan.accumulator = accumulator;
            add_variants(problem, plan, all);
          }
        }
      }
    }
  }
  return all;
}

}  // namespace

SearchProblem::SearchProblem(const ModelSpec& model_spec, const TrainSpec& train_spec,
                             const HardwareSpec& hardware_spec, const Pins& pin_texts)
    : model(model_spec),
      train(train_spec),
      hardware(hardware_spec),
      pins(parse_pins(pin_texts, model_spec.layers)),
      layout(make_layout(model_spec)) {}

std::vector<int64_t> chunk_ladder(const SearchProblem& problem, int ranks) {
  const int64_t grain = ranks * kBlockElements;
  const int64_t whole = round_up(problem.layout.class_elements(SlotClass::layer), grain);
  std::vector<int64_t> ladder;
  for (int64_t step = kSmallestStep; step <= kLargestStep; step *= 4) {
    const bool few = problem.layout.elements / step <= kMaxChunks || step == kLargestStep;
    if (few && step < whole) ladder.push_back(round_up(step, grain));
  }
  if (ladder.empty()) ladder.push_back(round_up(ceil_div(whole, 4), grain));
  if (ladder.back() < whole) ladder.push_back(whole);
  return ladder;
}

std::vector<Combination> combinations(const SearchProblem& problem) {
  std::vector<Combination> all = every_combination(problem);
  if (all.empty()) {
    failf(
        "No plan has all the pinned fields: ranks x waves x micro_batches x micro_batch_rows must be "
        "train.batch_rows = {} with at most {} ranks, and one rank can only be delivery=replicated, reduction=cpu.",
        problem.train.batch_rows, problem.hardware.gpus);
  }
  std::erase_if(all, [&](const Combination& combination) { return estimate_tasks(problem, combination) > kMaxTasks; });
  if (all.empty()) {
    failf(
        "Every plan with these pins has more than {} tasks a step, too many to plan: pin larger chunks, fewer "
        "micro_batches or fewer waves, or lower train.batch_rows = {}.",
        kMaxTasks, problem.train.batch_rows);
  }
  // What the runtime refuses is not planned: values that do not go with a pin. If nothing is left, the pins do not go
  // together, or the training spec does not suit the model.
  std::optional<Error> refused;
  std::erase_if(all, [&](const Combination& combination) {
    try {
      validate_plan(complete(problem, combination, {}, head_chunks(problem, combination).front()), problem.model,
                    problem.train);
      return false;
    } catch (const Error& error) {
      if (!refused) refused = error;
      return true;
    }
  });
  if (all.empty()) throw *refused;
  return all;
}

ActivationCounts activation_counts(const Plan& plan) {
  return {static_cast<int>(std::ranges::count(plan.activation, ActivationPolicy::recompute)),
          static_cast<int>(std::ranges::count(plan.activation, ActivationPolicy::selective)),
          static_cast<int>(std::ranges::count(plan.activation, ActivationPolicy::offload))};
}

std::vector<ActivationPolicy> activation_policies(const SearchProblem& problem, ActivationCounts counts) {
  if (problem.pins.activation) return *problem.pins.activation;
  std::vector<ActivationPolicy> policies(static_cast<size_t>(problem.layout.layers), ActivationPolicy::keep);
  auto at = policies.begin();
  at = std::fill_n(at, counts.offload, ActivationPolicy::offload);
  at = std::fill_n(at, counts.recompute, ActivationPolicy::recompute);
  std::fill_n(at, counts.selective, ActivationPolicy::selective);
  return policies;
}

std::vector<ActivationCounts> activation_choices(const SearchProblem& problem) {
  std::vector<ActivationCounts> choices;
  for (const ActivationCounts counts : choices_without_offload(problem)) {
    for (int offload = 0; offload <= counts.recompute; ++offload) {
      choices.push_back({counts.recompute - offload, counts.selective, offload});
    }
  }
  return choices;
}

std::vector<ActivationCounts> choices_without_offload(const SearchProblem& problem) {
  if (problem.pins.activation) return {{}};
  std::vector<ActivationCounts> choices;
  const int layers = problem.layout.layers;
  for (int recompute = 0; recompute <= layers; ++recompute) {
    for (int selective = 0; recompute + selective <= layers; ++selective) choices.push_back({recompute, selective});
  }
  // Both kinds of extra time are proportional to the tokens.
  const KernelSpec& kernels = problem.hardware.kernels;
  const DType compute = problem.hardware.device.backend == "cpu" ? DType::fp32 : DType::bf16;
  const auto formed_again_s = [&](ActivationPolicy policy) {
    return formed_again_bytes(problem.model, problem.train.seq, compute, policy) /
           std::max(kernels.elementwise_gbps, 1e-9);
  };
  const double recompute_s =
      layer_forward_flops(problem.model, 1, problem.train.seq) / std::max(kernels.layer_fwd.peak_gflops, 1e-9) +
      formed_again_s(ActivationPolicy::recompute);
  const double selective_s = formed_again_s(ActivationPolicy::selective);
  const auto extra_s = [&](ActivationCounts c) { return c.recompute * recompute_s + c.selective * selective_s; };
  std::ranges::stable_sort(choices, {}, extra_s);
  return choices;
}

std::vector<int64_t> head_chunks(const SearchProblem& problem, const Combination& combination) {
  if (problem.pins.head_chunk_tokens) return {*problem.pins.head_chunk_tokens};
  std::vector<int64_t> tokens;
  for (const int64_t most : {4096, 1024, 256}) {
    const int64_t capped = std::min(most, combination.micro_batch_tokens());
    if (tokens.empty() || tokens.back() != capped) tokens.push_back(capped);
  }
  return tokens;
}

Plan complete(const SearchProblem& problem, const Combination& combination, ActivationCounts counts,
              int64_t head_chunk_tokens) {
  Plan plan = combination;
  plan.activation = activation_policies(problem, counts);
  plan.head_chunk_tokens = head_chunk_tokens;
  return plan;
}

MemoryTable plan_memory(const SearchProblem& problem, const Plan& plan) {
  const TouchedRows touched = plan_touched_rows(plan, problem.model, problem.train);
  return memory_table(with_buffers(problem, plan, touched, plan.ranks), problem.model, problem.hardware);
}

CombinationMemory::CombinationMemory(const SearchProblem& problem, const Combination& combination)
    : micro_batches_(combination.micro_batches),
      layers_(problem.pins.activation ? 0 : problem.layout.layers),
      head_chunks_(slidedp::head_chunks(problem, combination)) {
  Plan plan = complete(problem, combination, {}, head_chunks_.front());
  // Of all micro-batches: a list grows with them, but not beyond the vocabulary.
  const TouchedRows touched = plan_touched_rows(plan, problem.model, problem.train);
  std::array<int64_t, 2> device{}, host{};
  plan.micro_batches = 1;
  StepGraph graph = with_buffers(problem, plan, touched, 1);
  for (size_t i = 0; i < 2; ++i) {
    if (i > 0) {
      graph.plan.micro_batches = 2;
      graph.buffers.clear();
      declare_buffers(graph, problem.model, 1);
    }
    for (const Buffer& buffer : graph.buffers) {
      const int alike = buffer.owner < 0 ? 1 : plan.ranks;
      (buffer.on_host() ? host : device)[i] += alike * buffer.bytes;
    }
  }
  host_ = host[0] + (micro_batches_ - 1) * (host[1] - host[0]);
  keep_all_ = device[0] + (micro_batches_ - 1) * (device[1] - device[0]) + problem.hardware.device.context_bytes;
  const auto saved = [&](ActivationPolicy policy) {
    return saved_layout(problem.model, plan.micro_batch_tokens(), plan.compute, policy).bytes;
  };
  saved_ = saved(ActivationPolicy::keep);
  saved_selective_ = saved(ActivationPolicy::selective);
  scratch_ = saved(ActivationPolicy::recompute);
  hidden_ = hidden_bytes(problem.model, plan.micro_batch_tokens(), plan.compute);
  offloaded_ = plan.ranks * micro_batches_ * hidden_;
  for (const int64_t tokens : head_chunks_) {
    plan.head_chunk_tokens = tokens;
    const auto temporaries = [&](ActivationCounts counts) {
      plan.activation = activation_policies(problem, counts);
      return temporary_bytes(problem.model, plan);
    };
    temporaries_.push_back(temporaries({}));
    temporaries_recompute_.push_back(temporaries({.recompute = problem.layout.layers}));
    temporaries_selective_.push_back(temporaries({.selective = problem.layout.layers}));
  }
}

// Of a mix the recomputing layers' scratch is there anyway, so more recomputation is smaller, and each layer that
// offloads takes its input away: an end is the smallest.
ActivationCounts CombinationMemory::smallest(int64_t host_bytes) const {
  if (layers_ == 0) return {};
  const size_t last = head_chunks_.size() - 1;
  const int64_t most = std::max<int64_t>(host_bytes - host_, 0) / offloaded_;
  const int offload = static_cast<int>(std::min<int64_t>(most, layers_));
  ActivationCounts best{.recompute = layers_};
  for (const ActivationCounts counts :
       {ActivationCounts{.selective = layers_}, ActivationCounts{.recompute = layers_ - offload, .offload = offload}}) {
    if (device_bytes(counts, last) < device_bytes(best, last)) best = counts;
  }
  return best;
}

std::optional<ActivationCounts> CombinationMemory::offloading(ActivationCounts counts, size_t head_chunk,
                                                              int64_t device_bytes) const {
  const int64_t over = this->device_bytes(counts, head_chunk) - device_bytes;
  if (over <= 0) return std::nullopt;
  // The ring has a slot more than micro-batches, of which those hold the head's input.
  const int64_t offload = ceil_div(over + hidden_, micro_batches_ * hidden_);
  if (offload > counts.recompute) return std::nullopt;
  counts.offload = static_cast<int>(offload);
  counts.recompute -= counts.offload;
  return counts;
}

int64_t CombinationMemory::device_bytes(ActivationCounts counts, size_t head_chunk) const {
  const int recompute = counts.recompute + counts.offload;
  const int64_t scratch = recompute > 0 ? scratch_ : 0;
  const int64_t saved = micro_batches_ * ((recompute + counts.selective) * saved_ -  //
                                          counts.selective * saved_selective_);
  // The inputs of layers that offload, and the head's, share a ring with a slot more than micro-batches.
  const int64_t inputs = counts.offload > 0 ? (counts.offload * micro_batches_ - 1) * hidden_ : 0;
  // A selective layer's temporaries include those of one that recomputes.
  const std::vector<int64_t>& temporaries = counts.selective > 0 ? temporaries_selective_
                                            : recompute > 0      ? temporaries_recompute_
                                                                 : temporaries_;
  return keep_all_ - saved - inputs + scratch + temporaries[head_chunk];
}

static int64_t tasks_of(const SearchProblem& problem, const Plan& plan, int ranks) {
  const TouchedRows touched = plan_touched_rows(plan, problem.model, problem.train);
  const int64_t chunks = problem.layout.elements / plan.chunk_elements + problem.layout.layers + 2 +
                         static_cast<int64_t>(touched.chunks.size());
  const int64_t compute = ((problem.layout.layers + 1) * 6 + 2 * activation_counts(plan).offload) * plan.micro_batches;
  return plan.waves * (ranks * (chunks * 7 + compute) + 2 * chunks);
}

int64_t estimate_tasks(const SearchProblem& problem, const Plan& plan) { return tasks_of(problem, plan, plan.ranks); }

int64_t estimate_rank_tasks(const SearchProblem& problem, const Plan& plan) { return tasks_of(problem, plan, 1); }

}  // namespace slidedp
