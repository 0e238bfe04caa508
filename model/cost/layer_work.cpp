#include "model/cost/layer_work.h"

namespace slidedp {
namespace {

constexpr double kGiga = 1e9;
constexpr double kWeightBytes = 2;  // bf16

struct Widths {
  double hidden, queries, keys, intermediate;
  explicit Widths(const ModelSpec& model)
      : hidden(static_cast<double>(model.hidden)),
        queries(static_cast<double>(model.heads * model.head_dim)),
        keys(static_cast<double>(model.kv_heads * model.head_dim)),
        intermediate(static_cast<double>(model.intermediate)) {}
  // Of the matrices: of the attention block q, k, v, o; of the MLP block gate, up, down.
  double matrix_elements(LayerBlock block) const {
    return of(block, hidden * (2 * queries + 2 * keys), 3 * hidden * intermediate);
  }
  static double of(LayerBlock block, double attention, double mlp) {
    return (block == LayerBlock::mlp ? 0 : attention) + (block == LayerBlock::attention ? 0 : mlp);
  }
};

double tokens_of(int64_t rows, int64_t seq) { return static_cast<double>(rows) * static_cast<double>(seq); }

}  // namespace

LayerWork layer_forward_work(const ModelSpec& model, int64_t rows, int64_t seq, DType compute, LayerBlock block) {
  const Widths w(model);
  const double tokens = tokens_of(rows, seq);
  LayerWork work;
  work.product_flops = 2 * tokens * w.matrix_elements(block);
  // Scores and weighted values, 2 flops each per query-key pair and channel; half of the pairs are masked.
  work.attention_flops = Widths::of(block, 2 * 2 * tokens * static_cast<double>(seq) / 2 * w.queries, 0);
  // Read and written: a norm and the residual of a sum each; queries and keys rotated; gate and up into one.
  const double elements = Widths::of(block, 3 * w.hidden + 2 * (w.queries + w.keys), 3 * w.hidden + 3 * w.intermediate);
  work.bytes = tokens * elements * static_cast<double>(size_of(compute)) + kWeightBytes * w.matrix_elements(block);
  return work;
}

LayerWork layer_backward_work(const ModelSpec& model, int64_t rows, int64_t seq, DType compute, DType accumulator,
                              bool first, LayerBlock block) {
  const Widths w(model);
  const LayerWork forward = layer_forward_work(model, rows, seq, compute, block);
  LayerWork work;
  work.product_flops = 2 * forward.product_flops;
  work.attention_flops = 2 * forward.attention_flops;
  // SwiGLU: gate, up and a slope in, two slopes out. A norm each: slope, input, sum in and out. Rotation: slopes and
  // what they multiply in, slopes out; values copied. What a policy does not save is formed again and counted
  // elsewhere.
  const double elements =
      Widths::of(block, 4 * w.hidden + 3 * (w.queries + w.keys) + 2 * w.keys, 4 * w.hidden + 5 * w.intermediate);
  const double gradient_bytes = (first ? 1 : 2) * static_cast<double>(size_of(accumulator));
  work.bytes = tokens_of(rows, seq) * elements * static_cast<double>(size_of(compute)) +
               (kWeightBytes + gradient_bytes) * w.matrix_elements(block);
  return work;
}

double layer_seconds(const LayerRate& rate, const LayerWork& work, double share) {
  double seconds = kernel_seconds({rate.products.peak_gflops, share * rate.products.half_gflop}, work.product_flops);
  const double attention_gflops = rate.attention_gflops > 0 ? rate.attention_gflops : rate.products.peak_gflops;
  seconds += work.attention_flops / (attention_gflops * kGiga);
  if (rate.gbps > 0) seconds += work.bytes / (rate.gbps * kGiga);
  return seconds;
}

double kernel_seconds(const KernelRate& rate, double flops) {
  return (flops + rate.half_gflop * kGiga) / (rate.peak_gflops * kGiga);
}

}  // namespace slidedp
