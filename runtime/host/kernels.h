// The inner loops of the host engine, written once with Highway and compiled for AVX-512, AVX2, SSE4 and the
// architecture's baseline (Highway's plain C++); the widest that the CPU has is picked at run time.
//
// Same bits from every instruction set, at any alignment and for any split at multiples of kBlockElements: every
// operation is one correctly rounded IEEE operation, written out in order (Mul, Add, Sub, Div, Sqrt). There is one FMA,
// in the sums of squares: the square of an fp32 is exact in double, so it rounds as a product and a sum would.
#pragma once

#include <cstdint>

#include "runtime/host/cpu_adam.h"

namespace slidedp::kernels {

struct State {
  uint16_t* hi;
  uint16_t* lo;
  float* m;
  float* v;
};

// See adam_update: one pass over the state and all sources, which are summed in registers.
void update(const State& state, const GradientSources& gradient, int64_t count, const AdamScalars& scalars, float decay,
            UpdatePart part);

// See block_square_sums; the last block may be shorter.
void square(const GradientSources& gradient, int64_t count, double* block_sums);

// See accumulate and accumulate_and_square; without `block_sums` (null) no squares. The first wave is written past the
// caches: nothing reads it before the next wave's turn.
void accumulate(float* accumulator, const GradientSources& wave, int64_t count, bool first, double* block_sums);

// Name of the instruction set in use: "AVX3" (AVX-512), "AVX2", "SSE4", ...
const char* target();

}  // namespace slidedp::kernels
