#include <ATen/Parallel.h>

#include <algorithm>
#include <cmath>

#include "runtime/nn/kernels.h"
#include "runtime/nn/vector_math.h"

namespace slidedp::nn {
namespace {

constexpr int64_t kColumnBlock = 64;

// Rows for one thread at least: about 16 K elements.
int64_t row_grain(int64_t width) { return std::max<int64_t>(1, (1 << 14) / std::max<int64_t>(1, width)); }

// Adds the lanes pairwise: fixed order.
SLIDEDP_INLINE float combine(float* lanes) {
  for (int step = kLanes / 2; step > 0; step /= 2) {
    for (int i = 0; i < step; ++i) lanes[i] += lanes[i + step];
  }
  return lanes[0];
}

SLIDEDP_VECTORIZE float square_sum(const float* x, int64_t width) {
  float lanes[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= width; i += kLanes) {
    for (int l = 0; l < kLanes; ++l) lanes[l] += x[i + l] * x[i + l];
  }
  for (int l = 0; i + l < width; ++l) lanes[l] += x[i + l] * x[i + l];
  return combine(lanes);
}

SLIDEDP_VECTORIZE void apply_row(const float* x, const float* weight, float rstd, float* out, int64_t width) {
  for (int64_t i = 0; i < width; ++i) out[i] = weight[i] * (x[i] * rstd);
}

SLIDEDP_VECTORIZE float weighted_dot(const float* gradient, const float* weight, const float* x, int64_t width) {
  float lanes[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= width; i += kLanes) {
    for (int l = 0; l < kLanes; ++l) lanes[l] += gradient[i + l] * weight[i + l] * x[i + l];
  }
  for (int l = 0; i + l < width; ++l) lanes[l] += gradient[i + l] * weight[i + l] * x[i + l];
  return combine(lanes);
}

// With g = gradient * weight: dx = rstd * (g - x * rstd^2 * mean(g * x)).
SLIDEDP_VECTORIZE void backward_row(const float* x, const float* weight, float rstd, float factor,
                                    const float* gradient, float* dx, int64_t width, bool add) {
  if (add) {
    for (int64_t i = 0; i < width; ++i) dx[i] += rstd * (gradient[i] * weight[i] - x[i] * factor);
  } else {
    for (int64_t i = 0; i < width; ++i) dx[i] = rstd * (gradient[i] * weight[i] - x[i] * factor);
  }
}

SLIDEDP_VECTORIZE void add_products(double* sums, const float* gradient, const float* x, float rstd, int64_t width) {
  for (int64_t i = 0; i < width; ++i) sums[i] += static_cast<double>(gradient[i] * (x[i] * rstd));
}

SLIDEDP_VECTORIZE void add_row(double* sums, const float* gradient, int64_t width) {
  for (int64_t i = 0; i < width; ++i) sums[i] += static_cast<double>(gradient[i]);
}

// Blocks of columns go to threads; inside one, rows are added in order.
template <typename AddRow>
void sum_columns(int64_t rows, int64_t width, const AddRow& add) {
  at::parallel_for(0, ceil_div(width, kColumnBlock), row_grain(rows * kColumnBlock), [&](int64_t first, int64_t last) {
    const int64_t begin = first * kColumnBlock, end = std::min(last * kColumnBlock, width);
    for (int64_t row = 0; row < rows; ++row) add(row, begin, end - begin);
  });
}

}  // namespace

void rms_norm(ConstRows x, const uint16_t* weight, double eps, float* rstd, Rows out) {
  const std::vector<float> scale = widen(weight, x.width);
  at::parallel_for(0, x.rows, row_grain(x.width), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const float mean = square_sum(x.at(row), x.width) / static_cast<float>(x.width);
      rstd[row] = 1.0f / std::sqrt(mean + static_cast<float>(eps));
      apply_row(x.at(row), scale.data(), rstd[row], out.at(row), x.width);
    }
  });
}

void rms_norm_backward(ConstRows x, const uint16_t* weight, const float* rstd, ConstRows gradient, Rows dx, bool add) {
  const std::vector<float> scale = widen(weight, x.width);
  at::parallel_for(0, x.rows, row_grain(x.width), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const float dot = weighted_dot(gradient.at(row), scale.data(), x.at(row), x.width);
      const float factor = rstd[row] * rstd[row] * (dot / static_cast<float>(x.width));
      backward_row(x.at(row), scale.data(), rstd[row], factor, gradient.at(row), dx.at(row), x.width, add);
    }
  });
}

void rms_norm_weight_sums(ConstRows x, const float* rstd, ConstRows gradient, std::span<double> sums) {
  sum_columns(x.rows, x.width, [&](int64_t row, int64_t begin, int64_t count) {
    add_products(sums.data() + begin, gradient.at(row) + begin, x.at(row) + begin, rstd[row], count);
  });
}

void column_sums(ConstRows gradient, std::span<double> sums) {
  sum_columns(gradient.rows, gradient.width, [&](int64_t row, int64_t begin, int64_t count) {
    add_row(sums.data() + begin, gradient.at(row) + begin, count);
  });
}

void fill_rows(Rows out, const uint16_t* bias, ConstRows residual) {
  const std::vector<float> add = bias == nullptr ? std::vector<float>{} : widen(bias, out.width);
  at::parallel_for(0, out.rows, row_grain(out.width), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      float* to = out.at(row);
      if (residual.data == nullptr) {
        std::fill_n(to, out.width, 0.0f);
      } else {
        std::copy_n(residual.at(row), out.width, to);
      }
      for (size_t i = 0; i < add.size(); ++i) to[i] += add[i];
    }
  });
}

}  // namespace slidedp::nn
