// Attention by plain matrix products over tiles of query rows, in a fixed order: deterministic, and slow. Batched over
// the KV heads; the query heads of a group take turns.
#include <algorithm>
#include <cmath>

#include "model/cost/activations.h"
#include "runtime/nn/cuda/attention.h"
#include "runtime/nn/kernels/attention_tile.h"
#include "runtime/nn/kernels/convert.h"

namespace slidedp::nn {
namespace {

// One tile's part of a document: query rows [first, first + rows) see keys [0, keys), counted from the document's
// start.
struct Tile {
  int64_t first, rows, keys, stride;
};

template <typename Use>
void for_each_tile(int64_t length, const Use& use) {
  for (int64_t first = 0; first < length; first += kAttentionTileRows) {
    const int64_t rows = std::min(kAttentionTileRows, length - first), keys = first + rows;
    use(Tile{first, rows, keys, round_up(keys, kVectorElements)});
  }
}

// The products of one document, one tile and the g-th query head of every group.
struct TileProducts {
  const TiledAttention& shape;
  const CudaContext& context;
  const AttentionInputs& inputs;
  int64_t begin;  // the document's first token
  int64_t g;
  Tile tile;

  int64_t group() const { return shape.heads / shape.kv_heads; }
  int64_t dim() const { return shape.head_dim; }
  Operand scores_like(const uint16_t* data, bool transposed) const {
    return {.data = data, .stride = tile.stride, .transposed = transposed, .batch_stride = tile.rows * tile.stride};
  }
  // The tile's rows of a matrix of query heads, dense or not.
  Operand query_rows(const uint16_t* data, int64_t stride, bool transposed = false) const {
    return {.data = data + (begin + tile.first) * stride + g * dim(),
            .stride = stride,
            .transposed = transposed,
            .batch_stride = group() * dim()};
  }
  Operand key_rows(const HeadView& view, bool transposed) const {
    return {.data = view.data + begin * view.stride,
            .stride = view.stride,
            .transposed = transposed,
            .batch_stride = dim()};
  }
  // fp32 scores = a [rows, dim] * b [keys, dim]^T
  void scores(const Operand& a, const HeadView& b, float* out) const {
    context.multiply({.rows = tile.rows,
                      .columns = tile.keys,
                      .inner = dim(),
                      .a = a,
                      .b = key_rows(b, /*transposed=*/true),
                      .out = out,
                      .out_type = DType::fp32,
                      .out_stride = tile.stride,
                      .batch = shape.kv_heads,
                      .out_batch_stride = tile.rows * tile.stride});
  }
  // out [rows, dim] = weights [rows, keys] * b [keys, dim], into the tile's rows of a dense matrix of query heads
  void weighted(const uint16_t* weights, const HeadView& b, uint16_t* out) const {
    const int64_t stride = shape.heads * dim();
    context.multiply({.rows = tile.rows,
                      .columns = dim(),
                      .inner = tile.keys,
                      .a = scores_like(weights, /*transposed=*/false),
                      .b = key_rows(b, /*transposed=*/false),
                      .out = out + (begin + tile.first) * stride + g * dim(),
                      .out_stride = stride,
                      .batch = shape.kv_heads,
                      .out_batch_stride = group() * dim()});
  }
  // sum [keys, dim] of each KV head += weights [rows, keys]^T * b [rows, dim]
  void add_to_keys(const uint16_t* weights, const Operand& b, float* sum) const {
    context.multiply({.rows = tile.keys,
                      .columns = dim(),
                      .inner = tile.rows,
                      .a = scores_like(weights, /*transposed=*/true),
                      .b = b,
                      .out = sum,
                      .out_type = DType::fp32,
                      .out_stride = shape.kv_heads * dim(),
                      .add = sum,
                      .batch = shape.kv_heads,
                      .out_batch_stride = dim()});
  }
  // Of the statistics [heads, tokens]: those of the tile's first row and first head.
  int64_t statistics() const { return g * shape.tokens + begin + tile.first; }
  ScoreTile score_tile() const {
    return {.batch = shape.kv_heads,
            .rows = tile.rows,
            .keys = tile.keys,
            .stride = tile.stride,
            .first_query = tile.first,
            .scale = 1.0f / std::sqrt(static_cast<float>(dim())),
            .row_stats_stride = group() * shape.tokens};
  }
};

int64_t document_end(const TiledAttention& shape, size_t document) {
  return document + 1 < shape.document_starts.size() ? shape.document_starts[document + 1] : shape.tokens;
}

int64_t longest_document(const TiledAttention& shape) {
  int64_t longest = 0;
  for (size_t i = 0; i < shape.document_starts.size(); ++i) {
    longest = std::max(longest, document_end(shape, i) - shape.document_starts[i]);
  }
  return longest;
}

// Elements of the largest tile's scores.
int64_t score_elements(const TiledAttention& shape, int64_t longest) {
  return shape.kv_heads * std::min(kAttentionTileRows, longest) * round_up(longest, kVectorElements);
}

// Calls use(products) for every document, tile and head of a group; end_document(begin, length) after each document.
template <typename Use, typename EndDocument>
void for_each_product(const TiledAttention& shape, const CudaContext& context, const AttentionInputs& inputs,
                      const Use& use, const EndDocument& end_document) {
  for (size_t document = 0; document < shape.document_starts.size(); ++document) {
    const int64_t begin = shape.document_starts[document], length = document_end(shape, document) - begin;
    for_each_tile(length, [&](const Tile& tile) {
      for (int64_t g = 0; g < shape.heads / shape.kv_heads; ++g) {
        use(TileProducts{shape, context, inputs, begin, g, tile});
      }
    });
    end_document(begin, length);
  }
}

}  // namespace

void TiledAttention::forward(const CudaContext& context, const AttentionInputs& inputs, uint16_t* out,
                             float* log_sum_exp) const {
  const int64_t elements = score_elements(*this, longest_document(*this));
  const at::Tensor scores = context.fp32(elements), probabilities = context.bf16(elements);
  for_each_product(
      *this, context, inputs,
      [&](const TileProducts& p) {
        p.scores(p.query_rows(inputs.query.data, inputs.query.stride), inputs.key, fp32_data(scores));
        softmax_rows(p.score_tile(), fp32_data(scores), bf16_data(probabilities), log_sum_exp + p.statistics(),
                     context.stream);
        p.weighted(bf16_data(probabilities), inputs.value, out);
      },
      [](int64_t, int64_t) {});
}

AttentionGradients TiledAttention::backward(const CudaContext& context, const AttentionInputs& inputs,
                                            const uint16_t* out, const float* log_sum_exp,
                                            const uint16_t* out_gradient) const {
  const int64_t longest = longest_document(*this), elements = score_elements(*this, longest);
  const int64_t queries = heads * head_dim, keys = kv_heads * head_dim;
  const AttentionGradients gradients{context.bf16(tokens * queries), context.bf16(tokens * keys),
                                     context.bf16(tokens * keys)};
  const at::Tensor scores = context.fp32(elements), slopes = context.fp32(elements);
  const at::Tensor probabilities = context.bf16(elements), score_gradients = context.bf16(elements);
  const at::Tensor dots = context.fp32(heads * tokens);
  const at::Tensor key_sum = context.fp32(longest * keys), value_sum = context.fp32(longest * keys);
  const auto clear = [&] {
    for (const at::Tensor& sum : {key_sum, value_sum}) {
      check_cuda(cudaMemsetAsync(sum.data_ptr(), 0, static_cast<size_t>(sum.nbytes()), context.stream),
                 "cudaMemsetAsync");
    }
  };
  output_dots(out, out_gradient, tokens, heads, head_dim, fp32_data(dots), context.stream);
  clear();
  for_each_product(
      *this, context, inputs,
      [&](const TileProducts& p) {
        const Operand output_rows = p.query_rows(out_gradient, queries);
        const Operand query_rows = p.query_rows(inputs.query.data, inputs.query.stride);
        p.scores(query_rows, inputs.key, fp32_data(scores));
        p.scores(output_rows, inputs.value, fp32_data(slopes));
        softmax_rows_backward(p.score_tile(), fp32_data(scores), fp32_data(slopes), log_sum_exp + p.statistics(),
                              fp32_data(dots) + p.statistics(), bf16_data(probabilities), bf16_data(score_gradients),
                              context.stream);
        p.add_to_keys(bf16_data(probabilities), output_rows, fp32_data(value_sum));
        p.add_to_keys(bf16_data(score_gradients), query_rows, fp32_data(key_sum));
        p.weighted(bf16_data(score_gradients), inputs.key, bf16_data(gradients.query));
      },
      [&](int64_t begin, int64_t length) {
        narrow_to_bf16(fp32_data(key_sum), bf16_data(gradients.key) + begin * keys, length * keys, context.stream);
        narrow_to_bf16(fp32_data(value_sum), bf16_data(gradients.value) + begin * keys, length * keys, context.stream);
        clear();
      });
  return gradients;
}

}  // namespace slidedp::nn
