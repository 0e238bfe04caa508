#include "profiler/streams.h"

#define HWY_DISABLED_TARGETS HWY_SSSE3
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "profiler/streams.cpp"
#include <hwy/cache_control.h>
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

HWY_BEFORE_NAMESPACE();
namespace slidedp::streams::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

constexpr int64_t kLine = 16;  // floats of a cache line
using Floats = hn::CappedTag<float, kLine>;

// One stream of loads is bound by how many lines a core has on their way: fetched ahead, a page end does not stop it.
uint64_t read(const float* a, int64_t count) {
  constexpr int64_t kAhead = 32 * kLine;
  const hn::CappedTag<uint64_t, kLine / 2> d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  auto even = hn::Zero(d), odd = even;
  for (int64_t i = 0; i < count; i += kLine) {
    const auto* words = reinterpret_cast<const uint64_t*>(a + i);
    hwy::Prefetch(a + i + kAhead);
    for (int64_t j = 0; j < kLine / 2; j += 2 * lanes) {
      even = hn::Add(even, hn::LoadU(d, words + j));
      if (lanes < kLine / 2) odd = hn::Add(odd, hn::LoadU(d, words + j + lanes));
    }
  }
  return hn::GetLane(hn::SumOfLanes(d, hn::Add(even, odd)));
}

void copy(const float* HWY_RESTRICT a, float* HWY_RESTRICT out, int64_t count) {
  const Floats d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  for (int64_t i = 0; i < count; i += lanes) hn::StoreU(hn::LoadU(d, a + i), d, out + i);
}

void triad(const float* HWY_RESTRICT a, const float* HWY_RESTRICT b, float* HWY_RESTRICT out, int64_t count) {
  const Floats d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  const auto three = hn::Set(d, 3.0f);
  for (int64_t i = 0; i < count; i += lanes) {
    hn::StoreU(hn::MulAdd(hn::LoadU(d, b + i), three, hn::LoadU(d, a + i)), d, out + i);
  }
}

void negate(float* a, int64_t count) {
  const Floats d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  for (int64_t i = 0; i < count; i += lanes) hn::StoreU(hn::Neg(hn::LoadU(d, a + i)), d, a + i);
}

}  // namespace slidedp::streams::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace slidedp::streams {

HWY_EXPORT(read);
HWY_EXPORT(copy);
HWY_EXPORT(triad);
HWY_EXPORT(negate);

uint64_t read(const float* a, int64_t count) { return HWY_DYNAMIC_DISPATCH(read)(a, count); }

void copy(const float* a, float* out, int64_t count) { HWY_DYNAMIC_DISPATCH(copy)(a, out, count); }

void triad(const float* a, const float* b, float* out, int64_t count) { HWY_DYNAMIC_DISPATCH(triad)(a, b, out, count); }

void negate(float* a, int64_t count) { HWY_DYNAMIC_DISPATCH(negate)(a, count); }

}  // namespace slidedp::streams
#endif  // HWY_ONCE
