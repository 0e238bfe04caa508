// Which of cuBLASLt's algorithms is fastest for each matrix product of a Qwen3-4B step of 8 x 4096 tokens (and some of
// Qwen3-8B's), on normally distributed data. All that the library proposes run for 30 ms; its first, the runtime's
// choice and the fastest others then run long enough for the card to settle at its power limit, since what counts there
// is the energy of a product. Last, a layer's products one after another, with the library's first and with the
// runtime's choice in turn. One JSON object on standard output, progress on standard error; a bit more than a minute.
#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>
#include <cublasLt.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "model/cost/activations.h"
#include "runtime/nn/cuda/context.h"
#include "runtime/nn/cuda/gemm_descriptors.h"

namespace slidedp {
namespace {

using Json = nlohmann::ordered_json;
using Clock = std::chrono::steady_clock;

constexpr int64_t kTokens = 8 * 4096, kHidden = 2560, kAttentionWidth = 4096, kQkv = 6144, kIntermediate = 9728,
                  kVocabulary = 151936;
constexpr int64_t kChunk = 4096;  // tokens whose logits exist at once
constexpr int kLayers = 36, kChunks = kTokens / kChunk;
constexpr double kFirstLookSeconds = 0.03;
constexpr double kSettleSeconds = 0.3;  // before what is measured: the power limit acts over some 0.1 s
constexpr double kBlockSeconds = 0.5;
constexpr double kSequenceSeconds = 1.0;
constexpr int kSequenceRounds = 2;
constexpr float kWeights = 0.02f, kActivations = 1.0f, kGradients = 1e-3f;  // standard deviations

// Total energy of this process's first GPU, joules, by NVML; 0 where there is none.
class EnergyMeter {
 public:
  EnergyMeter() {
    void* library = dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL);  // stays loaded
    if (library == nullptr) return;
    const auto start = reinterpret_cast<int (*)()>(dlsym(library, "nvmlInit_v2"));
    const auto find =
        reinterpret_cast<int (*)(const char*, void**)>(dlsym(library, "nvmlDeviceGetHandleByPciBusId_v2"));
    const auto read =
        reinterpret_cast<int (*)(void*, unsigned long long*)>(dlsym(library, "nvmlDeviceGetTotalEnergyConsumption"));
    char bus[32] = {};
    if (!start || !find || !read || start() != 0 || cudaDeviceGetPCIBusId(bus, sizeof(bus), 0) != cudaSuccess) return;
    if (find(bus, &gpu_) == 0) read_ = read;
  }
  double joules() const {
    unsigned long long millijoules = 0;
    return read_ != nullptr && read_(gpu_, &millijoules) == 0 ? 1e-3 * static_cast<double>(millijoules) : 0.0;
  }

 private:
  void* gpu_ = nullptr;
  int (*read_)(void*, unsigned long long*) = nullptr;
};

// A product with the memory it works on, dense unless its strides say otherwise.
struct Case {
  std::string name;
  double per_step = 0;  // how often a step of Qwen3-4B makes it
  nn::Product product;
  double a_deviation = 1, b_deviation = 1;
  bool add_other = false, add_out = false;  // what is added: another matrix, the result itself, nothing
  double flops() const { return 2.0 * product.rows * product.columns * product.inner; }
};

Case make_case(std::string name, double per_step, int64_t rows, int64_t columns, int64_t inner) {
  Case c;
  c.name = std::move(name);
  c.per_step = per_step;
  c.product.rows = rows;
  c.product.columns = columns;
  c.product.inner = inner;
  c.product.a.stride = inner;
  c.product.b.stride = columns;
  c.product.out_stride = columns;
  return c;
}

Case forward(const char* name, double per_step, int64_t tokens, int64_t inputs, int64_t outputs, bool residual) {
  Case c = make_case(name, per_step, tokens, outputs, inputs);
  c.product.b.stride = inputs;
  c.product.b.transposed = true;
  c.b_deviation = kWeights;
  c.add_other = residual;
  return c;
}

Case input_gradient(const char* name, double per_step, int64_t tokens, int64_t inputs, int64_t outputs) {
  Case c = make_case(name, per_step, tokens, inputs, outputs);
  c.a_deviation = kGradients;
  c.b_deviation = kWeights;
  return c;
}

Case weight_gradient(const char* name, double per_step, int64_t tokens, int64_t inputs, int64_t outputs, DType slot,
                     bool add) {
  Case c = make_case(name, per_step, outputs, inputs, tokens);
  c.product.a.stride = outputs;
  c.product.a.transposed = true;
  c.a_deviation = kGradients;
  c.product.out_type = slot;
  c.add_out = add;
  return c;
}

// One micro-batch in one wave: bf16 gradient slots that are overwritten; the vocabulary's gradient is summed over
// chunks in fp32.
std::vector<Case> layer_cases() {
  constexpr DType bf16 = DType::bf16;
  return {
      forward("qkv_forward", kLayers, kTokens, kHidden, kQkv, false),
      forward("o_forward", kLayers, kTokens, kAttentionWidth, kHidden, true),
      forward("gate_up_forward", kLayers, kTokens, kHidden, 2 * kIntermediate, false),
      forward("down_forward", kLayers, kTokens, kIntermediate, kHidden, true),
      input_gradient("down_input_gradient", kLayers, kTokens, kIntermediate, kHidden),
      weight_gradient("down_weight_gradient", kLayers, kTokens, kIntermediate, kHidden, bf16, false),
      weight_gradient("gate_up_weight_gradient", kLayers, kTokens, kHidden, 2 * kIntermediate, bf16, false),
      input_gradient("gate_up_input_gradient", kLayers, kTokens, kHidden, 2 * kIntermediate),
      weight_gradient("o_weight_gradient", kLayers, kTokens, kAttentionWidth, kHidden, bf16, false),
      input_gradient("o_input_gradient", kLayers, kTokens, kAttentionWidth, kHidden),
      weight_gradient("qkv_weight_gradient", kLayers, kTokens, kHidden, kQkv, bf16, false),
      input_gradient("qkv_input_gradient", kLayers, kTokens, kHidden, kQkv),
  };
}

std::vector<Case> head_cases() {
  return {
      forward("logits", kChunks, kChunk, kHidden, kVocabulary, false),
      weight_gradient("vocabulary_gradient", kChunks - 1, kChunk, kHidden, kVocabulary, DType::fp32, true),
      input_gradient("logits_input_gradient", kChunks, kChunk, kHidden, kVocabulary),
  };
}

// Qwen3-8B: hidden 4096, intermediate 12288.
std::vector<Case> wider_cases() {
  return {
      forward("qkv_forward_8b", 0, kTokens, 4096, kQkv, false),
      forward("gate_up_forward_8b", 0, kTokens, 4096, 2 * 12288, false),
      input_gradient("down_input_gradient_8b", 0, kTokens, 12288, 4096),
      input_gradient("o_input_gradient_8b", 0, kTokens, 4096, 4096),
      forward("logits_8b", 0, kChunk, 4096, kVocabulary, false),
  };
}

at::Tensor normal(int64_t elements, double deviation) {
  return at::randn({elements}, at::TensorOptions().dtype(at::kBFloat16).device(at::kCUDA)).mul_(deviation);
}

// The memory of a case; sets the product's pointers.
std::vector<at::Tensor> allocate(Case& c) {
  nn::Product& p = c.product;
  std::vector<at::Tensor> memory;
  memory.push_back(normal((p.a.transposed ? p.inner : p.rows) * p.a.stride, c.a_deviation));
  memory.push_back(normal((p.b.transposed ? p.columns : p.inner) * p.b.stride, c.b_deviation));
  const auto type = at::TensorOptions().dtype(p.out_type == DType::fp32 ? at::kFloat : at::kBFloat16);
  memory.push_back(at::zeros({p.rows * p.out_stride}, type.device(at::kCUDA)));
  p.a.data = memory[0].data_ptr();
  p.b.data = memory[1].data_ptr();
  p.out = memory[2].data_ptr();
  if (c.add_out) p.add = p.out;
  if (c.add_other) {
    memory.push_back(normal(p.rows * p.out_stride, kActivations));
    p.add = memory[3].data_ptr();
  }
  return memory;
}

struct Algorithm {
  cublasLtMatmulHeuristicResult_t proposed{};
  Json config;
  double first_look_ms = 0;
  double ms = 0, joules = 0;  // a call's, sustained; 0: not a finalist
  double differing = 0;       // share of the result's elements that have other bits than with the library's first
};

template <typename T>
T config(const cublasLtMatmulAlgo_t& algorithm, cublasLtMatmulAlgoConfigAttributes_t which) {
  T value{};
  size_t written = 0;
  nn::check_cublas(cublasLtMatmulAlgoConfigGetAttribute(&algorithm, which, &value, sizeof(value), &written),
                   "cublasLtMatmulAlgoConfigGetAttribute");
  return value;
}

Json describe(const cublasLtMatmulAlgo_t& a) {
  return {{"id", config<int32_t>(a, CUBLASLT_ALGO_CONFIG_ID)},
          {"tile", config<uint32_t>(a, CUBLASLT_ALGO_CONFIG_TILE_ID)},
          {"stages", config<uint32_t>(a, CUBLASLT_ALGO_CONFIG_STAGES_ID)},
          {"split_k", config<int32_t>(a, CUBLASLT_ALGO_CONFIG_SPLITK_NUM)},
          {"reduction", config<uint32_t>(a, CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME)},
          {"swizzle", config<uint32_t>(a, CUBLASLT_ALGO_CONFIG_CTA_SWIZZLING)},
          {"custom", config<uint32_t>(a, CUBLASLT_ALGO_CONFIG_CUSTOM_OPTION)},
          {"inner_shape", config<uint16_t>(a, CUBLASLT_ALGO_CONFIG_INNER_SHAPE_ID)},
          {"cluster", config<uint16_t>(a, CUBLASLT_ALGO_CONFIG_CLUSTER_SHAPE_ID)}};
}

// A case that can run.
struct Prepared {
  Case c;
  std::vector<at::Tensor> memory;
  std::unique_ptr<nn::ProductDescriptors> descriptors;
  std::vector<Algorithm> algorithms;  // the library's first, first
  size_t chosen = 0;                  // the runtime's
};

class Bench {
 public:
  explicit Bench(double limit_seconds)
      : limit_seconds_(limit_seconds),
        workspace_(nn::device_bytes(kCudaProductWorkspaceBytes, 0)),
        hopper_(nn::is_hopper()) {
    nn::check_cublas(cublasLtCreate(&handle_), "cublasLtCreate");
    for (cudaEvent_t& event : events_) nn::check_cuda(cudaEventCreate(&event), "cudaEventCreate");
  }
  ~Bench() {
    for (const cudaEvent_t event : events_) cudaEventDestroy(event);
    cublasLtDestroy(handle_);
  }
  Bench(const Bench&) = delete;
  Bench& operator=(const Bench&) = delete;

  bool out_of_time() const { return seconds() > limit_seconds_; }
  double seconds() const { return std::chrono::duration<double>(Clock::now() - start_).count(); }

  Json measure(const Case& c) {
    Prepared p = prepare(c);
    std::vector<Algorithm>& all = p.algorithms;
    const auto run_one = [&](const Algorithm& each) { return [&] { run(p, each); }; };
    if (!warm_) block(run_one(all[0]), c.flops(), 1.0, 0, nullptr);
    warm_ = true;
    for (Algorithm& each : all) {
      each.first_look_ms = block(run_one(each), c.flops(), 0.1 * kFirstLookSeconds, kFirstLookSeconds, nullptr);
    }
    const std::vector<size_t> finalists = choose(p);
    for (const size_t i : finalists) {
      all[i].ms = block(run_one(all[i]), c.flops(), kSettleSeconds, kBlockSeconds, &all[i].joules);
    }
    compare(p, finalists);
    return report(p, finalists);
  }

  // The cases one after another, with the library's first algorithms and with the runtime's.
  Json sequence(const char* name, const std::vector<Case>& cases) {
    std::vector<Prepared> all;
    double flops = 0;
    for (const Case& c : cases) {
      all.push_back(prepare(c));
      flops += c.flops();
    }
    Json blocks[2] = {Json::array(), Json::array()};
    double sums[2] = {};
    for (int round = 0; round < kSequenceRounds; ++round) {
      for (const bool by_rule : {false, true}) {
        double joules = 0;
        const auto pass = [&] {
          for (const Prepared& p : all) run(p, p.algorithms[by_rule ? p.chosen : 0]);
        };
        const double ms = block(pass, flops, kSettleSeconds, kSequenceSeconds, &joules);
        blocks[by_rule].push_back({{"ms", ms}, {"tflop_s", rate(flops, ms)}, {"joules", joules}});
        sums[by_rule] += ms / kSequenceRounds;
      }
    }
    std::fprintf(stderr, "%s: library's first %.3f ms, runtime's choice %.3f ms, %.2f %% less (%.0f s)\n", name,
                 sums[0], sums[1], 100 * (1 - sums[1] / sums[0]), seconds());
    return {{"first", blocks[0]}, {"chosen", blocks[1]}, {"first_ms", sums[0]}, {"chosen_ms", sums[1]}};
  }

 private:
  static double rate(double flops, double ms) { return std::round(flops / ms / 1e8) / 10; }

  Prepared prepare(const Case& c) {
    Prepared p;
    p.c = c;
    p.memory = allocate(p.c);
    p.descriptors = std::make_unique<nn::ProductDescriptors>(p.c.product);
    const auto found = p.descriptors->algorithms(handle_, kCudaProductWorkspaceBytes);
    for (const cublasLtMatmulHeuristicResult_t& each : found) {
      Algorithm& added = p.algorithms.emplace_back();
      added.proposed = each;
      added.config = describe(each.algo);
      run(p, added);  // also loads the kernel
    }
    p.chosen = nn::choose_algorithm(found, c.product.inner, hopper_);
    return p;
  }

  void run(const Prepared& prepared, const Algorithm& use) {
    const nn::Product& p = prepared.c.product;
    const nn::ProductDescriptors& d = *prepared.descriptors;
    const float beta = p.add != nullptr ? 1.0f : 0.0f;
    const void* add = p.add != nullptr ? p.add : p.out;
    nn::check_cublas(cublasLtMatmul(handle_, d.description.get(), &p.alpha, p.b.data, d.b.get(), p.a.data, d.a.get(),
                                    &beta, add, d.out.get(), p.out, d.out.get(), &use.proposed.algo,
                                    workspace_.data_ptr(), kCudaProductWorkspaceBytes, nullptr),
                     "cublasLtMatmul");
  }

  // Milliseconds a call in a block of about `measured` seconds after `settle` seconds of the same, and its energy.
  template <typename Work>
  double block(const Work& work, double flops, double settle, double measured, double* joules) {
    constexpr double kExpectedRate = 650e12;
    const auto calls = [&](double span) { return std::max(1, static_cast<int>(span * kExpectedRate / flops)); };
    const int warm_ups = calls(settle), count = calls(measured);
    for (int i = 0; i < warm_ups; ++i) work();
    nn::check_cuda(cudaEventRecord(events_[0], nullptr), "cudaEventRecord");
    for (int i = 0; i < count; ++i) work();
    nn::check_cuda(cudaEventRecord(events_[1], nullptr), "cudaEventRecord");
    nn::check_cuda(cudaEventSynchronize(events_[0]), "cudaEventSynchronize");
    const double before = energy_.joules();
    nn::check_cuda(cudaEventSynchronize(events_[1]), "cudaEventSynchronize");
    if (joules != nullptr) *joules = (energy_.joules() - before) / count;
    float milliseconds = 0;
    nn::check_cuda(cudaEventElapsedTime(&milliseconds, events_[0], events_[1]), "cudaEventElapsedTime");
    return milliseconds / count;
  }

  // The library's first, the runtime's choice, and the fastest others at first look, three in all.
  static std::vector<size_t> choose(const Prepared& p) {
    std::vector<size_t> chosen{0}, by_time;
    if (p.chosen != 0) chosen.push_back(p.chosen);
    for (size_t i = 1; i < p.algorithms.size(); ++i) {
      if (i != p.chosen) by_time.push_back(i);
    }
    std::ranges::sort(by_time, {}, [&](size_t i) { return p.algorithms[i].first_look_ms; });
    for (size_t i = 0; i < by_time.size() && chosen.size() < 3; ++i) chosen.push_back(by_time[i]);
    return chosen;
  }

  void compare(Prepared& p, const std::vector<size_t>& finalists) {
    const at::Tensor& out = p.memory[2];
    at::Tensor expected;
    for (const size_t i : finalists) {
      out.zero_();
      run(p, p.algorithms[i]);
      if (!expected.defined()) {
        expected = out.clone();
      } else {
        p.algorithms[i].differing = out.ne(expected).sum().item<double>() / static_cast<double>(out.numel());
      }
    }
  }

  Json report(const Prepared& p, const std::vector<size_t>& finalists) const {
    const double flops = p.c.flops();
    Json algorithms = Json::array();
    for (const Algorithm& each : p.algorithms) {
      Json entry{{"config", each.config},
                 {"workspace_bytes", each.proposed.workspaceSize},
                 {"waves", each.proposed.wavesCount},
                 {"first_look_tflop_s", rate(flops, each.first_look_ms)}};
      if (each.ms > 0) {
        entry.update({{"tflop_s", rate(flops, each.ms)},
                      {"ms", each.ms},
                      {"joules", each.joules},
                      {"differing_share", each.differing}});
      }
      algorithms.push_back(entry);
    }
    const size_t best = *std::ranges::min_element(finalists, {}, [&](size_t i) { return p.algorithms[i].ms; });
    const double first_ms = p.algorithms[0].ms, chosen_ms = p.algorithms[p.chosen].ms, best_ms = p.algorithms[best].ms;
    std::fprintf(stderr, "%-24s first %6.1f, chosen (%zu) %6.1f, best (%zu of %2zu) %6.1f TFLOP/s (%.0f s)\n",
                 p.c.name.c_str(), rate(flops, first_ms), p.chosen, rate(flops, chosen_ms), best, p.algorithms.size(),
                 rate(flops, best_ms), seconds());
    return {{"per_step", p.c.per_step},   {"rows", p.c.product.rows}, {"columns", p.c.product.columns},
            {"inner", p.c.product.inner}, {"chosen", p.chosen},       {"best", best},
            {"first_ms", first_ms},       {"chosen_ms", chosen_ms},   {"best_ms", best_ms},
            {"algorithms", algorithms}};
  }

  double limit_seconds_;
  Clock::time_point start_ = Clock::now();
  at::Tensor workspace_;
  bool hopper_;
  cublasLtHandle_t handle_ = nullptr;
  cudaEvent_t events_[2] = {};
  EnergyMeter energy_;
  bool warm_ = false;
};

int run(double limit_seconds) {
  const c10::InferenceMode no_autograd;
  Bench bench(limit_seconds);
  Json products = Json::object(), skipped = Json::array();
  double first_ms = 0, chosen_ms = 0;
  for (const auto& cases : {layer_cases(), head_cases(), wider_cases()}) {
    for (const Case& c : cases) {
      if (bench.out_of_time()) {
        skipped.push_back(c.name);
        continue;
      }
      const Json& entry = products[c.name] = bench.measure(c);
      first_ms += c.per_step * entry["first_ms"].get<double>();
      chosen_ms += c.per_step * entry["chosen_ms"].get<double>();
    }
  }
  const Json all{{"cublaslt_version", cublasLtGetVersion()},
                 {"step_first_ms", first_ms},
                 {"step_chosen_ms", chosen_ms},
                 {"layer", bench.sequence("layer", layer_cases())},
                 {"head_chunk", bench.sequence("head chunk", head_cases())},
                 {"seconds", bench.seconds()},
                 {"skipped", skipped},
                 {"products", products}};
  std::printf("%s\n", all.dump(1).c_str());
  return 0;
}

}  // namespace
}  // namespace slidedp

int main(int argc, char** argv) {
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess || count == 0) {
    std::fprintf(stderr, "gemm_algorithms_bench: error: This process sees no GPU.\n");
    return 1;
  }
  // An argument: seconds after which no further product is begun.
  return slidedp::run(argc > 1 ? std::atof(argv[1]) : 70.0);
}
