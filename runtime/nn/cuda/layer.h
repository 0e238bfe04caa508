// One decoder layer on the GPU, forward and backward, over a unit's flat weight and gradient slots.
#pragma once

#include <cstdint>

#include "model/base/types.h"
#include "model/cost/activations.h"
#include "model/spec/layout.h"
#include "model/spec/model_spec.h"
#include "runtime/nn/compute.h"
#include "runtime/nn/cuda/attention.h"
#include "runtime/nn/cuda/context.h"
#include "runtime/nn/kernels/qk_rope.h"

namespace slidedp::nn {

// cos and sin in device memory; see Rotation.
struct CudaRopeTable {
  const float* cos = nullptr;
  const float* sin = nullptr;
  int64_t positions = 0;
};

// What both passes need; cheap to make, borrows everything.
class CudaLayer {
 public:
  CudaLayer(const CudaContext& context, CudaAttention& attention, const ModelSpec& model, const UnitLayout& unit,
            ActivationPolicy policy, const CudaRopeTable& table, const MicroBatch& batch, const void* weights,
            const void* hidden_in, void* saved);

  // Fills the saved area; hidden_out [tokens, hidden] may be null.
  void forward(uint16_t* hidden_out) const;
  // hidden_gradient: in = of the output, out = of the input. Overwrites the saved area.
  void backward(uint16_t* hidden_gradient, const CudaGradientSlot& slot) const;

 private:
  // The block "projection of a norm": output = rms_norm(x) * matrix^T + bias.
  struct NormedProjection {
    TensorRole norm, matrix, bias;
    bool has_bias;
    int64_t outputs;
    const uint16_t* x;
    float* saved_rstd;       // null: not saved
    uint16_t* saved_normed;  // saved with 1/rms
    uint16_t* output;        // backward: its gradient
  };
  // A tensor in the saved area, or in a temporary where the policy does not save it.
  struct Place {
    at::Tensor temporary;
    uint16_t* data;
  };
  // Queries and keys after QK-norm and RoPE, and QK-norm's 1/rms; they live in the saved area or in temporaries.
  struct RotatedHeads {
    at::Tensor heads_temporary, rstd_temporary;
    uint16_t* heads;
    float* rstd;  // null without QK-norm
    int64_t stride;
  };

  const uint16_t* weight(TensorRole role) const { return weights_ + unit_.at(role).offset; }
  int64_t offset(TensorRole role) const { return unit_.at(role).offset; }
  NormedProjection qkv_block() const;
  NormedProjection gate_up_block() const;
  HeadShape head_shape() const;
  Rotation rotation() const;
  HeadNorm head_norm() const;
  AttentionInputs attention_inputs(const RotatedHeads& heads) const;

  Place saved_or_temporary(uint16_t* saved, int64_t elements) const;
  // Where the rotated heads go: `place`, or a temporary if it is null.
  RotatedHeads rotate(uint16_t* place) const;
  RotatedHeads rotated_for_backward() const;

  void project(const NormedProjection& block) const;
  // out = residual + input * matrix^T + bias
  void project_onto(const uint16_t* input, int64_t inputs, TensorRole matrix, TensorRole bias, bool has_bias,
                    const uint16_t* residual, uint16_t* out) const;
  void backward_block(const NormedProjection& block, uint16_t* hidden_gradient, const CudaGradientSlot& slot) const;
  void backward_down(const uint16_t* hidden_gradient, const CudaGradientSlot& slot) const;
  void backward_output(const uint16_t* hidden_gradient, const CudaGradientSlot& slot) const;
  void backward_attention(const CudaGradientSlot& slot) const;

  const CudaContext& context_;
  CudaAttention& attention_;
  const ModelSpec& model_;
  const UnitLayout& unit_;
  const CudaRopeTable& table_;
  const MicroBatch& batch_;
  const uint16_t* weights_;          // the unit's flat vector
  const uint16_t* input_;            // [tokens, hidden]
  int64_t tokens_, queries_, keys_;  // queries = heads * head_dim, keys = kv_heads * head_dim

  // The saved tensors (SavedLayout); null: not saved.
  uint16_t *normed_input_, *qkv_, *qk_rotated_, *attention_out_, *residual_, *normed_residual_, *gate_up_, *activation_;
  float *input_rstd_, *qk_rstd_, *log_sum_exp_, *residual_rstd_;
};

}  // namespace slidedp::nn
