// The decoder's forward in double precision, written in plain tensor operations; gradients by ATen's autograd. Shares
// no code with runtime/nn.
#pragma once

#include <ATen/core/Tensor.h>

#include <map>

#include "model/spec/layout.h"
#include "model/spec/model_spec.h"
#include "tests/runtime/nn/fixture.h"

namespace slidedp::reference {

using Weights = std::map<TensorRole, at::Tensor>;  // leaves that require gradients

at::Tensor leaf(std::span<const float> values, at::IntArrayRef shape);
Weights load_weights(const UnitLayout& unit, const Slot<uint16_t>& weights);
std::vector<double> values(const at::Tensor& tensor);

at::Tensor layer(const ModelSpec& model, const Weights& weights, const TestBatch& batch, const at::Tensor& input);
// Fills the leaves' grad() from the gradient of `output`.
void backward(const at::Tensor& output, std::span<const float> gradient);
// Sum of the losses of all target tokens; `matrix` is the LM head.
at::Tensor loss(const ModelSpec& model, const at::Tensor& norm, const at::Tensor& matrix, const TestBatch& batch,
                const at::Tensor& input);

}  // namespace slidedp::reference
