// Probes and their parts, on the CPU backend or on numbers made up here.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <chrono>
#include <map>
#include <numeric>
#include <set>
#include <thread>

#include "model/base/error.h"
#include "model/calibration/contention_fit.h"
#include "model/cost/flops.h"
#include "profiler/adam_slice.h"
#include "profiler/copier.h"
#include "profiler/kernel_bench.h"
#include "profiler/profile.h"
#include "profiler/registry.h"
#include "profiler/stream_team.h"
#include "profiler/streams.h"
#include "runtime/device/backends.h"
#include "runtime/device/clock.h"

namespace slidedp {
namespace {

ProbeContext small_context() {
  ModelSpec model = default_model();
  model.hidden = 64;
  model.intermediate = 128;
  model.heads = 4;
  model.kv_heads = 2;
  model.head_dim = 16;
  model.vocabulary = 256;
  ProbeContext context = make_context({"node", "a processor", "Linux 6", 4, int64_t{1} << 34, 1 << 20}, model, true);
  context.rolling_bytes = int64_t{32} << 20;
  context.probe_seconds = 0.1;
  return context;
}

std::unique_ptr<Probe> probe_named(const std::string& key) {
  for (auto& probe : all_probes()) {
    if (probe->key() == key) return std::move(probe);
  }
  return nullptr;
}

TEST(ProgressCurve, RateOfAWindow) {
  const ProgressCurve curve{{1, 0}, {2, 10}, {4, 50}};
  EXPECT_DOUBLE_EQ(amount_at(curve, 0), 0);
  EXPECT_DOUBLE_EQ(amount_at(curve, 1.5), 5);
  EXPECT_DOUBLE_EQ(amount_at(curve, 2), 10);
  EXPECT_DOUBLE_EQ(amount_at(curve, 3), 30);
  EXPECT_DOUBLE_EQ(amount_at(curve, 9), 50);
  EXPECT_DOUBLE_EQ(rate_in(curve, {1.5, 3}), 25 / 1.5);
  EXPECT_EQ(amount_at({}, 1), 0);
}

TEST(ProgressCurve, SumOverTheWindowInWhichAllRun) {
  const std::vector<ProgressCurve> curves{{{1, 0}, {5, 40}}, {{2, 0}, {3, 2}, {9, 14}}};
  const Window window = common_window(curves);
  EXPECT_EQ(window.begin, 2);
  EXPECT_EQ(window.end, 5);
  EXPECT_FALSE(window.empty());
  EXPECT_DOUBLE_EQ(summed_rate(curves, window), 10 + 2);
  EXPECT_TRUE(common_window(std::vector<ProgressCurve>{{{1, 0}, {2, 1}}, {{2, 0}, {3, 1}}}).empty());
}

// Whatever the machine does meanwhile, each call of worker 0 takes as long as 20 calls of each other worker.
class OneSlowWorker {
 public:
  double operator()(int worker) {
    if (worker > 0) {
      std::this_thread::sleep_for(std::chrono::microseconds(200));
      ++calls_[static_cast<size_t>(worker)];
      return 1;
    }
    for (size_t other = 1; other < calls_.size(); ++other) wait(other, calls_[other] + 20);
    return 1;
  }

 private:
  // Or until it makes no more calls, since its team is stopped.
  void wait(size_t other, int calls) const {
    for (int idle = 0, before = calls_[other]; calls_[other] < calls && idle < 100; ++idle) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
      if (calls_[other] > before) idle = 0;
      before = calls_[other];
    }
  }
  std::array<std::atomic<int>, 4> calls_{};
};

TEST(StreamTeam, ASlowWorkerTakesItsOwnShareAndNoMore) {
  const WorkerCores cores(4, 1000);  // none of their own: they sleep
  OneSlowWorker slow;
  const StreamWork work = std::ref(slow);
  StreamTeam team(4, cores, work);
  std::this_thread::sleep_for(std::chrono::milliseconds(200));
  const std::vector<ProgressCurve> curves = team.finish();
  const Window window = common_window(curves);
  const double slow_rate = rate_in(curves[0], window);
  double others = 0;
  for (size_t i = 1; i < 4; ++i) {
    // At least 20 by construction; parts of calls at the window's ends leave some room.
    EXPECT_GT(rate_in(curves[i], window), 8 * slow_rate) << "worker " << i << " waited for the slow one";
    others += rate_in(curves[i], window);
  }
  EXPECT_DOUBLE_EQ(summed_rate(curves, window), others + slow_rate);
}

TEST(StreamTeam, CurvesEndAfterTheStop) {
  const WorkerCores cores(3, 1000);
  const StreamWork work = [](int worker) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    return worker + 1.0;
  };
  StreamTeam team(3, cores, work);
  const double begin = process_seconds();
  const std::vector<ProgressCurve> curves = team.finish();  // at once: there is a window all the same
  ASSERT_EQ(curves.size(), 3u);
  for (size_t i = 0; i < 3; ++i) {
    EXPECT_LE(curves[i].front().seconds, begin);
    EXPECT_EQ(curves[i].front().amount, 0) << "the first call warms up";
    EXPECT_GT(curves[i].back().seconds, begin);
    EXPECT_EQ(curves[i].back().amount, static_cast<double>((i + 1) * (curves[i].size() - 1)));
  }
  EXPECT_FALSE(common_window(curves).empty());
}

TEST(StreamTeam, AnErrorInAWorkerEndsTheProbeWithIt) {
  const WorkerCores cores(3, 1000);
  for (const int good_calls : {0, 1, 3}) {  // before anything is counted, in the first call counted, later
    std::atomic<int> calls = 0;
    const StreamWork work = [&](int worker) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
      if (worker == 1 && calls++ == good_calls) throw Error("worker 1 broke");
      return 1.0;
    };
    try {
      rate_together(3, cores, 0.3, work);  // long enough for four calls on a busy machine
      ADD_FAILURE() << "no error after " << good_calls << " calls";
    } catch (const Error& error) {
      EXPECT_STREQ(error.what(), "worker 1 broke");
    }
    EXPECT_EQ(calls, good_calls + 1) << "it is not called again";
  }
}

TEST(StreamTeam, IsStoppedWhereNobodyWaitsForItsCurves) {
  const WorkerCores cores(2, 1000);
  std::atomic<int> calls = 0;
  const StreamWork work = [&](int) { return ++calls; };
  { const StreamTeam team(2, cores, work); }
  EXPECT_GE(calls, 4) << "each has warmed up and made its last call";
}

TEST(WorkerCores, AWorkerAllAloneVisitsEveryCore) {
  const size_t usable = allowed_cores().size();
  WorkerCores cores(1, 0);
  std::set<int> visited;
  for (size_t i = 0; i < usable; ++i) {
    std::thread([&] {
      cores.take(0);
      visited.insert(allowed_cores().front());
    }).join();
    cores.turn();
  }
  EXPECT_EQ(visited.size(), usable);
}

TEST(Streams, DoWhatTheyAreTimedFor) {
  constexpr int64_t kCount = 48;
  std::vector<float> a(kCount), b(kCount), out(kCount);
  for (int64_t i = 0; i < kCount; ++i) {
    a[static_cast<size_t>(i)] = static_cast<float>(i);
    b[static_cast<size_t>(i)] = static_cast<float>(100 * i);
  }
  streams::triad(a.data(), b.data(), out.data(), kCount);
  for (size_t i = 0; i < kCount; ++i) EXPECT_EQ(out[i], 301 * a[i]);
  streams::copy(b.data(), out.data(), kCount);
  EXPECT_EQ(out, b);
  streams::negate(out.data(), kCount);
  for (size_t i = 0; i < kCount; ++i) EXPECT_EQ(out[i], -b[i]);
  std::vector<uint64_t> words(kCount / 2);
  std::iota(words.begin(), words.end(), uint64_t{1} << 40);
  EXPECT_EQ(streams::read(reinterpret_cast<const float*>(words.data()), kCount), (24ull << 40) + 276);
}

// Within what memory systems can do: values in other units are not.
TEST(HostProbes, GiveRatesOfMemory) {
  const ProbeContext context = small_context();
  const std::map<std::string, double> bytes_an_element{
      {"host.adam", 26}, {"host.split", 18}, {"host.norm", 2}, {"host.sources", 26}};
  for (const char* key : {"host.dram", "host.adam", "host.split", "host.norm", "host.sources"}) {
    const auto probe = probe_named(key);
    ASSERT_EQ(probe->waived(context), std::nullopt);
    const std::vector<Measurement> measured = probe->run(context);
    EXPECT_GE(measured.size(), 1u);
    for (const Measurement& m : measured) {
      EXPECT_GE(m.repeats.size(), 3u);
      const double bytes = m.parameters.contains("bytes") ? m.parameters.at("bytes")
                                                          : m.parameters.at("elements") * bytes_an_element.at(key);
      for (const double seconds : m.repeats) {
        EXPECT_GT(bytes / seconds, 1e7) << key;
        EXPECT_LT(bytes / seconds, 5e12) << key;
      }
    }
    HardwareSpec spec;
    EXPECT_FALSE(probe->fill({1, context.cores}, measured, spec).empty());
  }
}

TEST(Copier, CurveEndsWithTheLaneAndCountsEveryPiece) {
  Backend backend = make_backend("cpu", 1);
  Copier copier(*backend.devices.front(), Direction::d2h, 1 << 20, 1 << 16);
  for (const int pieces : {20, 5}) {
    copier.issue_marked(1 << 16, pieces);
    copier.lane().finish();
    const ProgressCurve curve = copier.curve();
    ASSERT_EQ(curve.size(), static_cast<size_t>(pieces) + 1);
    EXPECT_EQ(curve.front().seconds, copier.lane().start_s());
    EXPECT_LE(curve.back().seconds, copier.lane().end_s());
    EXPECT_EQ(curve.back().amount, pieces * (1 << 16));
    for (size_t i = 1; i < curve.size(); ++i) EXPECT_LE(curve[i - 1].seconds, curve[i].seconds);
  }
}

// The CPU backend's copies are no DMA, so this machine is asked nothing; the probe's own code is the same.
TEST(ContentionProbe, MeasuresEverySituation) {
  const auto probe = probe_named("host.contention");
  ASSERT_NE(probe, nullptr);
  const std::vector<Measurement> measured = probe->run(small_context());
  std::vector<std::string> names;
  std::set<int> threads;
  for (const Measurement& m : measured) {
    names.push_back(m.value_name);
    threads.insert(static_cast<int>(m.parameters.at("threads")));
    EXPECT_GE(m.repeats.size(), 3u);
    // What no memory system of today leaves: rates in other units do.
    EXPECT_THAT(m.repeats, testing::Each(testing::AllOf(testing::Gt(0.001), testing::Lt(5000.0))));
  }
  EXPECT_THAT(names, testing::ElementsAre("h2d", "d2h", "h2d", "d2h", "adam", "h2d", "adam", "d2h", "adam", "h2d",
                                          "d2h", "adam"));
  EXPECT_THAT(threads, testing::ElementsAre(0, 2)) << "two of four cores are the program's and the launching thread's";
  EXPECT_EQ(contention_samples(measured).size(), 7u);
}

TEST(DramProbe, TakesTheFastestStreamOfAllCores) {
  const auto stream = [](const char* name, double threads, double gbps) {
    return Measurement{name, "s", {{"threads", threads}, {"bytes", 1e9}}, {1 / gbps}, true};
  };
  std::vector<Measurement> measured{stream("read", 16, 80), stream("triad", 16, 90), stream("triad", 8, 200),
                                    stream("copy", 16, 300)};
  const auto probe = probe_named("host.dram");
  HardwareSpec spec;
  probe->fill({1, 16}, measured, spec);
  EXPECT_DOUBLE_EQ(spec.host.dram_gbps, 90) << "samples of an older version";
  measured.push_back(stream("in_place", 16, 120));
  probe->fill({1, 16}, measured, spec);
  EXPECT_DOUBLE_EQ(spec.host.dram_gbps, 120);
  EXPECT_DOUBLE_EQ(spec.host.cpu_stream_gbps, 120);
}

TEST(ContentionProbe, FillsTheLawThatExplainsTheRates) {
  HardwareSpec spec;
  spec.device.backend = "cuda";
  spec.pcie.h2d = {5e-6, 55.3};
  spec.pcie.d2h = {3e-6, 55.2};
  spec.pcie.duplex_gbps = 101.2;
  spec.pcie.root_h2d_gbps = spec.pcie.root_d2h_gbps = 55.2;
  spec.host.cores = 16;
  spec.host.dram_gbps = spec.host.cpu_stream_gbps = 119;
  spec.host.adam_elements_per_s = 7.7e8;
  const auto rates = [](double h2d, double d2h, std::vector<std::pair<const char*, double>> values) {
    std::vector<Measurement> points;
    for (const auto& [name, gbps] : values) {
      points.push_back({name, "GB/s", {{"h2d", h2d}, {"d2h", d2h}, {"threads", 14}}, {gbps, gbps, 1.1 * gbps}, true});
    }
    return points;
  };
  std::vector<Measurement> measured;
  for (const auto& part :
       {rates(0, 0, {{"adam", 127.9}}), rates(1, 0, {{"h2d", 35.6}, {"adam", 103.9}}),
        rates(0, 1, {{"d2h", 53.7}, {"adam", 90.7}}), rates(1, 1, {{"h2d", 27.6}, {"d2h", 46.7}, {"adam", 76.1}})}) {
    measured.insert(measured.end(), part.begin(), part.end());
  }
  const auto probe = probe_named("host.contention");
  const std::vector<Finding> found = probe->fill({1, 16}, measured, spec);
  // The law gives the medians back; of its values only their effects are determined by four situations.
  const TogetherRates all = predict_together(spec, {true, true, 14});
  EXPECT_NEAR(all.h2d_gbps, 27.6, 0.02 * 27.6);
  EXPECT_NEAR(all.d2h_gbps, 46.7, 0.02 * 46.7);
  EXPECT_NEAR(all.adam_gbps, 76.1, 0.02 * 76.1);
  EXPECT_DOUBLE_EQ(spec.host.cpu_stream_gbps, 127.9);
  EXPECT_DOUBLE_EQ(spec.host.dram_gbps, 27.6 + 46.7 + 76.1);
  std::vector<std::string> fields;
  for (const Finding& finding : found) {
    fields.push_back(finding.field);
    EXPECT_EQ(finding.note, "");
  }
  EXPECT_THAT(fields, testing::ElementsAre("host.adam_elements_per_s", "contention.h2d.headroom",
                                           "contention.h2d.beside_streams", "contention.h2d.beside_copies",
                                           "contention.d2h.headroom", "contention.d2h.beside_streams",
                                           "contention.d2h.beside_copies", "contention.streams.beside_streams",
                                           "contention.streams.beside_h2d", "contention.streams.beside_d2h",
                                           "host.cpu_stream_gbps", "host.dram_gbps"));
}

TEST(KernelShapes, GpuGoesUpToSeveralWholeRowsThatFit) {
  ProbeContext context = small_context();
  context.backend = "cuda";
  context.device_available_bytes = int64_t{80} << 30;
  const ModelSpec measured = measured_model(context);
  EXPECT_EQ(measured.vocabulary, context.model.vocabulary);
  const auto tokens = [&] {
    std::vector<int64_t> result;
    for (const KernelShape& shape : kernel_shapes(context, measured)) result.push_back(shape.tokens());
    return result;
  };
  EXPECT_THAT(tokens(), testing::ElementsAre(1024, 4096, 4 * 4096, 8 * 4096));
  context.quick = false;
  EXPECT_THAT(tokens(), testing::ElementsAre(1024, 2048, 4096, 2 * 4096, 4 * 4096, 8 * 4096));
  context.device_available_bytes = bench_bytes(context, measured, {4, 4096});
  EXPECT_THAT(tokens(), testing::ElementsAre(1024, 2048, 4096, 2 * 4096, 4 * 4096));
  context.device_available_bytes = 1;
  EXPECT_THAT(tokens(), testing::ElementsAre(1024, 2048)) << "a kernel's law needs two sizes";
}

TEST(LayerDesigns, HoldTheModelAndNarrowerAndWiderOnes) {
  ProbeContext context = small_context();
  context.backend = "cuda";
  context.device_available_bytes = int64_t{80} << 30;
  const size_t shapes = kernel_shapes(context, measured_model(context)).size();
  EXPECT_EQ(layer_designs(context).size(), shapes) << "quick: its own";
  context.quick = false;
  const std::vector<LayerDesign> designs = layer_designs(context);
  EXPECT_GE(designs.size(), 12u) << "four numbers are fitted, and each shape is left out in turn";
  std::set<int64_t> widths, rows;
  for (const LayerDesign& design : designs) {
    EXPECT_EQ(design.own, design.model.intermediate == context.model.intermediate);
    EXPECT_EQ(design.model.heads % design.model.kv_heads, 0);
    EXPECT_LE(design.shape.seq, context.model.max_position);
    EXPECT_LE(bench_bytes(context, design.model, design.shape), context.device_available_bytes);
    widths.insert(design.model.hidden);
    rows.insert(design.shape.seq);
  }
  EXPECT_EQ(widths.size(), 2u) << "half of 64 is less than a block, so that one is as wide";
  EXPECT_GE(rows.size(), 4u) << "what attention costs shows in the length of rows";
  context.device_available_bytes = 1;
  EXPECT_EQ(layer_designs(context).size(), 2u) << "no more than the probe's own shapes, which waive it";
}

TEST(LayerDesigns, AHostsAreShortOnesFirst) {
  ProbeContext context = small_context();
  context.quick = false;
  double before = 0;
  for (const LayerDesign& design : layer_designs(context)) {
    const double flops = layer_forward_flops(design.model, design.shape.rows, design.shape.seq);
    EXPECT_GE(flops, before);
    before = flops;
    KernelBench bench(context, design.model, design.shape);
    EXPECT_THAT(bench.layer(), testing::ElementsAre(testing::Gt(0), testing::Gt(0)));
  }
}

TEST(StatePool, SlicesGoThroughTheirSharesFromDifferentPlaces) {
  const int64_t chunks = 3 * kElementsPerCall;
  StatePool pool(14 * 3 * chunks, 1);
  ASSERT_EQ(pool.elements(), 3 * chunks);
  std::set<int64_t> places, places_later;
  int64_t begin = 0;
  for (StateSlice& slice : slices_of(pool, 3)) {
    places.insert(slice.position() - begin);
    std::set<int64_t> visited;
    for (int i = 0; i < 6; ++i) {
      EXPECT_EQ(slice.update(1), kElementsPerCall);
      EXPECT_EQ(slice.position() % kBlockElements, 0);
      EXPECT_LE(slice.position(), begin + chunks);
      visited.insert(slice.position());
    }
    EXPECT_LT(*visited.begin(), begin + 2 * kElementsPerCall) << "it ends its first call there";
    places_later.insert(slice.position() % kElementsPerCall);
    EXPECT_GT(*visited.rbegin(), begin + chunks - kElementsPerCall) << "all of it, round again";
    begin += chunks;
  }
  EXPECT_EQ(places.size(), 3u);
  EXPECT_EQ(places_later.size(), 3u) << "rounds later they are still no whole number of chunks apart";
  StatePool small(int64_t{14} * 64 * 40, 1);
  for (const int workers : {1, 3, 8}) {  // less than a chunk each: all of the share in one call
    const int64_t share = 64 * 40 / workers / 64 * 64;
    int64_t next = 0;
    for (StateSlice& slice : slices_of(small, workers)) {
      EXPECT_EQ(slice.position(), next) << workers;
      EXPECT_EQ(slice.update(1), share);
      EXPECT_EQ(slice.update(1), share);
      EXPECT_EQ(slice.position(), next + share);
      next += share;
    }
  }
}

TEST(ThreadCounts, ShowWhereAStreamStopsGrowing) {
  ProbeContext context = small_context();
  context.cores = 16;
  EXPECT_THAT(thread_counts(context), testing::ElementsAre(1, 16)) << "quick";
  context.quick = false;
  EXPECT_THAT(thread_counts(context), testing::ElementsAre(1, 4, 8, 14, 16));
  context.cores = 1;
  EXPECT_THAT(thread_counts(context), testing::ElementsAre(1));
}

TEST(RecordedProbes, MeasureAndFillNothing) {
  const ProbeContext context = small_context();
  HardwareSpec spec;
  for (const auto& [key, names] :
       {std::pair("kernel.product", std::set<std::string>{"forward", "input_gradient", "weight_gradient"}),
        std::pair("storage", std::set<std::string>{"write", "read"})}) {
    const auto probe = probe_named(key);
    ASSERT_EQ(probe->waived(context), std::nullopt);
    const std::vector<Measurement> measured = probe->run(context);
    std::set<std::string> seen;
    for (const Measurement& m : measured) {
      seen.insert(m.value_name);
      EXPECT_THAT(m.repeats, testing::Each(testing::Gt(0))) << key;
    }
    EXPECT_EQ(seen, names);
    EXPECT_TRUE(probe->fill({1, 4}, measured, spec).empty());
  }
  EXPECT_EQ(spec, HardwareSpec());
}

TEST(KernelBench, SeveralRowsAreSeveralDocuments) {
  const ProbeContext context = small_context();
  KernelBench bench(context, measured_model(context), {3, 8});
  // All entry points take the shape; positions beyond a row's length and a bad document start are refused there.
  EXPECT_GT(bench.embedding_forward(), 0);
  EXPECT_THAT(bench.layer(), testing::ElementsAre(testing::Gt(0), testing::Gt(0)));
  EXPECT_GT(bench.head(), 0);
  EXPECT_GT(bench.embedding_backward(true), 0);
  KernelBench packed(context, measured_model(context), {2, 8, 4});
  EXPECT_THAT(packed.layer(), testing::ElementsAre(testing::Gt(0), testing::Gt(0)));
}

TEST(KernelBench, DataIsRandomAndFillsAllOfTheMemory) {
  Backend backend = make_backend("cpu", 1);
  Device& device = *backend.devices.front();
  const std::unique_ptr<Stream> stream = device.create_stream("h2d");
  const int64_t elements = kFillElements + 100;
  for (const DType type : {DType::bf16, DType::fp32}) {
    const DeviceMemory memory = device.allocate(elements * size_of(type), "a test's tensor");
    fill_random(device, *stream, memory, type);
    double sum = 0, squares = 0;
    for (int64_t i = 0; i < elements; ++i) {
      float value = 0;
      if (type == DType::fp32) {
        value = static_cast<const float*>(memory.data())[i];
      } else {
        const uint32_t bits = static_cast<uint32_t>(static_cast<const uint16_t*>(memory.data())[i]) << 16;
        value = std::bit_cast<float>(bits);
      }
      ASSERT_LE(std::abs(value), 0.05f) << i;
      sum += value;
      squares += static_cast<double>(value) * value;
    }
    // Uniform in +-0.05: deviation 0.05 / sqrt(3); the mean of 1 Mi values deviates by 2.8e-5, bf16 truncates by 2^-8.
    EXPECT_NEAR(sum / static_cast<double>(elements), 0, 2e-4);
    EXPECT_NEAR(std::sqrt(squares / static_cast<double>(elements)), 0.05 / std::sqrt(3.0), 3e-4);
    const auto* bytes = static_cast<const uint16_t*>(memory.data());
    EXPECT_NE(bytes[elements * size_of(type) / 2 - 1], 0) << "the last element is filled";
  }
}

}  // namespace
}  // namespace slidedp
