// STREAM-like loops (McCalpin 1995) that Adam's traffic is compared with.
#pragma once

#include <cstdint>

namespace slidedp::bench {

// Every array has `count` elements and starts at a multiple of 64 bytes. Copy and triad write past the caches.
double read(const float* a, int64_t count);  // the sum, so that the loop stays
void copy(const float* from, float* to, int64_t count);
void triad(const float* b, const float* c, float* a, int64_t count);
// What Adam does to memory without what it computes: four arrays are read and written in place, one is read; 26 bytes
// an element. Plain loads and stores in element order, nothing is prefetched.
void read_modify_write(uint16_t* hi, uint16_t* lo, uint32_t* m, uint32_t* v, const uint16_t* gradient, int64_t count);

}  // namespace slidedp::bench
