// Causal attention inside documents on the GPU, grouped KV heads, bf16. Three ways to compute it: cuDNN where every row
// is one document, flash with variable lengths for packed rows, and plain tiled matrix products, which give the same
// bits every time and take any head size.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "model/spec/model_spec.h"
#include "model/spec/plan.h"
#include "runtime/nn/compute.h"
#include "runtime/nn/cuda/context.h"
#include "runtime/nn/cuda/cudnn_attention.h"

namespace slidedp::nn {

enum class AttentionBackend : uint8_t { cudnn, flash, tiled };
std::string_view name(AttentionBackend);

// One row a token; `stride` elements between tokens, the heads of one token dense. Borrowed memory.
struct HeadView {
  const uint16_t* data = nullptr;
  int64_t stride = 0;
};
struct AttentionInputs {
  HeadView query, key, value;
};
// Dense [tokens, heads * head_dim].
struct AttentionGradients {
  at::Tensor query, key, value;
};

class CudaAttention {
 public:
  // Which backend a kind of batch uses, and what was measured.
  struct Choice {
    AttentionBackend one_document_rows = AttentionBackend::tiled;
    AttentionBackend packed_rows = AttentionBackend::tiled;
    std::string report;  // for the log
  };
  // Times forward and backward at the plan's shapes; a backend that refuses them is left out. Takes memory of the
  // caching allocator, which the caller returns.
  static Choice measure(const ModelSpec& model, const Plan& plan, const CudaContext& context);
  static Choice deterministic();

  CudaAttention(const ModelSpec& model, Choice choice);

  // out: dense [tokens, heads * head_dim]. log_sum_exp: heads * tokens floats, for the same batch's backward only.
  void forward(const CudaContext& context, const MicroBatch& batch, const AttentionInputs& inputs, uint16_t* out,
               float* log_sum_exp);
  AttentionGradients backward(const CudaContext& context, const MicroBatch& batch, const AttentionInputs& inputs,
                              const uint16_t* out, const float* log_sum_exp, const uint16_t* out_gradient);

  const std::string& report() const { return choice_.report; }
  // Why cuDNN's results had to be copied, if they had to.
  const std::string& copy_reason() const { return cudnn_.refusal(); }

 private:
  // Consecutive documents that one call of the flash kernels handles.
  struct Group {
    int64_t begin = 0, end = 0;  // tokens
    int64_t longest = 0;
    at::Tensor starts;  // int32 on the device, from 0, with the end
  };
  struct Documents {
    std::vector<int32_t> starts;
    int64_t tokens = 0;
    std::vector<Group> groups;
  };

  AttentionBackend backend(const MicroBatch& batch) const;
  CudnnShape cudnn_shape(const MicroBatch& batch, const AttentionInputs& inputs) const;
  const std::vector<Group>& groups(const CudaContext& context, const MicroBatch& batch);

  void forward_cudnn(const CudaContext& context, const MicroBatch& batch, const AttentionInputs& inputs, uint16_t* out,
                     float* log_sum_exp);
  AttentionGradients backward_cudnn(const CudaContext& context, const MicroBatch& batch, const AttentionInputs& inputs,
                                    const uint16_t* out, const float* log_sum_exp, const uint16_t* out_gradient);
  void forward_flash(const CudaContext& context, const MicroBatch& batch, const AttentionInputs& inputs, uint16_t* out,
                     float* log_sum_exp);
  AttentionGradients backward_flash(const CudaContext& context, const MicroBatch& batch, const AttentionInputs& inputs,
                                    const uint16_t* out, const float* log_sum_exp, const uint16_t* out_gradient);

  int64_t heads_, kv_heads_, head_dim_;
  Choice choice_;
  std::vector<Documents> known_;  // the step's batches: every layer sees the same ones
  size_t next_known_ = 0;
  CudnnAttention cudnn_;
  // As ATen's cuDNN forward returned them: [rows, heads, seq], or with a last dimension of 1; its backward wants the
  // same.
  int64_t cudnn_statistics_dims_ = 0;
};

// attention_tiled.cpp. `heads`, `kv_heads`, `head_dim` of the model; documents as in MicroBatch.
struct TiledAttention {
  int64_t heads = 0, kv_heads = 0, head_dim = 0;
  int64_t tokens = 0;
  std::span<const int32_t> document_starts;

  // log_sum_exp: [heads, tokens].
  void forward(const CudaContext& context, const AttentionInputs& inputs, uint16_t* out, float* log_sum_exp) const;
  AttentionGradients backward(const CudaContext& context, const AttentionInputs& inputs, const uint16_t* out,
                              const float* log_sum_exp, const uint16_t* out_gradient) const;
};

}  // namespace slidedp::nn
