// Scalar building blocks of the elementwise kernels. Only multiplications, additions and bit operations in a fixed
// order, so a loop over them gives the same bits however the compiler vectorises it (the target is built with
// -ffp-contract=off).
#pragma once

#include <bit>
#include <cstdint>

// Compiles a loop for several instruction sets and picks one at load time; all give the same bits.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define SLIDEDP_VECTORIZE __attribute__((target_clones("avx512f", "avx2", "default")))
#define SLIDEDP_INLINE __attribute__((always_inline)) inline
#else
#define SLIDEDP_VECTORIZE
#define SLIDEDP_INLINE inline
#endif

namespace slidedp {

// Independent partial sums of a row's reduction: wide enough for one AVX-512 register.
inline constexpr int kLanes = 16;

SLIDEDP_INLINE float from_bf16(uint16_t value) { return std::bit_cast<float>(static_cast<uint32_t>(value) << 16); }

// Round to nearest even; any NaN becomes the canonical one.
SLIDEDP_INLINE uint16_t to_bf16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded);
}

// e^x within 2 ulp for x in [-87.3, 88.3], clamped to that range outside; NaN stays NaN. Source: Cephes expf (Moshier).
SLIDEDP_INLINE float fast_exp(float x) {
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer in the low mantissa bits
  x = x < -87.3f ? -87.3f : x;
  x = x > 88.3f ? 88.3f : x;
  const float shifted = x * 1.44269504088896341f + kRound;
  const float n = shifted - kRound;
  const float r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  // 2^n; n is in [-126, 127]. The low bits of `shifted` are n plus the constant's, which cancel in the shift.
  const uint32_t scale = (std::bit_cast<uint32_t>(shifted) + 127u) << 23;
  return p * std::bit_cast<float>(scale);
}

}  // namespace slidedp
