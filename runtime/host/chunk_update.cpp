#include "runtime/host/chunk_update.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <stdexcept>

namespace slidedp {
namespace {

void check_range(const UnitLayout& layout, int64_t begin, int64_t elements) {
  if (begin < 0 || elements < 0 || begin + elements > layout.elements) {
    throw std::logic_error("chunk [" + std::to_string(begin) + ", " + std::to_string(begin + elements) +
                           ") is outside " + layout.name);
  }
}

}  // namespace

GradientSources advance(const GradientSources& gradient, int64_t offset, std::vector<const void*>& moved) {
  moved.clear();
  for (const void* source : gradient.sources) {
    moved.push_back(static_cast<const std::byte*>(source) + offset * size_of(gradient.type));
  }
  const float* accumulator = gradient.accumulator == nullptr ? nullptr : gradient.accumulator + offset;
  return {moved, gradient.group_size, gradient.type, accumulator};
}

AdamScalars make_scalars(const AdamSpec& adam, double max_grad_norm, double gradient_norm_unscaled,
                         int64_t target_tokens, int64_t t) {
  if (target_tokens < 1 || t < 1) throw std::logic_error("make_scalars: target_tokens and t start at 1");
  const double norm = gradient_norm_unscaled / static_cast<double>(target_tokens);
  double clip = 1.0;
  if (max_grad_norm > 0) clip = std::min(1.0, max_grad_norm / (norm + 1e-6));
  const auto steps = static_cast<double>(t);
  AdamScalars scalars;
  scalars.beta1 = static_cast<float>(adam.beta1);
  scalars.beta2 = static_cast<float>(adam.beta2);
  scalars.one_minus_beta1 = static_cast<float>(1.0 - adam.beta1);
  scalars.one_minus_beta2 = static_cast<float>(1.0 - adam.beta2);
  scalars.eps = static_cast<float>(adam.eps);
  scalars.step_size = static_cast<float>(adam.learning_rate / (1.0 - std::pow(adam.beta1, steps)));
  scalars.bias_correction2_sqrt = static_cast<float>(std::sqrt(1.0 - std::pow(adam.beta2, steps)));
  scalars.decay = static_cast<float>(1.0 - adam.learning_rate * adam.weight_decay);
  scalars.gradient_scale = static_cast<float>(clip / static_cast<double>(target_tokens));
  scalars.clip_factor = clip;
  scalars.skip = !std::isfinite(gradient_norm_unscaled);
  return scalars;
}

void update_chunk(const UnitLayout& layout, UnitState state, int64_t begin, int64_t elements,
                  const GradientSources& gradient, const AdamScalars& scalars, UpdatePart part) {
  check_range(layout, begin, elements);
  const int64_t end = begin + elements;
  std::vector<const void*> moved;
  // [from, next) grows over tensors of one kind; a gap goes with the tensor before it (with the first at the start).
  int64_t from = begin;
  for (size_t i = 0; i < layout.tensors.size() && from < end; ++i) {
    const bool last = i + 1 == layout.tensors.size();
    const int64_t next = std::min(end, last ? layout.elements : layout.tensors[i + 1].offset);
    if (next <= from) continue;
    const bool decay = layout.tensors[i].decay;
    if (next < end && layout.tensors[i + 1].decay == decay) continue;
    const auto at = static_cast<size_t>(from), count = static_cast<size_t>(next - from);
    adam_update(state.hi.subspan(at, count), state.lo.subspan(at, count), state.m.subspan(at, count),
                state.v.subspan(at, count), advance(gradient, from - begin, moved), scalars, decay, part);
    from = next;
  }
}

std::string first_nonfinite_tensor(const UnitLayout& layout, int64_t begin, int64_t elements,
                                   const GradientSources& gradient) {
  check_range(layout, begin, elements);
  std::vector<const void*> moved;
  std::vector<double> sums;
  for (const TensorLayout& tensor : layout.tensors) {
    const int64_t from = std::max(begin, tensor.offset);
    const int64_t to = std::min(begin + elements, tensor.offset + tensor.elements);
    if (from >= to) continue;
    sums.resize(static_cast<size_t>(ceil_div(to - from, kBlockElements)));
    if (!block_square_sums(advance(gradient, from - begin, moved), to - from, sums)) return tensor.name;
  }
  return {};
}

}  // namespace slidedp
