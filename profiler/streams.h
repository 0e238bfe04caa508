// Loops that do nothing but move memory, as STREAM defines them (McCalpin 1995): plain loads and stores, so that a line
// that is written is read first.
#pragma once

#include <cstdint>

namespace slidedp::streams {

// `count` is a multiple of 16 everywhere. Pointers of one call do not overlap.
uint64_t read(const float* a, int64_t count);                           // the sum of its words, so that the loop stays
void copy(const float* a, float* out, int64_t count);                   // out = a
void triad(const float* a, const float* b, float* out, int64_t count);  // out = a + 3 b
void negate(float* a, int64_t count);                                   // a = -a, in place

}  // namespace slidedp::streams
