// The inner loops of the host engine, compiled once for each instruction set and picked at run time.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

#include "runtime/host/cpu_adam.h"

namespace slidedp {

// One instruction set's loops. Same bits from every set and at any alignment; arrays do not overlap.
struct Kernels {
  using Update = void (*)(uint16_t* hi, uint16_t* lo, float* m, float* v, const float* gradient, int64_t count,
                          const AdamScalars& scalars, float decay);

  std::string_view target;
  void (*copy_bf16)(const uint16_t* source, int64_t count, float* out);
  void (*add_bf16)(const uint16_t* source, int64_t count, float* out);
  void (*add_fp32)(const float* source, int64_t count, float* out);
  Update update[kUpdateParts];  // by UpdatePart
  // Sums of squares of whole blocks of kBlockElements.
  void (*square_blocks)(const float* values, int64_t blocks, double* sums);
};

// Those that this CPU can run, the widest first; the last is the baseline that every CPU runs.
std::span<const Kernels> supported_kernels();

}  // namespace slidedp
