#include <stdexcept>

#include "runtime/nn/kernels/device_math.cuh"
#include "runtime/nn/kernels/swiglu.h"

namespace slidedp::nn {
namespace {

constexpr int kThreads = 256;
constexpr int kTurns = 2;  // vectors a thread, loaded before the first is used

// Fast exponential and division: relative error about 1e-6, a thousandth of bf16's rounding.
__device__ inline float sigmoid(float x) { return __fdividef(1.0f, 1.0f + __expf(-x)); }

// The elements of gate and up that belong to one vector of the activation; rows of gate and up lie behind one another.
__device__ inline int64_t gate_at(int64_t vector, int vectors_per_row) {
  // Fewer than 2^32 vectors: the caller checks.
  const uint32_t row = static_cast<uint32_t>(vector) / vectors_per_row;
  return (vector + row * static_cast<int64_t>(vectors_per_row)) * 8;
}

// Calls work(turn, vector) for each of a thread's vectors.
template <typename Work>
__device__ inline void for_vectors(int64_t vectors, const Work& work) {
  const int64_t first = blockIdx.x * static_cast<int64_t>(kThreads * kTurns) + threadIdx.x;
#pragma unroll
  for (int turn = 0; turn < kTurns; ++turn) {
    const int64_t vector = first + turn * kThreads;
    if (vector < vectors) work(turn, vector);
  }
}

__global__ void __launch_bounds__(kThreads)
    forward(const uint16_t* gate_up, int64_t vectors, int vectors_per_row, uint16_t* out) {
  uint4 gate_raw[kTurns], up_raw[kTurns];
  for_vectors(vectors, [&](int turn, int64_t vector) {
    const uint16_t* from = gate_up + gate_at(vector, vectors_per_row);
    gate_raw[turn] = load<8>(from);
    up_raw[turn] = load<8>(from + vectors_per_row * 8);
  });
  for_vectors(vectors, [&](int turn, int64_t vector) {
    float gate[8], up[8];
    unpack<8>(gate_raw[turn], gate);
    unpack<8>(up_raw[turn], up);
#pragma unroll
    for (int j = 0; j < 8; ++j) gate[j] = gate[j] * sigmoid(gate[j]) * up[j];
    store<8>(out + vector * 8, gate);
  });
}

template <bool kFormActivation>
__global__ void __launch_bounds__(kThreads)
    backward(uint16_t* gate_up, int64_t vectors, int vectors_per_row, uint16_t* gradient) {
  uint4 gate_raw[kTurns], up_raw[kTurns], gradient_raw[kTurns];
  for_vectors(vectors, [&](int turn, int64_t vector) {
    const uint16_t* from = gate_up + gate_at(vector, vectors_per_row);
    gate_raw[turn] = load<8>(from);
    up_raw[turn] = load<8>(from + vectors_per_row * 8);
    gradient_raw[turn] = load<8>(gradient + vector * 8);
  });
  for_vectors(vectors, [&](int turn, int64_t vector) {
    float gate[8], up[8], slope[8];
    unpack<8>(gate_raw[turn], gate);
    unpack<8>(up_raw[turn], up);
    unpack<8>(gradient_raw[turn], slope);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float s = sigmoid(gate[j]), silu = gate[j] * s;
      const float activation = silu * up[j];
      gate[j] = slope[j] * up[j] * (s + silu * (1.0f - s));
      up[j] = slope[j] * silu;
      slope[j] = activation;
    }
    uint16_t* to = gate_up + gate_at(vector, vectors_per_row);
    store<8>(to, gate);
    store<8>(to + vectors_per_row * 8, up);
    if constexpr (kFormActivation) store<8>(gradient + vector * 8, slope);
  });
}

unsigned grid_for(int64_t vectors) {
  if (vectors > 0xffffffffLL) throw std::logic_error("the SwiGLU kernel takes fewer than 2^32 vectors");
  return static_cast<unsigned>((vectors + kThreads * kTurns - 1) / (kThreads * kTurns));
}

}  // namespace

void swiglu(const uint16_t* gate_up, int64_t tokens, int64_t width, uint16_t* out, cudaStream_t stream) {
  const int64_t per_row = width / kVectorElements, vectors = tokens * per_row;
  if (vectors == 0) return;
  forward<<<grid_for(vectors), kThreads, 0, stream>>>(gate_up, vectors, static_cast<int>(per_row), out);
  check_launch("swiglu");
}

void swiglu_backward(uint16_t* gate_up, int64_t tokens, int64_t width, uint16_t* gradient, bool form_activation,
                     cudaStream_t stream) {
  const int64_t per_row = width / kVectorElements, vectors = tokens * per_row;
  if (vectors == 0) return;
  const auto kernel = form_activation ? backward<true> : backward<false>;
  kernel<<<grid_for(vectors), kThreads, 0, stream>>>(gate_up, vectors, static_cast<int>(per_row), gradient);
  check_launch("swiglu_backward");
}

}  // namespace slidedp::nn
