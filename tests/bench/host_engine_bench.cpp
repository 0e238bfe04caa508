// Speed of the host engine beside that of memory: Adam, norm and accumulation on 1 to all cores, and STREAM-like loops
// in the same run. Each thread streams through its own part of --gib of memory; every pass visits all of it.
//
// Counters, from the median pass: elements_per_s; gbps, of the bytes that the loop has to read and write (an array that
// is written past the caches counts once); slowest and fastest pass in gbps_min and gbps_max. huge_gib:
// memory that the system gave in huge pages.
#include <benchmark/benchmark.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <fstream>
#include <functional>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "profiler/adam_slice.h"
#include "runtime/host/cpu_adam.h"
#include "runtime/host/kernels.h"
#include "runtime/host/worker_cores.h"
#include "tests/bench/streams.h"
#include "tests/bench/team.h"

namespace slidedp::bench {
namespace {

struct Settings {
  double gib = 4.25;
  std::vector<int> threads;
  int passes = 20;
};

// One thread's arrays.
struct Arrays {
  std::vector<std::byte*> at;
  int64_t elements = 0;

  template <typename T>
  T* array(size_t index) const {
    return reinterpret_cast<T*>(at[index]);
  }
  template <typename T>
  std::span<T> span(size_t index) const {
    return {array<T>(index), static_cast<size_t>(elements)};
  }
};

struct Case {
  std::string name;
  std::vector<int> widths;  // bytes of an element of each array
  int traffic;              // bytes an element
  std::function<void(const Arrays&)> work;
};

// As many elements as fit in a thread's part, arrays one after another at page starts.
Arrays carve(std::byte* part, int64_t bytes, const std::vector<int>& widths) {
  constexpr int64_t kPage = 4096;
  const int64_t width = std::accumulate(widths.begin(), widths.end(), int64_t{0});
  Arrays arrays;
  arrays.elements = (bytes - kPage * static_cast<int64_t>(widths.size())) / width / kBlockElements * kBlockElements;
  for (const int w : widths) {
    arrays.at.push_back(part);
    part += round_up(arrays.elements * w, kPage);
  }
  return arrays;
}

const std::vector<int> kState{2, 2, 4, 4};  // hi, lo, m, v

std::vector<int> state_and(int sources, int width) {
  std::vector<int> widths = kState;
  widths.insert(widths.end(), static_cast<size_t>(sources), width);
  return widths;
}

// `count` sources from array `first` on. The result's pointers live in `keep`.
GradientSources sources(const Arrays& arrays, size_t first, int count, DType type, std::vector<const void*>& keep) {
  keep.assign(arrays.at.begin() + static_cast<std::ptrdiff_t>(first),
              arrays.at.begin() + static_cast<std::ptrdiff_t>(first) + count);
  return {keep, count, type};
}

void adam(const Arrays& arrays, const GradientSources& gradient, UpdatePart part = UpdatePart::whole) {
  adam_update(arrays.span<uint16_t>(0), arrays.span<uint16_t>(1), arrays.span<float>(2), arrays.span<float>(3),
              gradient, typical_scalars(), true, part);
}

Case adam_case(int count, DType type) {
  const int width = static_cast<int>(size_of(type));
  return {"adam/" + std::string(name(type)) + "/" + std::to_string(count), state_and(count, width), 24 + count * width,
          [count, type](const Arrays& arrays) {
            std::vector<const void*> keep;
            adam(arrays, sources(arrays, 4, count, type, keep));
          }};
}

Case split_case(UpdatePart part, int traffic) {
  return {"adam/" + std::string(name(part)), state_and(1, 2), traffic, [part](const Arrays& arrays) {
            std::vector<const void*> keep;
            adam(arrays, sources(arrays, 4, 1, DType::bf16, keep), part);
          }};
}

Case with_accumulator_case() {
  return {"adam/accumulator+bf16/1", {2, 2, 4, 4, 2, 4}, 30, [](const Arrays& arrays) {
            std::vector<const void*> keep;
            GradientSources gradient = sources(arrays, 4, 1, DType::bf16, keep);
            gradient.accumulator = arrays.array<float>(5);
            adam(arrays, gradient);
          }};
}

// What summing inside Adam saves: all sources into an fp32 buffer, then Adam from that.
Case separate_case(int count) {
  std::vector<int> widths = state_and(count, 2);
  widths.push_back(4);
  const auto sum = static_cast<size_t>(4 + count);
  return {"sum_then_adam/bf16/" + std::to_string(count), widths, 24 + 2 * count + 8,
          [count, sum](const Arrays& arrays) {
            std::vector<const void*> keep;
            accumulate(arrays.span<float>(sum), sources(arrays, 4, count, DType::bf16, keep), true);
            GradientSources gradient;
            gradient.accumulator = arrays.array<float>(sum);
            adam(arrays, gradient);
          }};
}

Case norm_case(int count, DType type) {
  const int width = static_cast<int>(size_of(type));
  return {"norm/" + std::string(name(type)) + "/" + std::to_string(count),
          std::vector<int>(static_cast<size_t>(count), width), count * width, [count, type](const Arrays& arrays) {
            constexpr int64_t kPiece = int64_t{1} << 20;  // a chunk's block sums
            std::vector<double> sums(kPiece / kBlockElements);
            std::vector<const void*> keep;
            for (int64_t begin = 0; begin < arrays.elements; begin += kPiece) {
              const int64_t elements = std::min(kPiece, arrays.elements - begin);
              GradientSources gradient = sources(arrays, 0, count, type, keep);
              for (const void*& source : keep) source = static_cast<const std::byte*>(source) + begin * size_of(type);
              benchmark::DoNotOptimize(block_square_sums(
                  gradient, elements, std::span(sums).first(static_cast<size_t>(elements / kBlockElements))));
            }
          }};
}

// The first wave writes the accumulator; later ones read it too.
Case accumulate_case(int count, DType type, bool first) {
  const int width = static_cast<int>(size_of(type));
  std::vector<int> widths(static_cast<size_t>(count), width);
  widths.insert(widths.begin(), 4);
  return {(first ? "accumulate_first/" : "accumulate/") + std::string(name(type)) + "/" + std::to_string(count), widths,
          count * width + (first ? 4 : 8), [count, type, first](const Arrays& arrays) {
            std::vector<const void*> keep;
            accumulate(arrays.span<float>(0), sources(arrays, 1, count, type, keep), first);
          }};
}

std::vector<Case> stream_cases() {
  return {
      {"stream/read", {4}, 4, [](const Arrays& a) { benchmark::DoNotOptimize(read(a.array<float>(0), a.elements)); }},
      {"stream/copy", {4, 4}, 8, [](const Arrays& a) { copy(a.array<float>(0), a.array<float>(1), a.elements); }},
      {"stream/triad",
       {4, 4, 4},
       12,
       [](const Arrays& a) { triad(a.array<float>(0), a.array<float>(1), a.array<float>(2), a.elements); }},
      {"stream/read_modify_write",
       {2, 2, 4, 4, 2},
       26,
       [](const Arrays& a) {
         read_modify_write(a.array<uint16_t>(0), a.array<uint16_t>(1), a.array<uint32_t>(2), a.array<uint32_t>(3),
                           a.array<uint16_t>(4), a.elements);
       }},
  };
}

std::vector<Case> cases() {
  std::vector<Case> all = stream_cases();
  for (const int count : {1, 2, 4, 8}) all.push_back(adam_case(count, DType::bf16));
  for (const int count : {2, 8}) all.push_back(separate_case(count));
  for (const int count : {1, 2, 4, 8}) all.push_back(adam_case(count, DType::fp32));
  all.push_back(with_accumulator_case());
  all.push_back(split_case(UpdatePart::weights, 18));
  all.push_back(split_case(UpdatePart::moments, 18));
  for (const DType type : {DType::bf16, DType::fp32}) {
    for (const int count : {1, 2}) all.push_back(norm_case(count, type));
    for (const bool first : {true, false}) all.push_back(accumulate_case(1, type, first));
  }
  return all;
}

// The threads of the case at hand; made anew when their number changes, so that each touches its memory first.
Team& team_of(int threads, const Settings& settings) {
  static std::unique_ptr<Team> team;
  if (team == nullptr || team->threads() != threads) {
    team.reset();
    std::vector<int> cores = allowed_cores();
    cores.resize(static_cast<size_t>(threads));
    team = std::make_unique<Team>(cores, static_cast<int64_t>(settings.gib * (int64_t{1} << 30)));
  }
  return *team;
}

// GiB of this process that lie in huge pages.
double huge_gib() {
  std::ifstream in("/proc/self/smaps_rollup");
  for (std::string line; std::getline(in, line);) {  // "AnonHugePages:   1048576 kB"
    if (line.starts_with("AnonHugePages:")) return std::stod(line.substr(14)) / (1 << 20);
  }
  return 0;
}

void measure(benchmark::State& state, const Case& which, int threads, const Settings& settings) {
  Team& team = team_of(threads, settings);
  team.fill();
  std::vector<Arrays> arrays;
  int64_t elements = 0;
  for (int thread = 0; thread < threads; ++thread) {
    arrays.push_back(carve(team.part(thread), team.part_bytes(), which.widths));
    elements += arrays.back().elements;
  }
  const auto pass = [&] { return team.run([&](int thread) { which.work(arrays[static_cast<size_t>(thread)]); }); };
  pass();  // warm-up
  std::vector<double> seconds;
  for (auto _ : state) {
    seconds.push_back(pass());
    state.SetIterationTime(seconds.back());
  }
  std::sort(seconds.begin(), seconds.end());
  const double bytes = static_cast<double>(elements) * which.traffic;
  const double median = seconds[seconds.size() / 2];
  state.counters["workers"] = threads;
  state.counters["huge_gib"] = huge_gib();
  state.counters["elements"] = static_cast<double>(elements);
  state.counters["bytes_per_element"] = which.traffic;
  state.counters["elements_per_s"] = static_cast<double>(elements) / median;
  state.counters["gbps"] = bytes / median / 1e9;
  state.counters["gbps_min"] = bytes / seconds.back() / 1e9;
  state.counters["gbps_max"] = bytes / seconds.front() / 1e9;
}

// 1, 2, 4, ... and all.
std::vector<int> default_threads(int cores) {
  std::vector<int> threads;
  for (int count = 1; count < cores; count *= 2) threads.push_back(count);
  threads.push_back(cores);
  return threads;
}

int run(int argc, char** argv) {
  benchmark::Initialize(&argc, argv);
  CLI::App app{"Measures the host engine. Takes Google Benchmark's --benchmark_... flags too."};
  Settings settings;
  const int cores = static_cast<int>(allowed_cores().size());
  app.add_option("--gib", settings.gib,
                 "memory that each case goes through; under 4 GiB large caches hold too much of it, and the numbers "
                 "say nothing about memory (default 4.25)");
  app.add_option("--threads", settings.threads, "numbers of threads (default 1, 2, 4, ... and all cores)")
      ->delimiter(',')
      ->check(CLI::Range(1, cores));
  app.add_option(
         "--passes", settings.passes,
         "measured passes of each case with most threads (default 20); a sixth of them with fewer, which take longer")
      ->check(CLI::PositiveNumber);
  CLI11_PARSE(app, argc, argv);
  if (settings.threads.empty()) settings.threads = default_threads(cores);
  const int most = *std::max_element(settings.threads.begin(), settings.threads.end());
  const std::vector<Case> all = cases();
  for (const int threads : settings.threads) {
    for (const Case& which : all) {
      benchmark::RegisterBenchmark(
          (which.name + "/threads:" + std::to_string(threads)).c_str(),
          [&which, threads, &settings](benchmark::State& state) { measure(state, which, threads, settings); })
          ->UseManualTime()
          ->Unit(benchmark::kMillisecond)
          ->Iterations(threads == most ? settings.passes : std::max(1, settings.passes / 6));
    }
  }
  benchmark::AddCustomContext("instruction_set", kernels::target());
  benchmark::AddCustomContext("gib", std::to_string(settings.gib));
  benchmark::RunSpecifiedBenchmarks();
  benchmark::Shutdown();
  return 0;
}

}  // namespace
}  // namespace slidedp::bench

int main(int argc, char** argv) { return slidedp::bench::run(argc, argv); }
