// Which attention backend is used: measured at start-up on random data.
#include <ATen/ops/randn.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdio>
#include <map>
#include <optional>
#include <vector>

#include "runtime/nn/cuda/attention.h"

namespace slidedp::nn {
namespace {

constexpr int kWarmUps = 2, kRepeats = 5;

// Forward and backward of one layer's attention on random data.
class Trial {
 public:
  Trial(const ModelSpec& model, int64_t rows, int64_t seq, int64_t documents_per_row, const CudaContext& context)
      : model_(model), context_(context) {
    const int64_t queries = model.heads * model.head_dim, keys = model.kv_heads * model.head_dim;
    const int64_t tokens = rows * seq, stride = queries + 2 * keys;
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t i = 0; i < documents_per_row; ++i) {
        starts_.push_back(static_cast<int32_t>(row * seq + i * (seq / documents_per_row)));
      }
    }
    batch_.rows = rows;
    batch_.seq = seq;
    batch_.document_starts = starts_;
    const auto options = context.bf16(0).options();
    qkv_ = at::randn({tokens * stride}, options);
    slope_ = at::randn({tokens * queries}, options);
    out_ = context.bf16(tokens * queries);
    log_sum_exp_ = context.fp32(tokens * model.heads);
    const uint16_t* data = bf16_data(qkv_);
    inputs_ = {{data, stride}, {data + queries, stride}, {data + queries + keys, stride}};
  }

  // Milliseconds of forward and backward together; nothing if the backend refuses the shapes. `note`: its reason, or
  // why its results are copied.
  std::optional<float> run(AttentionBackend backend, std::string& note) const {
    CudaAttention attention(model_, {backend, backend, {}});
    try {
      std::vector<float> times;
      for (int i = 0; i < kWarmUps + kRepeats; ++i) {
        const float time = once(attention);
        if (i >= kWarmUps) times.push_back(time);
      }
      std::ranges::sort(times);
      if (!attention.copy_reason().empty()) note = "through ATen, with copies: " + attention.copy_reason();
      return times[times.size() / 2];
    } catch (const c10::Error& error) {
      note = error.what_without_backtrace();
      return std::nullopt;
    }
  }

 private:
  struct Event {
    Event() { check_cuda(cudaEventCreate(&event), "cudaEventCreate"); }
    ~Event() { cudaEventDestroy(event); }
    Event(const Event&) = delete;
    Event& operator=(const Event&) = delete;
    cudaEvent_t event = nullptr;
  };

  float once(CudaAttention& attention) const {
    const Event begin, end;
    check_cuda(cudaEventRecord(begin.event, context_.stream), "cudaEventRecord");
    attention.forward(context_, batch_, inputs_, bf16_data(out_), fp32_data(log_sum_exp_));
    attention.backward(context_, batch_, inputs_, bf16_data(out_), fp32_data(log_sum_exp_), bf16_data(slope_));
    check_cuda(cudaEventRecord(end.event, context_.stream), "cudaEventRecord");
    check_cuda(cudaEventSynchronize(end.event), "cudaEventSynchronize");
    float milliseconds = 0;
    check_cuda(cudaEventElapsedTime(&milliseconds, begin.event, end.event), "cudaEventElapsedTime");
    return milliseconds;
  }

  const ModelSpec& model_;
  const CudaContext& context_;
  std::vector<int32_t> starts_;
  MicroBatch batch_;
  at::Tensor qkv_, slope_, out_, log_sum_exp_;
  AttentionInputs inputs_;
};

// The fastest of the candidates; the tiled products take what all others refuse.
AttentionBackend fastest(const Trial& trial, const std::vector<AttentionBackend>& candidates, std::string& report) {
  AttentionBackend best = AttentionBackend::tiled;
  std::optional<float> best_time;
  std::string details;
  for (const AttentionBackend candidate : candidates) {
    std::string note;
    const std::optional<float> time = trial.run(candidate, note);
    char text[64];
    std::snprintf(text, sizeof(text), "%.3f ms", time.value_or(0.0f));
    details += (details.empty() ? "" : ", ") + std::string(name(candidate)) + " " + (time ? text : "refused");
    if (!note.empty()) details += " (" + note.substr(0, note.find('\n')) + ")";
    if (time && (!best_time || *time < *best_time)) best = candidate, best_time = time;
  }
  report += std::string(name(best)) + " (" + details + ")";
  return best;
}

}  // namespace

CudaAttention::Choice CudaAttention::measure(const ModelSpec& model, const Plan& plan, const CudaContext& context) {
  // Two rows show which is faster, in a quarter of the memory of a large micro-batch.
  const int64_t rows = std::min<int64_t>(plan.micro_batch_rows, 2);
  Choice choice;
  choice.report = "rows with one document: ";
  choice.one_document_rows = fastest(Trial(model, rows, plan.seq, 1, context),
                                     {AttentionBackend::cudnn, AttentionBackend::flash}, choice.report);
  choice.report += "; packed rows: ";
  const int64_t documents = std::min<int64_t>(plan.seq, 4);
  choice.packed_rows =
      fastest(Trial(model, rows, plan.seq, documents, context), {AttentionBackend::flash}, choice.report);
  choice.report += "; forward and backward of " + std::to_string(rows) + " rows of " + std::to_string(plan.seq);
  return choice;
}

}  // namespace slidedp::nn
