#include "tests/bench/streams.h"

#define HWY_DISABLED_TARGETS HWY_SSSE3
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "tests/bench/streams.cpp"
#include <hwy/cache_control.h>
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

HWY_BEFORE_NAMESPACE();
namespace slidedp::bench::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

double read(const float* a, int64_t count) {
  const hn::ScalableTag<float> d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  auto sum0 = hn::Zero(d), sum1 = sum0, sum2 = sum0, sum3 = sum0;
  int64_t i = 0;
  for (; i + 4 * lanes <= count; i += 4 * lanes) {
    sum0 = hn::Add(sum0, hn::Load(d, a + i));
    sum1 = hn::Add(sum1, hn::Load(d, a + i + lanes));
    sum2 = hn::Add(sum2, hn::Load(d, a + i + 2 * lanes));
    sum3 = hn::Add(sum3, hn::Load(d, a + i + 3 * lanes));
  }
  double sum = hn::GetLane(hn::SumOfLanes(d, hn::Add(hn::Add(sum0, sum1), hn::Add(sum2, sum3))));
  for (; i < count; ++i) sum += a[i];
  return sum;
}

void copy(const float* from, float* to, int64_t count) {
  const hn::ScalableTag<float> d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  int64_t i = 0;
  for (; i + lanes <= count; i += lanes) hn::Stream(hn::Load(d, from + i), d, to + i);
  for (; i < count; ++i) to[i] = from[i];
  hwy::FlushStream();
}

void triad(const float* b, const float* c, float* a, int64_t count) {
  const hn::ScalableTag<float> d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  const auto three = hn::Set(d, 3.0f);
  int64_t i = 0;
  for (; i + lanes <= count; i += lanes) {
    hn::Stream(hn::MulAdd(hn::Load(d, c + i), three, hn::Load(d, b + i)), d, a + i);
  }
  for (; i < count; ++i) a[i] = b[i] + 3 * c[i];
  hwy::FlushStream();
}

void read_modify_write(uint16_t* hi, uint16_t* lo, uint32_t* m, uint32_t* v, const uint16_t* gradient, int64_t count) {
  const hn::ScalableTag<uint16_t> half;
  const hn::ScalableTag<uint32_t> full;
  const auto lanes = static_cast<int64_t>(hn::Lanes(half)), wide = static_cast<int64_t>(hn::Lanes(full));
  const auto one = hn::Set(full, 1);
  int64_t i = 0;
  for (; i + lanes <= count; i += lanes) {
    const auto g = hn::Load(half, gradient + i);
    hn::Store(hn::Add(hn::Load(half, hi + i), g), half, hi + i);
    hn::Store(hn::Add(hn::Load(half, lo + i), g), half, lo + i);
    for (int64_t j = i; j < i + lanes; j += wide) {
      hn::Store(hn::Add(hn::Load(full, m + j), one), full, m + j);
      hn::Store(hn::Add(hn::Load(full, v + j), one), full, v + j);
    }
  }
  for (; i < count; ++i) {
    hi[i] = static_cast<uint16_t>(hi[i] + gradient[i]);
    lo[i] = static_cast<uint16_t>(lo[i] + gradient[i]);
    ++m[i];
    ++v[i];
  }
}

}  // namespace slidedp::bench::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace slidedp::bench {

HWY_EXPORT(read);
HWY_EXPORT(copy);
HWY_EXPORT(triad);
HWY_EXPORT(read_modify_write);

double read(const float* a, int64_t count) { return HWY_DYNAMIC_DISPATCH(read)(a, count); }

void copy(const float* from, float* to, int64_t count) { HWY_DYNAMIC_DISPATCH(copy)(from, to, count); }

void triad(const float* b, const float* c, float* a, int64_t count) { HWY_DYNAMIC_DISPATCH(triad)(b, c, a, count); }

void read_modify_write(uint16_t* hi, uint16_t* lo, uint32_t* m, uint32_t* v, const uint16_t* gradient, int64_t count) {
  HWY_DYNAMIC_DISPATCH(read_modify_write)(hi, lo, m, v, gradient, count);
}

}  // namespace slidedp::bench
#endif  // HWY_ONCE
