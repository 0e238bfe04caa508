// The search against an exhaustive reference: every plan of the space is built, measured and simulated here.
#include "planner/search.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <optional>
#include <random>
#include <set>
#include <tuple>
#include <vector>

#include "model/base/format.h"
#include "model/cost/activations.h"
#include "model/cost/flops.h"
#include "planner/report.h"
#include "planner/space.h"
#include "tests/planner/problems.h"

namespace slidedp {
namespace {

using test::random_hardware;
using test::random_model;
using test::random_pins;
using test::random_train;

constexpr int64_t kNoLimit = int64_t{1} << 50;
constexpr size_t kAffordable = 300;  // plans that the reference simulates

struct Case {
  ModelSpec model;
  TrainSpec train;
  HardwareSpec hardware;
  Pins pins;
  Budgets budgets{kNoLimit, kNoLimit};
};

Case random_case(unsigned seed) {
  std::mt19937 random(seed);
  Case c;
  c.model = random_model(random);
  c.train = random_train(random);
  c.hardware = random_hardware(random);
  c.pins = random_pins(random, c.hardware, c.train);
  // Further pins until the reference is affordable, in random order, so that every dimension is free in some cases.
  std::vector<std::pair<std::string, std::string>> further{
      {"layer_slots", "2"},    {"threads.update", "2"}, {"chunk", "16KiB"},         {"accumulator", "fp32"},
      {"delivery", "sharded"}, {"reduction", "gpu"},    {"micro_batches", "1"},     {"waves", "1"},
      {"update", "deferred"},  {"waves", "2"},          {"delivery", "broadcast"},  {"vocabulary_kept", "false"},
      {"update", "split"},     {"ranks", "8"},          {"head_chunk_tokens", "64"}};
  std::shuffle(further.begin(), further.end(), random);
  further.insert(further.end(), {{"layer_slots", "2"}, {"threads.update", "2"}, {"activation", "selective"}});
  for (const auto& pin : further) {
    if (enumerate_plans(c.model, c.train, c.hardware, c.pins).size() <= kAffordable) break;
    Pins more = c.pins;
    more.insert(pin);
    try {
      enumerate_plans(c.model, c.train, c.hardware, more);
      c.pins = more;
    } catch (const Error&) {  // contradicts another pin
    }
  }
  return c;
}

// What the reference knows about one plan.
struct Priced {
  Plan plan;
  int64_t step_ns = 0, device_bytes = 0, host_bytes = 0;
};

// The documented ranking, written again: whole thousandths of the fastest step, device bytes, host bytes, nanoseconds.
using Key = std::tuple<int64_t, int64_t, int64_t, int64_t>;
Key key(const Priced& p, int64_t fastest_ns) {
  return {p.step_ns * 1000 / fastest_ns, p.device_bytes, p.host_bytes, p.step_ns};
}
int64_t nanoseconds(PredictedSeconds time) { return std::llround(time.seconds * 1e9); }
Key key(const Candidate& c, int64_t fastest_ns) {
  return key(Priced{c.plan, nanoseconds(c.step), c.device_bytes, c.host_bytes}, fastest_ns);
}

std::vector<Priced> price_all(const Case& c) {
  std::vector<Priced> all;
  for (const Plan& plan : enumerate_plans(c.model, c.train, c.hardware, c.pins)) {
    const StepGraph graph = build_step_graph(c.model, c.train, plan);
    const MemoryTable memory = memory_table(graph, c.model, c.hardware);
    const double step = simulate(graph, c.hardware).step.seconds;
    all.push_back({plan, std::llround(step * 1e9), memory.device_bytes(), memory.host_bytes()});
  }
  return all;
}

struct Reference {
  std::vector<Priced> best;
  int64_t fastest_ns = 0;
};

// Of each activation the largest head chunk that fits (they come in descending order).
std::vector<Priced> fitting(const std::vector<Priced>& all, const Budgets& budgets) {
  std::vector<Priced> kept;
  std::optional<Plan> last;
  for (const Priced& priced : all) {
    if (priced.device_bytes > budgets.device_bytes || priced.host_bytes > budgets.host_bytes) continue;
    Plan same = priced.plan;
    same.head_chunk_tokens = 0;
    if (last != same) kept.push_back(priced);
    last = same;
  }
  return kept;
}

// Plans that differ in activation and head chunk only are one candidate: the best activation. In order of first
// appearance, best first.
Reference reference(const std::vector<Priced>& all, const Budgets& budgets) {
  const std::vector<Priced> plans = fitting(all, budgets);
  Reference found;
  if (plans.empty()) return found;
  found.fastest_ns = std::ranges::min(plans, {}, &Priced::step_ns).step_ns;
  const auto before = [&](const Priced& a, const Priced& b) {
    return key(a, found.fastest_ns) < key(b, found.fastest_ns);
  };
  std::optional<Plan> group;
  for (const Priced& priced : plans) {
    Plan same = priced.plan;
    same.head_chunk_tokens = 0;
    same.activation.clear();
    if (group != same) {
      found.best.push_back(priced);
    } else if (before(priced, found.best.back())) {
      found.best.back() = priced;
    }
    group = same;
  }
  std::stable_sort(found.best.begin(), found.best.end(), before);
  return found;
}

// Budgets that cut through the space: the middle of the demands in use, and sometimes a host limit.
Budgets cutting_budgets(const std::vector<Priced>& all, std::mt19937& random) {
  std::vector<int64_t> device, host;
  for (const Priced& priced : all) {
    device.push_back(priced.device_bytes);
    host.push_back(priced.host_bytes);
  }
  std::sort(device.begin(), device.end());
  std::sort(host.begin(), host.end());
  Budgets budgets{device[random() % device.size()], kNoLimit};
  if (random() % 2 == 0) budgets.host_bytes = host[random() % host.size()];
  return budgets;
}

void expect_equal(const SearchResult& result, const Reference& expected, int keep) {
  EXPECT_TRUE(result.exhaustive);
  EXPECT_EQ(result.considered, result.over_memory + result.pruned_by_bound + result.simulated);
  EXPECT_EQ(nanoseconds(result.fastest), expected.fastest_ns);
  ASSERT_EQ(result.best.size(), std::min<size_t>(expected.best.size(), static_cast<size_t>(keep)));
  for (size_t i = 0; i < result.best.size(); ++i) {
    EXPECT_EQ(key(result.best[i], expected.fastest_ns), key(expected.best[i], expected.fastest_ns))
        << "candidate " << i;
    EXPECT_EQ(result.best[i].plan, expected.best[i].plan) << "candidate " << i;
  }
}

// The search in two stages looks at few plans. It must find a plan whenever there is one, honour the budgets, and come
// close to the optimum: 5 %, the simulator's own accuracy, is what its omissions may cost on such small problems, where
// latencies weigh more than on those for which it is used.
void expect_close(const SearchResult& result, const Reference& expected, const Case& c) {
  const Budgets& budgets = c.budgets;
  EXPECT_FALSE(result.exhaustive);
  const Candidate& best = result.best.front();
  // Of all ranks, or of one that stands for them: then ties may fall otherwise, and move tasks within the thousandth at
  // which the simulator stops.
  const double whole = simulate(build_step_graph(c.model, c.train, best.plan), c.hardware).step.seconds;
  EXPECT_NEAR(best.step.seconds, whole, 1e-3 * whole) << summary(best.plan);
  EXPECT_LE(best.device_bytes, budgets.device_bytes);
  EXPECT_LE(best.host_bytes, budgets.host_bytes);
  EXPECT_GE(result.fastest.seconds * 1e9, (1 - 1e-3) * static_cast<double>(expected.fastest_ns));
  EXPECT_LE(best.step.seconds * 1e9, 1.05 * static_cast<double>(expected.best.front().step_ns))
      << summary(best.plan) << "\n"
      << summary(expected.best.front().plan);
  const int64_t fastest_ns = nanoseconds(result.fastest);
  EXPECT_TRUE(std::is_sorted(result.best.begin(), result.best.end(), [&](const Candidate& a, const Candidate& b) {
    return key(a, fastest_ns) < key(b, fastest_ns);
  }));
}

class RandomProblem : public testing::TestWithParam<unsigned> {};

TEST_P(RandomProblem, EqualsExhaustiveSearch) {
  Case c = random_case(GetParam());
  const std::vector<Priced> all = price_all(c);
  std::mt19937 random(GetParam() + 1000);
  for (int round = 0; round < 4; ++round) {
    if (round > 0) c.budgets = cutting_budgets(all, random);
    SearchOptions exhaustive;
    exhaustive.exhaustive_tasks = kNoLimit;
    exhaustive.keep = round == 3 ? 1 : 10;
    SearchOptions two_stages;
    two_stages.exhaustive_tasks = 0;
    const Reference expected = reference(all, c.budgets);
    const auto found = [&](const SearchOptions& options) {
      return search(c.model, c.train, c.hardware, c.budgets, c.pins, options);
    };
    if (expected.best.empty()) {
      EXPECT_THROW(found(exhaustive), Error);
      EXPECT_THROW(found(two_stages), Error);
      continue;
    }
    expect_equal(found(exhaustive), expected, exhaustive.keep);
    expect_close(found(two_stages), expected, c);
  }
}

// The cases above hold every value of the space, several of them in most: else they would show less than they claim.
TEST(RandomProblems, CoverTheSpace) {
  std::map<std::string, int> cases;
  for (unsigned seed = 0; seed < 30; ++seed) {
    const Case c = random_case(seed);
    std::set<std::string> seen;
    for (const Plan& plan : enumerate_plans(c.model, c.train, c.hardware, c.pins)) {
      seen.insert({fmt::format("delivery {}", name(plan.delivery)), fmt::format("update {}", name(plan.update)),
                   fmt::format("reduction {}", name(plan.reduction)), plan.waves > 1 ? "waves" : "one wave",
                   plan.micro_batches > 1 ? "micro-batches" : "one micro-batch", fmt::format("ranks {}", plan.ranks)});
      const ActivationCounts counts = activation_counts(plan);
      if (counts.recompute > 0 && counts.selective > 0 && counts.offload > 0) seen.insert("mixed activation");
    }
    for (const std::string& value : seen) ++cases[value];
  }
  for (const char* value :
       {"delivery broadcast", "delivery sharded", "delivery replicated", "update eager", "update deferred",
        "update split", "reduction cpu", "reduction gpu", "waves", "micro-batches", "ranks 8", "mixed activation"}) {
    EXPECT_GE(cases[value], 3) << value;
  }
}

INSTANTIATE_TEST_SUITE_P(Seeds, RandomProblem, testing::Range(0u, 50u));

// A four-layer model on two CUDA ranks with a clear order of lanes: computing takes longest.
Case fixed_case() {
  Case c = random_case(3);
  c.model.layers = 4;
  c.train.seq = 512;
  c.train.batch_rows = 4;
  c.train.max_grad_norm = 0;
  c.hardware.gpus = 2;
  c.hardware.device.backend = "cuda";
  c.hardware.host.cores = 8;
  for (KernelRate* rate : {&c.hardware.kernels.layer_fwd, &c.hardware.kernels.layer_bwd, &c.hardware.kernels.head}) {
    *rate = {20, 1e-4};
  }
  c.hardware.kernels.elementwise_gbps = 1;  // a selective layer takes a few per cent longer than one that keeps
  c.pins = {{"ranks", "2"}, {"chunk", "64KiB"}, {"layer_slots", "2"}};
  return c;
}

SearchResult run(const Case& c) { return search(c.model, c.train, c.hardware, c.budgets, c.pins); }

TEST(Search, IsDeterministic) {
  const Case c = fixed_case();
  for (const int64_t exhaustive_tasks : {int64_t{0}, kNoLimit}) {
    SearchOptions options;
    options.exhaustive_tasks = exhaustive_tasks;
    const SearchResult a = search(c.model, c.train, c.hardware, c.budgets, c.pins, options);
    const SearchResult b = search(c.model, c.train, c.hardware, c.budgets, c.pins, options);
    ASSERT_EQ(a.best.size(), b.best.size());
    for (size_t i = 0; i < a.best.size(); ++i) {
      EXPECT_EQ(a.best[i].plan, b.best[i].plan);
      EXPECT_EQ(a.best[i].step, b.best[i].step);
    }
    EXPECT_EQ(a.why, b.why);
    EXPECT_EQ(a.simulated, b.simulated);
  }
}

// Activations of the plans that are found with smaller and smaller budgets, until nothing fits. Less memory does not
// make a step faster (within what the ranking counts as equal).
std::set<std::string> seen_with_falling_budgets(Case c) {
  SearchResult result = run(c);
  EXPECT_EQ(activation_text(result.best.front().plan), "keep");
  std::set<std::string> seen;
  double step = result.fastest.seconds;
  while (true) {
    c.budgets.device_bytes = result.best.front().device_bytes - 1;
    try {
      result = run(c);
    } catch (const Error&) {
      break;
    }
    const Candidate& best = result.best.front();
    EXPECT_LE(best.device_bytes, c.budgets.device_bytes);
    EXPECT_GE(result.fastest.seconds * (1 + 1e-3), step);
    step = result.fastest.seconds;
    seen.insert(activation_text(best.plan));
  }
  return seen;
}

// Where computing takes longest, less memory costs time: the plans go from keep through selective to offload, which
// costs no more than recompute and needs less. Where the link to the host is so slow that forward would wait for it, no
// more layers offload than it can serve or memory makes them.
TEST(Search, SavesWhatMemoryHolds) {
  Case c = fixed_case();
  c.model.qk_norm = true;  // so that a selective layer saves much less
  c.pins.insert({{"micro_batch_rows", "1"}, {"micro_batches", "2"}, {"delivery", "sharded"}, {"reduction", "gpu"}});
  const std::set<std::string> fast = seen_with_falling_budgets(c);
  EXPECT_THAT(fast, testing::IsSupersetOf({"selective", "offload"}));
  EXPECT_THAT(fast, testing::Each(testing::Not(testing::HasSubstr("recompute"))));
  // A layer input takes twice as long to the host as its layer's forward.
  const double layer_s = layer_forward_flops(c.model, 1, c.train.seq) / 20e9;
  const auto input = static_cast<double>(hidden_bytes(c.model, c.train.seq, DType::bf16));
  c.hardware.pcie.d2h.gbps = input / (2 * layer_s) / 1e9;
  EXPECT_THAT(seen_with_falling_budgets(c), testing::IsSupersetOf({"offload:1,recompute:3", "offload"}));
}

// A 4B model's layer inputs for a million tokens take 180 GiB: in one wave, an H200 holds them only where they wait in
// host memory.
TEST(Search, OffloadHoldsAMillionTokensAStep) {
  Case c;
  c.model = load_model_spec(test::config("model/Qwen3-4B.json"));
  c.hardware = load_hardware_spec(test::config("hardware/h200.yaml"));
  c.train = load_train_spec(test::config("train/sft-4b.yaml"));
  c.train.batch_rows = 256;
  c.budgets = {c.hardware.device.memory_bytes, int64_t{512} << 30};
  c.pins = {{"waves", "1"}, {"micro_batches", "64"}, {"chunk", "64MiB"}};
  EXPECT_THAT(activation_text(run(c).best.front().plan), testing::HasSubstr("offload"));
  Case recompute = c;
  recompute.pins["activation"] = "recompute";
  EXPECT_THROW(run(recompute), Error);
  Case little_host = c;
  little_host.budgets.host_bytes = int64_t{64} << 30;
  EXPECT_THROW(run(little_host), Error);
}

// A difference that the simulator cannot know does not buy memory.
TEST(Search, OfPlansWithinAThousandthTheSmallestWins) {
  Case c = fixed_case();
  c.pins.erase("layer_slots");
  c.pins.insert({{"waves", "1"}, {"delivery", "sharded"}, {"reduction", "gpu"}});
  const SearchResult result = run(c);
  const Candidate& best = result.best.front();
  EXPECT_LT(best.step.seconds, result.fastest.seconds * 1.001);
  for (const Priced& other : fitting(price_all(c), c.budgets)) {
    if (static_cast<double>(other.step_ns) < nanoseconds(result.fastest) * 1.0009) {
      EXPECT_LE(best.device_bytes, other.device_bytes) << summary(other.plan);
    }
  }
}

// A batch of a million rows has divisors for every cut; the answer must not hang on them. (How long it takes is not
// asserted; a search that follows all of them would not end within the suite's limit.)
TEST(Search, AnswersForAMillionRows) {
  Case c = fixed_case();
  c.pins.clear();
  c.train.batch_rows = 1'000'000;
  const SearchResult result = run(c);
  for (const Candidate& candidate : result.best) {
    EXPECT_EQ(candidate.plan.batch_rows(), 1'000'000);
    EXPECT_LE(candidate.plan.waves * candidate.plan.micro_batches, 64);
  }
  c.budgets.device_bytes = int64_t{8} << 30;
  EXPECT_THROW(run(c), Error);
  c.pins = {{"micro_batch_rows", "1"}};
  EXPECT_THROW(run(c), Error);  // half a million micro-batches: too many tasks
}

TEST(Search, ExplainsItsChoices) {
  Case c = fixed_case();
  c.pins.insert({"delivery", "sharded"});
  const SearchResult result = run(c);
  const auto sentence = [&](const std::string& start) {
    for (const std::string& why : result.why) {
      if (why.starts_with(start)) return why;
    }
    return std::string();
  };
  EXPECT_THAT(result.why.front(), testing::HasSubstr(result.best.front().bottleneck));
  EXPECT_THAT(result.why.front(), testing::HasSubstr("estimate"));
  EXPECT_EQ(sentence("delivery"), "delivery sharded: pinned.");
  EXPECT_THAT(sentence("reduction"), testing::AnyOf(testing::HasSubstr("with"), testing::HasSubstr("takes")));
  EXPECT_THAT(sentence("activation"), testing::HasSubstr("every layer keeps"));
  c.hardware.measured = true;
  EXPECT_THAT(run(c).why.front(), testing::HasSubstr("predicted"));
}

// The message of a search in which nothing fits; fails the test if something fits.
std::string nothing_fits(const Case& c) {
  try {
    run(c);
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ExitCode::nothing_fits);
    return error.what();
  }
  ADD_FAILURE() << "a plan fits";
  return "";
}

// The number after `flag` in the message, in MiB.
int64_t advised(const std::string& message, const std::string& flag) {
  const size_t at = message.find(flag);
  EXPECT_NE(at, std::string::npos) << message;
  return at == std::string::npos ? 0 : std::stoll(message.substr(at + flag.size()));
}

// What the message advises fits, and what it says is needed is needed.
TEST(NothingFits, NamesTheGpuBudgetAndWhatWouldFit) {
  Case c = fixed_case();
  c.model.vocabulary = 20000;  // tens of MiB, since the advice is in whole MiB
  c.budgets = {8 << 20, kNoLimit};
  const std::string message = nothing_fits(c);
  EXPECT_THAT(message, testing::HasSubstr("No plan fits 8.0 MiB of GPU memory per rank: "));
  EXPECT_THAT(message, testing::Not(testing::HasSubstr("--host-memory")));
  const int64_t mib = advised(message, "--gpu-memory ");
  c.budgets.device_bytes = mib << 20;
  EXPECT_NO_THROW(run(c));
  c.budgets.device_bytes = (mib - 1) << 20;
  EXPECT_NE(nothing_fits(c), "");
}

TEST(NothingFits, NamesTheHostBudget) {
  Case c = fixed_case();
  c.model.vocabulary = 20000;
  c.budgets = {kNoLimit, 10 << 20};
  const std::string message = nothing_fits(c);
  EXPECT_THAT(message, testing::HasSubstr("No plan fits 10.0 MiB of host memory: "));
  EXPECT_THAT(message, testing::Not(testing::HasSubstr("--gpu-memory")));
  const int64_t mib = advised(message, "--host-memory ");
  c.budgets.host_bytes = mib << 20;
  EXPECT_NO_THROW(run(c));
  c.budgets.host_bytes = (mib - 1) << 20;
  EXPECT_NE(nothing_fits(c), "");
}

TEST(NothingFits, NamesBothBudgets) {
  Case c = fixed_case();
  c.model.vocabulary = 20000;
  c.budgets = {8 << 20, 10 << 20};
  const std::string message = nothing_fits(c);
  c.budgets = {advised(message, "--gpu-memory ") << 20, advised(message, "--host-memory ") << 20};
  EXPECT_NO_THROW(run(c));
}

TEST(NothingFits, OffersHostMemoryForOffload) {
  Case c = fixed_case();
  c.train.seq = 4096;  // layer inputs of some MiB
  const std::vector<Priced> all = price_all(c);
  // What the smallest plan needs on either side, but these are two plans.
  c.budgets.device_bytes = std::ranges::min(all, {}, &Priced::device_bytes).device_bytes;
  c.budgets.host_bytes = std::ranges::min(all, {}, &Priced::host_bytes).host_bytes;
  const std::string message = nothing_fits(c);
  EXPECT_THAT(message, testing::HasSubstr("of GPU memory per rank: "));
  const int64_t mib = advised(message, "offload activations to more host memory (--host-memory ");
  ASSERT_GT(mib << 20, c.budgets.host_bytes);
  c.budgets.host_bytes = mib << 20;
  EXPECT_NO_THROW(run(c));
  c.budgets.host_bytes = (mib - 1) << 20;
  EXPECT_NE(nothing_fits(c), "");
}

TEST(NothingFits, OffersChangesThatFit) {
  Case c = fixed_case();
  const int64_t least = std::ranges::min(price_all(c), {}, &Priced::device_bytes).device_bytes;
  // A pin in the way.
  Case pinned = c;
  pinned.pins.insert({"activation", "keep"});
  pinned.budgets.device_bytes = least;
  EXPECT_THAT(nothing_fits(pinned), testing::HasSubstr("drop --pin activation=keep"));
  // Fewer tokens.
  c.budgets.device_bytes = least - 1;
  const std::string message = nothing_fits(c);
  const int64_t seq = advised(message, "--set train.seq=");
  ASSERT_LT(seq, c.train.seq);
  Case shorter = c;
  shorter.train.seq = seq;
  EXPECT_NO_THROW(run(shorter));
  shorter.train.seq = 2 * seq;
  EXPECT_NE(nothing_fits(shorter), "");
}

}  // namespace
}  // namespace slidedp
