// The loops behind kernels.h. No include guard: kernels.cpp includes this once for each instruction set, inside a
// namespace of its own. Every operation is correctly rounded (no FMA, no approximate reciprocals), and the order of
// sums is written out, so that all versions give the same bits.

inline float widen(uint16_t bf16) { return std::bit_cast<float>(static_cast<uint32_t>(bf16) << 16); }

void copy_bf16(const uint16_t* __restrict source, int64_t count, float* __restrict out) {
  for (int64_t i = 0; i < count; ++i) out[i] = widen(source[i]);
}

void add_bf16(const uint16_t* __restrict source, int64_t count, float* __restrict out) {
  for (int64_t i = 0; i < count; ++i) out[i] += widen(source[i]);
}

void add_fp32(const float* __restrict source, int64_t count, float* __restrict out) {
  for (int64_t i = 0; i < count; ++i) out[i] += source[i];
}

template <UpdatePart part>
void update(uint16_t* __restrict hi, uint16_t* __restrict lo, float* __restrict m, float* __restrict v,
            const float* __restrict gradient, int64_t count, const AdamScalars& scalars, float decay) {
  const AdamScalars s = scalars;  // a copy cannot alias the arrays
  for (int64_t i = 0; i < count; ++i) {
    const float g = gradient[i] * s.gradient_scale;
    const float first = m[i] + s.one_minus_beta1 * (g - m[i]);
    const float second = v[i] * s.beta2 + (s.one_minus_beta2 * g) * g;
    if constexpr (part != UpdatePart::moments) {
      const uint32_t low = lo[i];
      const float p = std::bit_cast<float>(((static_cast<uint32_t>(hi[i]) - (low >> 15)) << 16) | low);
      const float denominator = std::sqrt(second) / s.bias_correction2_sqrt + s.eps;
      const auto bits = std::bit_cast<uint32_t>(p * decay - (s.step_size * first) / denominator);
      hi[i] = static_cast<uint16_t>((bits + 0x8000u) >> 16);
      lo[i] = static_cast<uint16_t>(bits);
    }
    if constexpr (part != UpdatePart::weights) {
      m[i] = first;
      v[i] = second;
    }
  }
}

// Squares are exact in double. Eight interleaved partial sums, folded in a fixed order.
void square_blocks(const float* __restrict values, int64_t blocks, double* __restrict sums) {
  constexpr int kParts = 8;
  for (int64_t block = 0; block < blocks; ++block) {
    double part[kParts] = {};
    for (int64_t i = 0; i < kBlockElements; i += kParts) {
      for (int j = 0; j < kParts; ++j) {
        const double value = values[block * kBlockElements + i + j];
        part[j] += value * value;
      }
    }
    sums[block] = ((part[0] + part[4]) + (part[2] + part[6])) + ((part[1] + part[5]) + (part[3] + part[7]));
  }
}

Kernels make_kernels(std::string_view target) {
  return {target,
          copy_bf16,
          add_bf16,
          add_fp32,
          {update<UpdatePart::whole>, update<UpdatePart::weights>, update<UpdatePart::moments>},
          square_blocks};
}
