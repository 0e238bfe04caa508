#include <ATen/Parallel.h>

#include <algorithm>
#include <cmath>

#include "runtime/nn/kernels.h"
#include "runtime/nn/vector_math.h"

namespace slidedp::nn {
namespace {

// Exponentials are added in fp32 inside a block and in double over blocks.
constexpr int64_t kBlock = 512;

SLIDEDP_VECTORIZE float row_max(const float* row, int64_t width) {
  float lanes[kLanes];
  std::fill_n(lanes, kLanes, row[0]);
  int64_t i = 0;
  for (; i + kLanes <= width; i += kLanes) {
    for (int l = 0; l < kLanes; ++l) lanes[l] = row[i + l] > lanes[l] ? row[i + l] : lanes[l];
  }
  for (; i < width; ++i) lanes[0] = row[i] > lanes[0] ? row[i] : lanes[0];
  return *std::max_element(lanes, lanes + kLanes);
}

// row = exp(row - max); returns the sum.
SLIDEDP_VECTORIZE float exp_block(float* row, float max, int64_t width) {
  float lanes[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= width; i += kLanes) {
    for (int l = 0; l < kLanes; ++l) {
      row[i + l] = fast_exp(row[i + l] - max);
      lanes[l] += row[i + l];
    }
  }
  for (; i < width; ++i) {
    row[i] = fast_exp(row[i] - max);
    lanes[0] += row[i];
  }
  float sum = 0;
  for (const float lane : lanes) sum += lane;
  return sum;
}

SLIDEDP_VECTORIZE void scale_row(float* row, float factor, int64_t width) {
  for (int64_t i = 0; i < width; ++i) row[i] *= factor;
}

// Loss of one token; the row becomes its gradient.
double token_loss(float* row, int32_t target, int64_t vocabulary) {
  const float max = row_max(row, vocabulary);
  const double logit = row[target];
  double sum = 0;
  for (int64_t begin = 0; begin < vocabulary; begin += kBlock) {
    sum += exp_block(row + begin, max, std::min(kBlock, vocabulary - begin));
  }
  scale_row(row, static_cast<float>(1.0 / sum), vocabulary);
  row[target] -= 1.0f;
  return static_cast<double>(max) + std::log(sum) - logit;
}

}  // namespace

double cross_entropy(float* logits, std::span<const int32_t> targets, int64_t vocabulary) {
  const int64_t tokens = static_cast<int64_t>(targets.size());
  std::vector<double> losses(targets.size(), 0.0);
  at::parallel_for(0, tokens, 1, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      float* row = logits + t * vocabulary;
      const size_t index = static_cast<size_t>(t);
      if (targets[index] < 0) {
        std::fill_n(row, vocabulary, 0.0f);
      } else {
        losses[index] = token_loss(row, targets[index], vocabulary);
      }
    }
  });
  double total = 0;
  for (const double loss : losses) total += loss;
  return total;
}

}  // namespace slidedp::nn
