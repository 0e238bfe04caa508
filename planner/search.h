// Picks the plan: enumerates the space, prunes by memory and bound, ranks the rest by simulation.
//
// What is enumerated (a pin replaces a row's values by its own):
//
//   field                 values
//   ranks                 divisors of train.batch_rows up to min(hardware.gpus, 8)
//   delivery x reduction  {sharded, replicated, broadcast} x {gpu, cpu}; one rank: replicated x cpu
//   waves                 divisors of a rank's rows, thinned to steps of at least two
//   micro_batches         the same of a wave's rows; waves x micro_batches at most 64; micro_batch_rows follows
//   chunk                 1, 4, 16, 64 MiB of bf16 below a layer's size (without those under 64 MiB that cut the model
//                         into more than 2048 chunks), and a whole layer; if none is left: a quarter of a layer, a
//                         layer
//   activation            the first o layers offload, the next k recompute, the next s are selective, the others keep;
//                         o, k and s solved per combination of the other fields
//   update                deferred, split with train.max_grad_norm > 0; else eager, deferred
//   wire                  bf16
//   accumulator           fp32; bf16 too with one micro-batch and wire bf16
//   head_chunk_tokens     4096, 1024, 256, at most a micro-batch: the largest that fits, for given o, k, s
//   layer_slots           2, 3
//   gradient_slots        2          vocabulary_slots  1          wire_slots  2
//   landing_slots         one wave: 0; several: as many chunks as two layers have, and with split updates 0 too
//   vocabulary_kept       false; true too with a tied head
//   vocabulary_rows       touched where hidden is a multiple of 64 and train.touched_vocabulary_share at most 1/2;
//                         else all
//   threads               cuda: update = cores - ranks - 1; cpu: update = cores - ranks, or cores; compute_per_rank = 1
//
// Plans of more than 2 million tasks a step are left out.
//
// Ranking: the step time in whole thousandths of the fastest step (what is less than that slower is as fast), then
// fewer device bytes, then fewer host bytes, then the step time to the nanosecond, then the order of enumeration.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <string>
#include <tuple>
#include <vector>

#include "model/graph/memory.h"
#include "model/sim/simulator.h"
#include "model/spec/hardware_spec.h"
#include "model/spec/model_spec.h"
#include "model/spec/plan.h"
#include "model/spec/train_spec.h"

namespace slidedp {

struct Budgets {
  int64_t device_bytes = 0;  // per rank
  int64_t host_bytes = 0;
};

// Fields fixed by the user, by the plan's YAML names ("delivery" -> "sharded").
using Pins = std::map<std::string, std::string>;

struct Candidate {
  Plan plan;
  PredictedSeconds bound;
  PredictedSeconds step;
  PredictedSeconds exposed;
  std::string bottleneck;
  int64_t device_bytes = 0, host_bytes = 0;
};

struct SearchOptions {
  // How many candidates to return. A plan is pruned when its bound is above the step time of the last of them.
  int keep = 10;
  // Up to this many tasks over all plans of the space, every plan is bounded or simulated. Beyond it a search in two
  // stages: first one chunk size, slot count and thread split per route, batching and update policy, best estimate
  // first, then all of them for the best few; always with the activation of least extra compute time that fits, without
  // or with offload, whichever a rough estimate favours. Both stages simulate one rank that stands for all
  // (build_rank_graph). Where ranks are not quite alike, as with broadcasts, the best plans are simulated with all
  // ranks at the end: the first one always, others as far as that is quick.
  int64_t exhaustive_tasks = 2'000'000;
};

struct SearchResult {
  // Ranked as above; never empty. Each is the best activation policy for its other fields.
  std::vector<Candidate> best;
  PredictedSeconds fastest;  // of all simulated plans, the ranking's measure
  bool exhaustive = false;
  // Plans: whose memory was looked at, that do not fit, with a bound above the best, simulated, that a rough estimate
  // puts behind those.
  int64_t considered = 0, over_memory = 0, pruned_by_bound = 0, simulated = 0, not_tried = 0;
  std::vector<std::string> why;  // one sentence per choice of best.front()
};

// The ranking; smaller is better.
inline constexpr int64_t kRankSteps = 1000;
using RankKey = std::tuple<int64_t, int64_t, int64_t, int64_t>;
inline RankKey rank_key(int64_t step_ns, int64_t fastest_ns, int64_t device_bytes, int64_t host_bytes) {
  const auto steps = static_cast<int64_t>(static_cast<long double>(step_ns) * kRankSteps /
                                          static_cast<long double>(std::max<int64_t>(fastest_ns, 1)));
  return {steps, device_bytes, host_bytes, step_ns};
}

// Throws Error with ExitCode::nothing_fits that names the binding budget, the smallest demand found and the cheapest
// change that would fit; ExitCode::failure for a pin that names no field or no legal value. Deterministic, on any
// number of cores; runs up to four threads.
SearchResult search(const ModelSpec&, const TrainSpec&, const HardwareSpec&, const Budgets&, const Pins&,
                    const SearchOptions& options = {});

// Every plan in the space that the pins leave, whether it fits or not. The tests' exhaustive reference uses it.
std::vector<Plan> enumerate_plans(const ModelSpec&, const TrainSpec&, const HardwareSpec&, const Pins&);

}  // namespace slidedp
