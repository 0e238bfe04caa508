#include <ATen/Parallel.h>

#include "runtime/nn/kernels.h"
#include "runtime/nn/vector_math.h"

namespace slidedp::nn {
namespace {

constexpr int64_t kGrain = 1 << 16;  // elements; below it a second thread costs more than it saves

SLIDEDP_VECTORIZE void widen_range(const uint16_t* from, float* to, int64_t elements) {
  for (int64_t i = 0; i < elements; ++i) to[i] = from_bf16(from[i]);
}

SLIDEDP_VECTORIZE void narrow_range(const float* from, uint16_t* to, int64_t elements) {
  for (int64_t i = 0; i < elements; ++i) to[i] = to_bf16(from[i]);
}

}  // namespace

void widen(const uint16_t* from, float* to, int64_t elements) {
  at::parallel_for(0, elements, kGrain,
                   [&](int64_t begin, int64_t end) { widen_range(from + begin, to + begin, end - begin); });
}

void narrow(const float* from, uint16_t* to, int64_t elements) {
  at::parallel_for(0, elements, kGrain,
                   [&](int64_t begin, int64_t end) { narrow_range(from + begin, to + begin, end - begin); });
}

std::vector<float> widen(const uint16_t* from, int64_t elements) {
  std::vector<float> result(static_cast<size_t>(elements));
  widen_range(from, result.data(), elements);
  return result;
}

}  // namespace slidedp::nn
