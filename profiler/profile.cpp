#include "profiler/profile.h"

#include <algorithm>
#include <chrono>
#include <exception>
#include <set>
#include <thread>

#include "model/base/format.h"
#include "runtime/host/arena.h"

namespace slidedp {
namespace {

int64_t unix_seconds() {
  using namespace std::chrono;
  return duration_cast<seconds>(system_clock::now().time_since_epoch()).count();
}

// Adds one round's samples of a probe, or why there are none.
void run_probe(const Probe& probe, const ProbeContext& context, int round, ProbeOutcome& outcome) {
  const double begin = steady_seconds();
  try {
    add_round(outcome.measurements, probe.run(context), round);
  } catch (const std::exception& error) {
    waive_for(outcome, error);
  }
  outcome.seconds += steady_seconds() - begin;
  outcome.finished_unix_s = unix_seconds();
}

}  // namespace

ModelSpec default_model() {
  ModelSpec model;
  model.name = "SmolLM2-135M";
  model.family = ModelFamily::llama;
  model.hidden = 576;
  model.intermediate = 1536;
  model.layers = 30;
  model.heads = 9;
  model.kv_heads = 3;
  model.head_dim = 64;
  model.vocabulary = 49152;
  model.max_position = 8192;
  model.rms_eps = 1e-5;
  model.tied = true;
  model.rope.theta = 100000;
  return model;
}

ProbeContext make_context(const MachineIdentity& machine, const ModelSpec& model, bool quick) {
  constexpr int64_t kGiB = int64_t{1} << 30;
  ProbeContext context;
  context.model = model;
  context.cores = machine.cores;
  context.memory_bytes = machine.memory_bytes;
  context.available_bytes = context.device_available_bytes = available_host_memory().bytes;
  context.quick = quick;
  // One GiB in quick mode may in part sit in a large last-level cache; the full mode passes far beyond it.
  const int64_t wanted = quick ? kGiB : std::max(4 * kGiB, 8 * machine.last_level_cache);
  const auto limited = [&](int64_t bytes) { return std::min(bytes, context.available_bytes / 8) / 4096 * 4096; };
  context.rolling_bytes = limited(wanted);
  if (!quick) context.state_bytes = limited(4 * wanted);
  context.probe_seconds = quick ? 1.8 : 5.0;
  context.rounds = quick ? 2 : 3;
  return context;
}

double busy_threads() {
  std::vector<double> samples;
  for (int i = 0; i < 9; ++i) {
    samples.push_back(other_running_threads());
    std::this_thread::sleep_for(std::chrono::milliseconds(25));
  }
  return median(samples);
}

std::vector<const Probe*> choose_probes(std::span<const std::unique_ptr<Probe>> all,
                                        std::span<const std::string> keys) {
  std::string known;
  for (const auto& probe : all) known += (known.empty() ? "" : ", ") + probe->key();
  for (const std::string& key : keys) {
    if (std::none_of(all.begin(), all.end(), [&](const auto& probe) { return probe->key() == key; })) {
      failf("--only: there is no probe \"{}\"; the probes are {}.", key, known);
    }
  }
  // These decide the same values together: one alone would mix its own with what the others left in the profile.
  const std::set<std::string> together{"host.dram", "host.adam", "host.contention"};
  const bool any = std::any_of(keys.begin(), keys.end(), [&](const auto& key) { return together.contains(key); });
  std::vector<const Probe*> chosen;
  for (const auto& probe : all) {
    const bool named = std::find(keys.begin(), keys.end(), probe->key()) != keys.end();
    if (keys.empty() || named || (any && together.contains(probe->key()))) chosen.push_back(probe.get());
  }
  return chosen;
}

ProfileRun run_profile(std::span<const Probe* const> probes, const ProbeContext& context,
                       const MachineIdentity& machine, const HardwareSpec& start, const Progress& progress) {
  ProfileRun run;
  run.machine = machine;
  run.backend = context.backend;
  run.model = context.model.name;
  run.ranks = context.ranks;
  run.quick = context.quick;
  run.rounds = context.rounds;
  run.started_unix_s = unix_seconds();
  run.other_threads = busy_threads();
  for (const Probe* probe : probes) run.outcomes.push_back({probe->key(), probe->method(), probe->waived(context)});
  const double begin = steady_seconds();
  for (int round = 0; round < context.rounds; ++round) {
    for (size_t i = 0; i < probes.size(); ++i) {
      ProbeOutcome& outcome = run.outcomes[i];
      progress({round, i, *probes[i]}, nullptr);
      if (!outcome.waived) run_probe(*probes[i], context, round, outcome);
      progress({round, i, *probes[i]}, &outcome);
    }
  }
  run.seconds = steady_seconds() - begin;
  fit_profile(
      run, start,
      [&](const std::string& key, const FillFacts& facts, std::span<const Measurement> measured, HardwareSpec& spec) {
        const auto probe = std::find_if(probes.begin(), probes.end(), [&](const Probe* p) { return p->key() == key; });
        return (*probe)->fill(facts, measured, spec);
      });
  return run;
}

}  // namespace slidedp
