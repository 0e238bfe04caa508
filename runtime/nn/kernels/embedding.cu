#include <algorithm>
#include <cub/device/device_radix_sort.cuh>

#include "runtime/nn/kernels/device_math.cuh"
#include "runtime/nn/kernels/embedding.h"

namespace slidedp::nn {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kPiece = 64;  // sorted tokens that one block adds up

int64_t pieces_of(int64_t tokens) { return (tokens + kPiece - 1) / kPiece; }

// The parts of the scratch area, in this order, each aligned to 256 bytes.
struct Scratch {
  int32_t *tokens, *sorted_ids, *sorted_tokens;
  float *head, *tail;  // [pieces, hidden]: sums of a piece's first run if it began before, of its last if it goes on
  void* sort;
  size_t sort_bytes;
  int64_t bytes;

  Scratch(void* base, int64_t count, int64_t hidden) {
    int64_t end = 0;
    const auto take = [&](int64_t part) {
      char* at = static_cast<char*>(base) + end;
      end += (part + 255) / 256 * 256;
      return at;
    };
    tokens = reinterpret_cast<int32_t*>(take(count * 4));
    sorted_ids = reinterpret_cast<int32_t*>(take(count * 4));
    sorted_tokens = reinterpret_cast<int32_t*>(take(count * 4));
    head = reinterpret_cast<float*>(take(pieces_of(count) * hidden * 4));
    tail = reinterpret_cast<float*>(take(pieces_of(count) * hidden * 4));
    sort_bytes = 0;
    check_cuda(cub::DeviceRadixSort::SortPairs(nullptr, sort_bytes, sorted_ids, sorted_ids, sorted_tokens,
                                               sorted_tokens, static_cast<int>(count)),
               "cub::DeviceRadixSort");
    sort = take(static_cast<int64_t>(sort_bytes));
    bytes = end;
  }
};

__global__ void __launch_bounds__(kThreads)
    gather(const uint16_t* table, const int32_t* ids, int64_t tokens, int vectors, int64_t rows, uint16_t* out) {
  // A warp a token.
  const int64_t token = (blockIdx.x * static_cast<int64_t>(kThreads) + threadIdx.x) / kWarp;
  if (token >= tokens) return;
  const int64_t id = ids[token];
  const bool valid = id >= 0 && id < rows;
  const uint4 nan = make_uint4(0x7fc07fc0u, 0x7fc07fc0u, 0x7fc07fc0u, 0x7fc07fc0u);
  const uint4* from = reinterpret_cast<const uint4*>(table) + (valid ? id * vectors : 0);
  uint4* to = reinterpret_cast<uint4*>(out) + token * vectors;
  for (int i = threadIdx.x % kWarp; i < vectors; i += kWarp) to[i] = valid ? from[i] : nan;
}

__global__ void __launch_bounds__(kThreads) count_up(int32_t* out, int64_t count) {
  const int64_t at = blockIdx.x * static_cast<int64_t>(kThreads) + threadIdx.x;
  if (at < count) out[at] = static_cast<int32_t>(at);
}

struct RunParams {
  const int32_t *ids, *tokens;  // sorted
  int64_t count, hidden, rows;
  const uint16_t* gradient;
  float *head, *tail;
  GradientRange range;
};

// One row's sum of 8 columns goes to the slot.
__device__ inline void store_row(const RunParams& p, int64_t id, int64_t column, const float (&sum)[8]) {
  if (id < 0 || id >= p.rows) return;
#pragma unroll
  for (int j = 0; j < 8; ++j) store_gradient(p.range, id * p.hidden + column + j, sum[j]);
}

__device__ inline void store_sum(float* to, const float (&sum)[8]) {
#pragma unroll
  for (int j = 0; j < 8; ++j) to[j] = sum[j];
}

// Block (piece, part of the columns): adds up the runs of equal ids of its piece. A run inside the piece is complete; a
// first run that began before goes to `head`, a last one that goes on to `tail` (a run that does both: to `head`).
__global__ void __launch_bounds__(kThreads) add_pieces(RunParams p) {
  const int64_t begin = blockIdx.x * kPiece, end = min(begin + kPiece, p.count);
  const int64_t column = (blockIdx.y * static_cast<int64_t>(kThreads) + threadIdx.x) * 8;
  if (column >= p.hidden) return;
  float sum[8] = {};
  bool from_before = begin > 0 && p.ids[begin - 1] == p.ids[begin];
  uint4 next = load<8>(p.gradient + p.tokens[begin] * p.hidden + column);
  for (int64_t i = begin; i < end; ++i) {
    float values[8];
    unpack<8>(next, values);
    if (i + 1 < end) next = load<8>(p.gradient + p.tokens[i + 1] * p.hidden + column);
#pragma unroll
    for (int j = 0; j < 8; ++j) sum[j] += values[j];
    const int32_t id = p.ids[i];
    const bool goes_on = i + 1 < p.count && p.ids[i + 1] == id;
    if (goes_on && i + 1 < end) continue;
    if (from_before) {
      store_sum(p.head + blockIdx.x * p.hidden + column, sum);
    } else if (goes_on) {
      store_sum(p.tail + blockIdx.x * p.hidden + column, sum);
    } else {
      store_row(p, id, column, sum);
    }
    from_before = false;
#pragma unroll
    for (int j = 0; j < 8; ++j) sum[j] = 0.0f;
  }
}

// Block (piece, part of the columns): if a run starts in the piece and goes on, adds its parts in the pieces that
// follow.
__global__ void __launch_bounds__(kThreads) join_pieces(RunParams p) {
  const int64_t begin = blockIdx.x * kPiece, end = min(begin + kPiece, p.count);
  const int64_t column = (blockIdx.y * static_cast<int64_t>(kThreads) + threadIdx.x) * 8;
  if (column >= p.hidden || end == p.count) return;
  const int32_t id = p.ids[end - 1];
  const bool goes_on = p.ids[end] == id;
  const bool starts_here = begin == 0 || p.ids[begin - 1] != id;
  if (!goes_on || !starts_here) return;
  float sum[8];
#pragma unroll
  for (int j = 0; j < 8; ++j) sum[j] = p.tail[blockIdx.x * p.hidden + column + j];
  for (int64_t piece = blockIdx.x + 1; piece * kPiece < p.count && p.ids[piece * kPiece] == id; ++piece) {
#pragma unroll
    for (int j = 0; j < 8; ++j) sum[j] += p.head[piece * p.hidden + column + j];
  }
  store_row(p, id, column, sum);
}

}  // namespace

void embedding_gather(const uint16_t* table, const int32_t* ids, int64_t tokens, int64_t hidden, int64_t rows,
                      uint16_t* out, cudaStream_t stream) {
  if (tokens == 0) return;
  const auto grid = static_cast<unsigned>((tokens * kWarp + kThreads - 1) / kThreads);
  gather<<<grid, kThreads, 0, stream>>>(table, ids, tokens, static_cast<int>(hidden / 8), rows, out);
  check_launch("embedding_gather");
}

int64_t embedding_scratch_bytes(int64_t tokens, int64_t hidden) { return Scratch(nullptr, tokens, hidden).bytes; }

void embedding_scatter(const int32_t* ids, int64_t tokens, int64_t hidden, const uint16_t* gradient, int64_t rows,
                       GradientRange range, void* scratch_area, cudaStream_t stream) {
  if (range.first) {
    const size_t bytes = static_cast<size_t>(rows * hidden) * (range.fp32 ? 4 : 2);
    check_cuda(cudaMemsetAsync(range.data, 0, bytes, stream), "cudaMemsetAsync");
  }
  if (tokens == 0) return;
  Scratch scratch(scratch_area, tokens, hidden);
  const auto blocks = static_cast<unsigned>((tokens + kThreads - 1) / kThreads);
  count_up<<<blocks, kThreads, 0, stream>>>(scratch.tokens, tokens);
  check_cuda(cub::DeviceRadixSort::SortPairs(scratch.sort, scratch.sort_bytes, ids, scratch.sorted_ids, scratch.tokens,
                                             scratch.sorted_tokens, static_cast<int>(tokens), 0, 32, stream),
             "cub::DeviceRadixSort");
  range.first = false;  // added to the zeros above
  const RunParams params{scratch.sorted_ids, scratch.sorted_tokens, tokens,       hidden, rows,
                         gradient,           scratch.head,          scratch.tail, range};
  const int64_t vectors = hidden / kVectorElements;
  const dim3 grid(static_cast<unsigned>(pieces_of(tokens)), static_cast<unsigned>((vectors + kThreads - 1) / kThreads));
  const auto threads = static_cast<unsigned>(std::min<int64_t>(kThreads, (vectors + kWarp - 1) / kWarp * kWarp));
  // The kernels count columns by kThreads; a narrower block covers the only part that there is.
  add_pieces<<<grid, threads, 0, stream>>>(params);
  join_pieces<<<grid, threads, 0, stream>>>(params);
  check_launch("embedding_scatter");
}

}  // namespace slidedp::nn
