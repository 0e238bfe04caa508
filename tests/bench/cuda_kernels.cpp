// Rates of the CUDA decoder's parts at Qwen3-4B shapes, 8 x 4096 tokens, on random data: GB/s of each fused kernel
// (bytes that must move, over the median time), TFLOP/s of the matrix products and of attention. One JSON object on
// standard output; under a minute.
#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <functional>
#include <string>
#include <vector>

#include "model/cost/activations.h"
#include "runtime/nn/cuda/attention.h"
#include "runtime/nn/cuda/context.h"
#include "runtime/nn/kernels/column_sums.h"
#include "runtime/nn/kernels/convert.h"
#include "runtime/nn/kernels/cross_entropy.h"
#include "runtime/nn/kernels/embedding.h"
#include "runtime/nn/kernels/qk_rope.h"
#include "runtime/nn/kernels/rms_norm.h"
#include "runtime/nn/kernels/swiglu.h"

namespace slidedp {
namespace {

constexpr int64_t kRows = 8, kSeq = 4096, kTokens = kRows * kSeq;
constexpr int64_t kHidden = 2560, kHeads = 32, kKvHeads = 8, kDim = 128, kIntermediate = 9728, kVocabulary = 151936;
constexpr int64_t kQueries = kHeads * kDim, kKeys = kKvHeads * kDim, kQkv = kQueries + 2 * kKeys;
constexpr int64_t kChunk = 4096;  // tokens whose logits exist at once
constexpr int kWarmUps = 3, kRepeats = 20;

at::Tensor random(int64_t elements) {
  return at::randn({elements}, at::TensorOptions().dtype(at::kBFloat16).device(at::kCUDA));
}

at::Tensor empty_fp32(int64_t elements) {
  return at::empty({elements}, at::TensorOptions().dtype(at::kFloat).device(at::kCUDA));
}

double median_seconds(const std::function<void()>& work) {
  cudaEvent_t begin, end;
  nn::check_cuda(cudaEventCreate(&begin), "cudaEventCreate");
  nn::check_cuda(cudaEventCreate(&end), "cudaEventCreate");
  std::vector<float> times;
  for (int i = 0; i < kWarmUps + kRepeats; ++i) {
    nn::check_cuda(cudaEventRecord(begin, nullptr), "cudaEventRecord");
    work();
    nn::check_cuda(cudaEventRecord(end, nullptr), "cudaEventRecord");
    nn::check_cuda(cudaEventSynchronize(end), "cudaEventSynchronize");
    float milliseconds = 0;
    nn::check_cuda(cudaEventElapsedTime(&milliseconds, begin, end), "cudaEventElapsedTime");
    if (i >= kWarmUps) times.push_back(milliseconds);
  }
  cudaEventDestroy(begin);
  cudaEventDestroy(end);
  std::ranges::sort(times);
  return times[times.size() / 2] * 1e-3;
}

// Collects the entries of the JSON object.
class Report {
 public:
  void kernel(const char* name, double bytes, const std::function<void()>& work) {
    add(name, "gb_s", bytes, 1e9, work);
  }
  void product(const char* name, double flops, const std::function<void()>& work) {
    add(name, "tflop_s", flops, 1e12, work);
  }
  void print() const { std::printf("{%s\n}\n", entries_.c_str()); }

 private:
  void add(const char* name, const char* unit, double amount, double scale, const std::function<void()>& work) {
    const double seconds = median_seconds(work);
    char text[160];
    std::snprintf(text, sizeof(text), "%s\n  \"%s\": {\"ms\": %.4f, \"%s\": %.1f}", entries_.empty() ? "" : ",", name,
                  seconds * 1e3, unit, amount / seconds / scale);
    entries_ += text;
  }
  std::string entries_;
};

void norms(Report& report) {
  const at::Tensor x = random(kTokens * kHidden), weight = random(kHidden), slope = random(kTokens * kHidden);
  const at::Tensor out = random(kTokens * kHidden), rstd = empty_fp32(kTokens);
  const int64_t parts = nn::rms_norm_partial_rows(kTokens, kHidden);
  const at::Tensor partials = empty_fp32(parts * kHidden), sum = empty_fp32(kHidden);
  const double row_bytes = 2.0 * kTokens * kHidden;
  report.kernel("hbm_copy", 2 * row_bytes, [&] {
    nn::check_cuda(cudaMemcpyAsync(out.data_ptr(), x.data_ptr(), x.nbytes(), cudaMemcpyDeviceToDevice, nullptr),
                   "cudaMemcpyAsync");
  });
  report.kernel("rms_norm", 2 * row_bytes, [&] {
    nn::rms_norm(nn::bf16_data(x), nn::bf16_data(weight), 1e-6f, kTokens, kHidden, nn::fp32_data(rstd),
                 nn::bf16_data(out), nullptr);
  });
  report.kernel("rms_norm_backward", 4 * row_bytes, [&] {
    nn::rms_norm_backward(nn::bf16_data(x), nn::bf16_data(weight), nn::fp32_data(rstd), nn::bf16_data(slope), kTokens,
                          kHidden, nn::bf16_data(out), true, nn::fp32_data(partials), false, nullptr);
  });
  report.kernel("norm_weight_sums", 4.0 * parts * kHidden, [&] {
    nn::store_column_sums(nn::fp32_data(partials), parts, kHidden, kHidden, {sum.data_ptr(), true, true}, nullptr);
  });
}

void heads(Report& report) {
  const at::Tensor qkv = random(kTokens * kQkv), rotated = random(kTokens * (kQueries + kKeys));
  const at::Tensor weight = random(kDim), slope = random(kTokens * kQkv);
  const at::Tensor rstd = empty_fp32(kTokens * (kHeads + kKvHeads)), table = at::rand_like(empty_fp32(kSeq * kDim));
  const at::Tensor positions = at::arange(kSeq, at::TensorOptions().dtype(at::kInt).device(at::kCUDA)).repeat({kRows});
  const at::Tensor partials = empty_fp32(nn::qk_rope_partial_rows() * 2 * kDim);
  const nn::HeadShape shape{kTokens, kHeads, kKvHeads, kDim};
  const float* cos = nn::fp32_data(table);
  const nn::Rotation rotation{positions.const_data_ptr<int32_t>(), cos, cos + kSeq * kDim / 2, kSeq};
  const nn::HeadNorm norm{nn::bf16_data(weight), nn::bf16_data(weight), 1e-6f};
  const nn::HeadGradients slopes{nn::bf16_data(slope), nn::bf16_data(slope) + kTokens * kQueries,
                                 nn::bf16_data(slope) + kTokens * (kQueries + kKeys)};
  const double rotated_bytes = 2.0 * kTokens * (kQueries + kKeys), all_bytes = 2.0 * kTokens * kQkv;
  for (const bool with_norm : {true, false}) {
    const nn::HeadNorm use = with_norm ? norm : nn::HeadNorm{};
    report.kernel(with_norm ? "qk_norm_rope" : "rope", 2 * rotated_bytes, [&] {
      nn::qk_rope(shape, rotation, use, nn::bf16_data(qkv), kQkv, nn::bf16_data(rotated), kQueries + kKeys,
                  with_norm ? nn::fp32_data(rstd) : nullptr, nullptr);
    });
  }
  for (const bool with_norm : {true, false}) {
    const nn::HeadNorm use = with_norm ? norm : nn::HeadNorm{};
    report.kernel(with_norm ? "qk_norm_rope_backward" : "rope_backward",
                  2 * all_bytes + (with_norm ? rotated_bytes : 0), [&] {
                    nn::qk_rope_backward(shape, rotation, use, nn::fp32_data(rstd), slopes, nn::bf16_data(qkv),
                                         with_norm ? nn::fp32_data(partials) : nullptr, nullptr);
                  });
  }
}

void mlp(Report& report) {
  const at::Tensor gate_up = random(kTokens * 2 * kIntermediate), slope = random(kTokens * kIntermediate);
  const double bytes = 2.0 * kTokens * kIntermediate;
  report.kernel("swiglu", 3 * bytes,
                [&] { nn::swiglu(nn::bf16_data(gate_up), kTokens, kIntermediate, nn::bf16_data(slope), nullptr); });
  for (const bool form_activation : {false, true}) {
    report.kernel(form_activation ? "swiglu_backward_forming" : "swiglu_backward", (form_activation ? 6 : 5) * bytes,
                  [&] {
                    nn::swiglu_backward(nn::bf16_data(gate_up), kTokens, kIntermediate, nn::bf16_data(slope),
                                        form_activation, nullptr);
                  });
  }
}

void ends(Report& report) {
  const at::Tensor table = random(kVocabulary * kHidden), hidden = random(kTokens * kHidden);
  // Frequent and rare tokens, as in text: the k-th with a probability like 1/k.
  const at::Tensor ids = at::pow(static_cast<double>(kVocabulary),
                                 at::rand({kTokens}, at::TensorOptions().dtype(at::kDouble).device(at::kCUDA)))
                             .sub(1)
                             .to(at::kInt);
  const at::Tensor scratch = at::empty({nn::embedding_scratch_bytes(kTokens, kHidden)},
                                       at::TensorOptions().dtype(at::kByte).device(at::kCUDA));
  const double row_bytes = 2.0 * kTokens * kHidden, table_bytes = 2.0 * kVocabulary * kHidden;
  report.kernel("embedding_gather", 2 * row_bytes, [&] {
    nn::embedding_gather(nn::bf16_data(table), ids.const_data_ptr<int32_t>(), kTokens, kHidden, kVocabulary,
                         nn::bf16_data(hidden), nullptr);
  });
  report.kernel("embedding_scatter_bf16", row_bytes + table_bytes, [&] {
    nn::embedding_scatter(ids.const_data_ptr<int32_t>(), kTokens, kHidden, nn::bf16_data(hidden), kVocabulary,
                          {table.data_ptr(), false, true}, scratch.data_ptr(), nullptr);
  });
  const at::Tensor logits = random(kChunk * kVocabulary);
  const at::Tensor losses = at::empty({kChunk}, at::TensorOptions().dtype(at::kDouble).device(at::kCUDA));
  report.kernel("cross_entropy_chunk", 3.0 * 2 * kChunk * kVocabulary, [&] {
    nn::cross_entropy(nn::bf16_data(logits), ids.const_data_ptr<int32_t>(), kChunk, kVocabulary, kVocabulary,
                      losses.data_ptr<double>(), nullptr);
  });
}

void conversions(Report& report) {
  const int64_t elements = int64_t{1} << 28;
  const at::Tensor narrow = random(elements), wide = empty_fp32(elements);
  report.kernel("widen_to_fp32", 6.0 * elements,
                [&] { nn::widen_to_fp32(nn::bf16_data(narrow), nn::fp32_data(wide), elements, nullptr); });
  report.kernel("narrow_to_bf16", 6.0 * elements,
                [&] { nn::narrow_to_bf16(nn::fp32_data(wide), nn::bf16_data(narrow), elements, nullptr); });
  report.kernel("accumulate_bf16", 10.0 * elements,
                [&] { nn::accumulate_bf16(nn::bf16_data(narrow), nn::fp32_data(wide), false, elements, nullptr); });
  const at::Tensor sums = at::empty({elements / 64}, at::TensorOptions().dtype(at::kDouble).device(at::kCUDA));
  report.kernel("square_sums_fp32", 4.0 * elements,
                [&] { nn::square_sums_fp32(nn::fp32_data(wide), elements, sums.data_ptr<double>(), nullptr); });
}

// Forward, gradient of the input, and gradient of the weights added into an fp32 and into a bf16 slot.
void products(Report& report, const nn::CudaContext& context) {
  struct Shape {
    const char* name;
    int64_t inputs, outputs;
    bool residual;
  };
  for (const Shape& s :
       {Shape{"qkv", kHidden, kQkv, false}, Shape{"o", kQueries, kHidden, true},
        Shape{"gate_up", kHidden, 2 * kIntermediate, false}, Shape{"down", kIntermediate, kHidden, true}}) {
    const at::Tensor input = random(kTokens * s.inputs), output = random(kTokens * s.outputs);
    const at::Tensor residual = random(kTokens * s.outputs), weight = random(s.inputs * s.outputs).mul_(0.02);
    const at::Tensor slot = at::zeros_like(empty_fp32(s.inputs * s.outputs)), narrow_slot = at::zeros_like(weight);
    const double flops = 2.0 * kTokens * s.inputs * s.outputs;
    const std::string name = s.name;
    report.product((name + "_forward").c_str(), flops, [&] {
      context.multiply({.rows = kTokens,
                        .columns = s.outputs,
                        .inner = s.inputs,
                        .a = {.data = input.data_ptr(), .stride = s.inputs},
                        .b = {.data = weight.data_ptr(), .stride = s.inputs, .transposed = true},
                        .out = output.data_ptr(),
                        .out_stride = s.outputs,
                        .add = s.residual ? residual.data_ptr() : nullptr});
    });
    report.product((name + "_input_gradient").c_str(), flops, [&] {
      nn::input_gradient(context, nn::bf16_data(output), s.outputs, nn::bf16_data(weight), s.inputs, kTokens,
                         nn::bf16_data(input));
    });
    for (const bool fp32 : {true, false}) {
      const nn::CudaGradientSlot gradients{fp32 ? slot.data_ptr() : narrow_slot.data_ptr(),
                                           fp32 ? DType::fp32 : DType::bf16, /*first=*/false};
      report.product((name + (fp32 ? "_weight_gradient_fp32" : "_weight_gradient_bf16")).c_str(), flops, [&] {
        nn::weight_gradient(context, gradients, 0, nn::bf16_data(residual), s.outputs, nn::bf16_data(input), s.inputs,
                            kTokens);
      });
    }
  }
  const at::Tensor hidden = random(kChunk * kHidden), vocabulary = random(kVocabulary * kHidden).mul_(0.02);
  const at::Tensor logits = random(kChunk * kVocabulary), sum = at::zeros_like(empty_fp32(kVocabulary * kHidden));
  const double flops = 2.0 * kChunk * kVocabulary * kHidden;
  report.product("logits_chunk", flops, [&] {
    context.multiply({.rows = kChunk,
                      .columns = kVocabulary,
                      .inner = kHidden,
                      .a = {.data = hidden.data_ptr(), .stride = kHidden},
                      .b = {.data = vocabulary.data_ptr(), .stride = kHidden, .transposed = true},
                      .out = logits.data_ptr(),
                      .out_stride = kVocabulary});
  });
  report.product("vocabulary_gradient_chunk", flops, [&] {
    nn::weight_gradient(context, {sum.data_ptr(), DType::fp32, false}, 0, nn::bf16_data(logits), kVocabulary,
                        nn::bf16_data(hidden), kHidden, kChunk);
  });
}

void attention(Report& report, const nn::CudaContext& context) {
  ModelSpec model;
  model.heads = kHeads;
  model.kv_heads = kKvHeads;
  model.head_dim = kDim;
  const at::Tensor qkv = random(kTokens * kQkv), slope = random(kTokens * kQueries), out = random(kTokens * kQueries);
  const at::Tensor log_sum_exp = empty_fp32(kTokens * kHeads);
  const uint16_t* data = nn::bf16_data(qkv);
  const nn::AttentionInputs inputs{{data, kQkv}, {data + kQueries, kQkv}, {data + kQueries + kKeys, kQkv}};
  for (const int64_t documents : {1, 4}) {
    std::vector<int32_t> starts;
    for (int64_t i = 0; i < kRows * documents; ++i) starts.push_back(static_cast<int32_t>(i * kSeq / documents));
    MicroBatch batch;
    batch.rows = kRows;
    batch.seq = kSeq;
    batch.document_starts = starts;
    const double length = static_cast<double>(kSeq / documents);
    const double flops = 2 * 2 * kTokens * length / 2 * kQueries;
    for (const nn::AttentionBackend backend : {nn::AttentionBackend::cudnn, nn::AttentionBackend::flash}) {
      if (documents > 1 && backend == nn::AttentionBackend::cudnn) continue;
      nn::CudaAttention use(model, {backend, backend, {}});
      const std::string name = std::string(nn::name(backend)) + (documents > 1 ? "_packed" : "");
      report.product((name + "_forward").c_str(), flops,
                     [&] { use.forward(context, batch, inputs, nn::bf16_data(out), nn::fp32_data(log_sum_exp)); });
      report.product((name + "_backward").c_str(), 2.5 * flops, [&] {
        use.backward(context, batch, inputs, nn::bf16_data(out), nn::fp32_data(log_sum_exp), nn::bf16_data(slope));
      });
    }
  }
}

int run() {
  const c10::InferenceMode no_autograd;
  Report report;
  norms(report);
  heads(report);
  mlp(report);
  ends(report);
  conversions(report);
  const at::Tensor workspace = nn::device_bytes(kCudaProductWorkspaceBytes, 0);
  nn::Gemm gemm(workspace.data_ptr(), kCudaProductWorkspaceBytes);
  const nn::CudaContext context{0, nullptr, gemm};
  products(report, context);
  attention(report, context);
  report.print();
  return 0;
}

}  // namespace
}  // namespace slidedp

int main() {
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess || count == 0) {
    std::fprintf(stderr, "cuda_kernels_bench: error: This process sees no GPU.\n");
    return 1;
  }
  return slidedp::run();
}
