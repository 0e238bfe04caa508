#include "runtime/nn/embedding.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <vector>

#include "runtime/nn/vector_math.h"

namespace slidedp::nn {
namespace {

SLIDEDP_VECTORIZE void widen_row(const uint16_t* from, float* to, int64_t width) {
  for (int64_t i = 0; i < width; ++i) to[i] = from_bf16(from[i]);
}

SLIDEDP_VECTORIZE void narrow_row(const float* from, uint16_t* to, int64_t width) {
  for (int64_t i = 0; i < width; ++i) to[i] = to_bf16(from[i]);
}

SLIDEDP_VECTORIZE void add_row(const float* from, float* to, int64_t width) {
  for (int64_t i = 0; i < width; ++i) to[i] += from[i];
}

void zero_rows(const GradientSlot& slot, int64_t offset, int64_t rows, int64_t hidden) {
  const int64_t bytes = hidden * size_of(slot.type());
  char* data = slot.type() == DType::fp32 ? reinterpret_cast<char*>(slot.fp32(offset))
                                          : reinterpret_cast<char*>(slot.bf16(offset));
  at::parallel_for(0, rows, 256, [&](int64_t begin, int64_t end) {
    std::memset(data + begin * bytes, 0, static_cast<size_t>((end - begin) * bytes));
  });
}

}  // namespace

void embedding_lookup(const uint16_t* table, const int32_t* ids, int64_t tokens, int64_t hidden, float* out) {
  at::parallel_for(0, tokens, 64, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) widen_row(table + ids[t] * hidden, out + t * hidden, hidden);
  });
}

void embedding_scatter(const int32_t* ids, int64_t tokens, int64_t hidden, const float* gradient,
                       const GradientSlot& slot, int64_t offset, int64_t rows) {
  if (slot.first()) zero_rows(slot, offset, rows, hidden);
  // Tokens by row; a stable sort keeps token order inside a row. Each row belongs to one thread.
  std::vector<int32_t> order(static_cast<size_t>(tokens));
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) { return ids[a] < ids[b]; });
  std::vector<int64_t> runs;  // where a new row starts in `order`
  for (int64_t i = 0; i < tokens; ++i) {
    if (i == 0 || ids[order[i]] != ids[order[i - 1]]) runs.push_back(i);
  }
  const int64_t count = static_cast<int64_t>(runs.size());
  runs.push_back(tokens);
  at::parallel_for(0, count, 32, [&](int64_t begin, int64_t end) {
    std::vector<float> sum(static_cast<size_t>(hidden));
    for (int64_t run = begin; run < end; ++run) {
      const int64_t at = offset + ids[order[runs[run]]] * hidden;
      const bool fp32 = slot.type() == DType::fp32;
      float* row = fp32 ? slot.fp32(at) : sum.data();
      if (!fp32) widen_row(slot.bf16(at), row, hidden);
      for (int64_t i = runs[run]; i < runs[run + 1]; ++i) add_row(gradient + order[i] * hidden, row, hidden);
      if (!fp32) narrow_row(row, slot.bf16(at), hidden);
    }
  });
}

}  // namespace slidedp::nn
