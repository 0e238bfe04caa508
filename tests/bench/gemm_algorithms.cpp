// Which of cuBLASLt's algorithms is fastest for each matrix product of a Qwen3-4B step of 8 x 4096 tokens: what the
// runtime's own search finds, with what wider ones find (alignment of 256 bytes, any reduction of split products, more
// workspace, row-major descriptors). All are timed for 30 ms; the runtime's choice, the fastest three and whatever
// other search's first is about as fast then run in turn, in blocks long enough for the card to settle at its power
// limit, on normally distributed data. One JSON object on standard output, progress on standard error; about a minute.
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
#include <map>
#include <nlohmann/json.hpp>
#include <stdexcept>
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
constexpr size_t kLargeWorkspaceBytes = size_t{128} << 20;
constexpr int kAsked = 24;  // algorithms that a search may return
constexpr double kFirstLookSeconds = 0.03;
constexpr int kRounds = 2;                                                  // blocks of each finalist
constexpr double kSettleSeconds = 0.05;                                     // of a block, not measured
constexpr double kBlockSeconds = 0.15;                                      // measured
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
  double per_step = 0;  // how often a step makes it; 0: another way to get a result, not what the step does
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
// chunks in fp32. The last ones cut a product of the step into parts.
std::vector<Case> cases() {
  constexpr DType bf16 = DType::bf16, fp32 = DType::fp32;
  std::vector<Case> all{
      forward("gate_up_forward", kLayers, kTokens, kHidden, 2 * kIntermediate, false),
      input_gradient("gate_up_input_gradient", kLayers, kTokens, kHidden, 2 * kIntermediate),
      weight_gradient("gate_up_weight_gradient", kLayers, kTokens, kHidden, 2 * kIntermediate, bf16, false),
      forward("down_forward", kLayers, kTokens, kIntermediate, kHidden, true),
      input_gradient("down_input_gradient", kLayers, kTokens, kIntermediate, kHidden),
      weight_gradient("down_weight_gradient", kLayers, kTokens, kIntermediate, kHidden, bf16, false),
      forward("qkv_forward", kLayers, kTokens, kHidden, kQkv, false),
      input_gradient("qkv_input_gradient", kLayers, kTokens, kHidden, kQkv),
      weight_gradient("qkv_weight_gradient", kLayers, kTokens, kHidden, kQkv, bf16, false),
      forward("o_forward", kLayers, kTokens, kAttentionWidth, kHidden, true),
      input_gradient("o_input_gradient", kLayers, kTokens, kAttentionWidth, kHidden),
      weight_gradient("o_weight_gradient", kLayers, kTokens, kAttentionWidth, kHidden, bf16, false),
      forward("logits", kChunks, kChunk, kHidden, kVocabulary, false),
      input_gradient("logits_input_gradient", kChunks, kChunk, kHidden, kVocabulary),
      weight_gradient("vocabulary_gradient", kChunks - 1, kChunk, kHidden, kVocabulary, fp32, true),
  };
  Case gate = forward("gate_forward", 0, kTokens, kHidden, kIntermediate, false);
  gate.product.out_stride = 2 * kIntermediate;
  Case part = forward("logits_quarter", 0, kChunk, kHidden, kVocabulary / 4, false);
  part.product.out_stride = kVocabulary;
  Case rows = forward("gate_up_forward_quarter_rows", 0, kTokens / 4, kHidden, 2 * kIntermediate, false);
  Case gate_weights = weight_gradient("gate_weight_gradient", 0, kTokens, kHidden, kIntermediate, bf16, false);
  gate_weights.product.a.stride = 2 * kIntermediate;
  for (const Case& c : {gate, part, rows, gate_weights}) all.push_back(c);
  all.push_back(weight_gradient("down_weight_gradient_added_fp32", 0, kTokens, kIntermediate, kHidden, fp32, true));
  return all;
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

// The same product told as row-major matrices, in their own order: the library turns it into columns as it likes.
class RowMajor {
 public:
  explicit RowMajor(const nn::Product& p) {
    nn::check_cublas(cublasLtMatmulDescCreate(&description, CUBLAS_COMPUTE_32F, CUDA_R_32F),
                     "cublasLtMatmulDescCreate");
    set_transposed(CUBLASLT_MATMUL_DESC_TRANSA, p.a.transposed);
    set_transposed(CUBLASLT_MATMUL_DESC_TRANSB, p.b.transposed);
    a = layout(CUDA_R_16BF, p.a.transposed ? p.inner : p.rows, p.a.transposed ? p.rows : p.inner, p.a.stride);
    b = layout(CUDA_R_16BF, p.b.transposed ? p.columns : p.inner, p.b.transposed ? p.inner : p.columns, p.b.stride);
    out = layout(nn::data_type(p.out_type), p.rows, p.columns, p.out_stride);
  }
  ~RowMajor() {
    for (const auto each : {a, b, out}) cublasLtMatrixLayoutDestroy(each);
    cublasLtMatmulDescDestroy(description);
  }
  RowMajor(const RowMajor&) = delete;
  RowMajor& operator=(const RowMajor&) = delete;

  cublasLtMatmulDesc_t description = nullptr;
  cublasLtMatrixLayout_t a = nullptr, b = nullptr, out = nullptr;

 private:
  void set_transposed(cublasLtMatmulDescAttributes_t which, bool transposed) {
    const cublasOperation_t operation = transposed ? CUBLAS_OP_T : CUBLAS_OP_N;
    nn::check_cublas(cublasLtMatmulDescSetAttribute(description, which, &operation, sizeof(operation)),
                     "cublasLtMatmulDescSetAttribute");
  }
  static cublasLtMatrixLayout_t layout(cudaDataType_t type, int64_t rows, int64_t columns, int64_t stride) {
    cublasLtMatrixLayout_t made = nullptr;
    const cublasLtOrder_t order = CUBLASLT_ORDER_ROW;
    nn::check_cublas(
        cublasLtMatrixLayoutCreate(&made, type, static_cast<uint64_t>(rows), static_cast<uint64_t>(columns), stride),
        "cublasLtMatrixLayoutCreate");
    nn::check_cublas(cublasLtMatrixLayoutSetAttribute(made, CUBLASLT_MATRIX_LAYOUT_ORDER, &order, sizeof(order)),
                     "cublasLtMatrixLayoutSetAttribute");
    return made;
  }
};

// A product as one of cuBLASLt's calls takes it.
struct Call {
  cublasLtMatmulDesc_t description;
  cublasLtMatrixLayout_t first, second, out;
  const void *first_data, *second_data;
};

struct Algorithm {
  cublasLtMatmulAlgo_t algorithm{};
  const Call* call = nullptr;
  size_t workspace_bytes = 0;
  float waves = 0;
  Json config;
  Json ranks = Json::object();  // search: place in its list, from 0
  double first_look_ms = 0;
  std::vector<double> block_ms;  // a call's time in every block; empty: not a finalist
  double joules = 0;             // a call's energy, mean of the blocks
  double differing = 0;          // share of the result's elements that have other bits than with the runtime's choice
  double ms() const {
    double sum = 0;
    for (const double each : block_ms) sum += each;
    return sum / static_cast<double>(block_ms.size());
  }
};

template <typename T>
T config(const cublasLtMatmulAlgo_t& algorithm, cublasLtMatmulAlgoConfigAttributes_t which) {
  T value{};
  size_t written = 0;
  nn::check_cublas(cublasLtMatmulAlgoConfigGetAttribute(&algorithm, which, &value, sizeof(value), &written),
                   "cublasLtMatmulAlgoConfigGetAttribute");
  return value;
}

Json describe(const cublasLtMatmulAlgo_t& a, bool row_major) {
  return {{"id", config<int32_t>(a, CUBLASLT_ALGO_CONFIG_ID)},
          {"tile", config<uint32_t>(a, CUBLASLT_ALGO_CONFIG_TILE_ID)},
          {"stages", config<uint32_t>(a, CUBLASLT_ALGO_CONFIG_STAGES_ID)},
          {"split_k", config<int32_t>(a, CUBLASLT_ALGO_CONFIG_SPLITK_NUM)},
          {"reduction", config<uint32_t>(a, CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME)},
          {"swizzle", config<uint32_t>(a, CUBLASLT_ALGO_CONFIG_CTA_SWIZZLING)},
          {"custom", config<uint32_t>(a, CUBLASLT_ALGO_CONFIG_CUSTOM_OPTION)},
          {"inner_shape", config<uint16_t>(a, CUBLASLT_ALGO_CONFIG_INNER_SHAPE_ID)},
          {"cluster", config<uint16_t>(a, CUBLASLT_ALGO_CONFIG_CLUSTER_SHAPE_ID)},
          {"row_major", row_major}};
}

struct Search {
  const char* name;
  size_t workspace_bytes;
  uint32_t alignment_bytes, reductions;
  bool row_major;
};

constexpr size_t kWorkspaceBytes = kCudaProductWorkspaceBytes;
const Search kSearches[] = {
    {"runtime", kWorkspaceBytes, nn::kAlignmentBytes, nn::kReductions, false},
    {"aligned_256", kWorkspaceBytes, 256, nn::kReductions, false},
    {"any_reduction", kWorkspaceBytes, nn::kAlignmentBytes, CUBLASLT_REDUCTION_SCHEME_MASK, false},
    {"workspace_64_mib", kLargeWorkspaceBytes / 2, nn::kAlignmentBytes, nn::kReductions, false},
    {"all_wider", kLargeWorkspaceBytes, 256, CUBLASLT_REDUCTION_SCHEME_MASK, false},
    {"row_major", kWorkspaceBytes, nn::kAlignmentBytes, nn::kReductions, true},
};

class Bench {
 public:
  explicit Bench(double limit_seconds)
      : limit_seconds_(limit_seconds), workspace_(nn::device_bytes(kLargeWorkspaceBytes, 0)) {
    nn::check_cublas(cublasLtCreate(&handle_), "cublasLtCreate");
    for (cudaEvent_t& event : events_) nn::check_cuda(cudaEventCreate(&event), "cudaEventCreate");
  }
  ~Bench() {
    for (const cudaEvent_t event : events_) cudaEventDestroy(event);
    cublasLtDestroy(handle_);
  }
  Bench(const Bench&) = delete;
  Bench& operator=(const Bench&) = delete;

  // Null when the time is over.
  Json measure(Case c) {
    if (seconds() > limit_seconds_) return nullptr;
    const std::vector<at::Tensor> memory = allocate(c);
    const nn::ProductDescriptors columns(c.product);
    const RowMajor rows(c.product);
    const nn::Product& p = c.product;
    // The library is column-major and computes the transposed product: its first factor is `b`.
    const Call by_columns{columns.description.get(), columns.b.get(), columns.a.get(),
                          columns.out.get(),         p.b.data,        p.a.data};
    const Call by_rows{rows.description, rows.a, rows.b, rows.out, p.a.data, p.b.data};
    std::vector<Algorithm> found = search(by_columns, by_rows);
    // A first call also loads the kernel.
    std::erase_if(found, [&](const Algorithm& each) { return run(c, each) != CUBLAS_STATUS_SUCCESS; });
    if (found.empty() || !found[0].ranks.contains("runtime")) {
      throw std::runtime_error("cuBLASLt has no algorithm for " + c.name);
    }
    if (!warm_) block(c, found[0], 1.0, 0);
    warm_ = true;
    for (Algorithm& each : found) each.first_look_ms = block(c, each, 0.1 * kFirstLookSeconds, kFirstLookSeconds);
    const std::vector<Algorithm*> finalists = choose(found);
    for (int round = 0; round < kRounds; ++round) {
      for (Algorithm* each : finalists) {
        each->block_ms.push_back(block(c, *each, kSettleSeconds, kBlockSeconds, &each->joules));
      }
    }
    compare(c, memory[2], finalists);
    return report(c, found, finalists);
  }

  double seconds() const { return std::chrono::duration<double>(Clock::now() - start_).count(); }
  double gain_ms() const { return gain_ms_; }
  double step_ms() const { return step_ms_; }

 private:
  // The algorithms of all searches, each once; the first is what the runtime takes.
  std::vector<Algorithm> search(const Call& by_columns, const Call& by_rows) {
    std::vector<Algorithm> found;
    std::map<std::string, size_t> known;
    for (const Search& search : kSearches) {
      const nn::Preference preference(search.workspace_bytes, search.alignment_bytes, search.reductions);
      const Call& call = search.row_major ? by_rows : by_columns;
      cublasLtMatmulHeuristicResult_t results[kAsked];
      int count = 0;
      // Layouts that the library does not take have no results.
      if (cublasLtMatmulAlgoGetHeuristic(handle_, call.description, call.first, call.second, call.out, call.out,
                                         preference.get(), kAsked, results, &count) != CUBLAS_STATUS_SUCCESS) {
        continue;
      }
      for (int rank = 0; rank < count; ++rank) {
        const cublasLtMatmulHeuristicResult_t& result = results[rank];
        if (result.state != CUBLAS_STATUS_SUCCESS) continue;
        Json text = describe(result.algo, search.row_major);
        const auto [at, is_new] = known.try_emplace(text.dump(), found.size());
        if (is_new) {
          Algorithm& added = found.emplace_back();
          added.algorithm = result.algo;
          added.call = &call;
          added.workspace_bytes = result.workspaceSize;
          added.waves = result.wavesCount;
          added.config = std::move(text);
        }
        found[at->second].ranks[search.name] = rank;
      }
    }
    return found;
  }

  cublasStatus_t run(const Case& c, const Algorithm& use) {
    const nn::Product& p = c.product;
    const float beta = p.add != nullptr ? 1.0f : 0.0f;
    const void* add = p.add != nullptr ? p.add : p.out;
    const Call& call = *use.call;
    return cublasLtMatmul(handle_, call.description, &p.alpha, call.first_data, call.first, call.second_data,
                          call.second, &beta, add, call.out, p.out, call.out, &use.algorithm, workspace_.data_ptr(),
                          kLargeWorkspaceBytes, nullptr);
  }

  // Milliseconds a call in a block of about `measured` seconds after `settle` seconds of the same; adds the energy of a
  // call over the rounds.
  double block(const Case& c, const Algorithm& use, double settle, double measured, double* joules = nullptr) {
    constexpr double kExpectedRate = 650e12;
    const auto calls = [&](double span) { return std::max(1, static_cast<int>(span * kExpectedRate / c.flops())); };
    const int warm_ups = calls(settle), count = calls(measured);
    for (int i = 0; i < warm_ups; ++i) nn::check_cublas(run(c, use), "cublasLtMatmul");
    nn::check_cuda(cudaEventRecord(events_[0], nullptr), "cudaEventRecord");
    for (int i = 0; i < count; ++i) nn::check_cublas(run(c, use), "cublasLtMatmul");
    nn::check_cuda(cudaEventRecord(events_[1], nullptr), "cudaEventRecord");
    nn::check_cuda(cudaEventSynchronize(events_[0]), "cudaEventSynchronize");
    const double before = energy_.joules();
    nn::check_cuda(cudaEventSynchronize(events_[1]), "cudaEventSynchronize");
    if (joules != nullptr) *joules += (energy_.joules() - before) / count / kRounds;
    float milliseconds = 0;
    nn::check_cuda(cudaEventElapsedTime(&milliseconds, events_[0], events_[1]), "cudaEventElapsedTime");
    return milliseconds / count;
  }

  // What the runtime takes, the fastest three at first look, and the first of every search that is about as fast.
  std::vector<Algorithm*> choose(std::vector<Algorithm>& found) {
    std::vector<Algorithm*> by_time;
    for (Algorithm& each : found) by_time.push_back(&each);
    std::ranges::stable_sort(by_time, {}, [](const Algorithm* each) { return each->first_look_ms; });
    std::vector<Algorithm*> chosen;
    for (Algorithm& each : found) {
      const bool first = std::ranges::any_of(each.ranks, [](const Json& rank) { return rank == 0; }) &&
                         (&each == &found[0] || each.first_look_ms < 1.02 * found[0].first_look_ms);
      const auto fast_end = by_time.begin() + std::min<ptrdiff_t>(3, std::ssize(by_time));
      if (first || std::find(by_time.begin(), fast_end, &each) != fast_end) chosen.push_back(&each);
    }
    return chosen;
  }

  void compare(const Case& c, const at::Tensor& out, const std::vector<Algorithm*>& finalists) {
    at::Tensor expected;
    for (Algorithm* each : finalists) {
      out.zero_();
      nn::check_cublas(run(c, *each), "cublasLtMatmul");
      if (!expected.defined()) {
        expected = out.clone();
      } else {
        each->differing = out.ne(expected).sum().item<double>() / static_cast<double>(out.numel());
      }
    }
  }

  Json report(const Case& c, const std::vector<Algorithm>& found, const std::vector<Algorithm*>& finalists) {
    const auto rate = [&](double ms) { return std::round(c.flops() / ms / 1e8) / 10; };
    const auto rounded = [](double value) { return std::round(value * 1e4) / 1e4; };
    Json algorithms = Json::array();
    for (const Algorithm& each : found) {
      Json entry{{"config", each.config},
                 {"ranks", each.ranks},
                 {"workspace_bytes", each.workspace_bytes},
                 {"waves", rounded(each.waves)},
                 {"first_look_tflop_s", rate(each.first_look_ms)}};
      if (!each.block_ms.empty()) {
        Json blocks = Json::array();
        for (const double ms : each.block_ms) blocks.push_back(rate(ms));
        entry.update({{"tflop_s", rate(each.ms())},
                      {"blocks_tflop_s", blocks},
                      {"ms", rounded(each.ms())},
                      {"joules", rounded(each.joules)},
                      {"differing_share", each.differing}});
      }
      algorithms.push_back(entry);
    }
    const Algorithm& best = *std::ranges::min(finalists, {}, [](const Algorithm* each) { return each->ms(); });
    const double gain = c.per_step * (found[0].ms() - best.ms());
    gain_ms_ += gain;
    step_ms_ += c.per_step * found[0].ms();
    std::fprintf(stderr, "%-34s first %6.1f best %6.1f TFLOP/s of %2zu, gain %5.2f ms a step, ranks %s (%.0f s)\n",
                 c.name.c_str(), rate(found[0].ms()), rate(best.ms()), found.size(), gain, best.ranks.dump().c_str(),
                 seconds());
    return {{"per_step", c.per_step},
            {"rows", c.product.rows},
            {"columns", c.product.columns},
            {"inner", c.product.inner},
            {"first_ms", rounded(found[0].ms())},
            {"best_ms", rounded(best.ms())},
            {"gain_ms_per_step", rounded(gain)},
            {"algorithms", algorithms}};
  }

  double limit_seconds_;
  Clock::time_point start_ = Clock::now();
  at::Tensor workspace_;
  cublasLtHandle_t handle_ = nullptr;
  cudaEvent_t events_[2] = {};
  EnergyMeter energy_;
  bool warm_ = false;
  double gain_ms_ = 0, step_ms_ = 0;
};

int run(double limit_seconds) {
  const c10::InferenceMode no_autograd;
  Bench bench(limit_seconds);
  Json products = Json::object(), skipped = Json::array();
  for (const Case& c : cases()) {
    Json entry = bench.measure(c);
    if (entry.is_null()) {
      skipped.push_back(c.name);
    } else {
      products[c.name] = std::move(entry);
    }
  }
  const Json all{{"cublaslt_version", cublasLtGetVersion()},
                 {"step_ms", bench.step_ms()},
                 {"gain_ms_per_step", bench.gain_ms()},
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
