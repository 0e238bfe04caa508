#include "runtime/host/kernels.h"

#include <algorithm>
#include <array>
#include <cstddef>

// Nothing to gain between SSE4 and the baseline.
#define HWY_DISABLED_TARGETS HWY_SSSE3
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "runtime/host/kernels.cpp"
#include <hwy/cache_control.h>
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

HWY_BEFORE_NAMESPACE();
namespace slidedp::kernels::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;
template <class D>
using Vec = hn::Vec<D>;
using Full = hn::ScalableTag<float>;
using One = hn::CappedTag<float, 1>;  // for what does not fill a vector: the same operations on one lane

// Hardware prefetchers stop at page ends and share their attention between all streams; this far ahead is enough for
// the latency of DRAM and little enough for the first-level cache. In elements.
constexpr int64_t kAhead = 256;

template <typename T>
HWY_INLINE void prefetch_block(const T* from) {
  constexpr int64_t kLine = 64 / sizeof(T);
  for (int64_t i = 0; i < kBlockElements; i += kLine) hwy::Prefetch(from + i);
}

template <class D>
HWY_INLINE Vec<D> load(D d, const float* from) {
  return hn::LoadU(d, from);
}

template <class D>
HWY_INLINE Vec<hn::RebindToUnsigned<D>> load_bits(D, const uint16_t* from) {
  return hn::PromoteTo(hn::RebindToUnsigned<D>(), hn::LoadU(hn::Rebind<uint16_t, D>(), from));
}

template <class D>
HWY_INLINE Vec<D> load(D d, const uint16_t* bf16) {
  return hn::BitCast(d, hn::ShiftLeft<16>(load_bits(d, bf16)));
}

// The kinds of gradients: sum(d, i) is the vector of the summed elements from i on.

template <typename T>
struct Single {
  const T* source;

  template <class D>
  HWY_INLINE Vec<D> sum(D d, int64_t i) const {
    return load(d, source + i);
  }
  HWY_INLINE void prefetch(int64_t i) const { prefetch_block(source + i); }
};

template <typename T>
struct Sources {
  const void* const* sources;
  size_t count, group_size;

  HWY_INLINE const T* at(size_t s) const { return static_cast<const T*>(sources[s]); }
  template <class D>
  HWY_INLINE Vec<D> group_sum(D d, int64_t i, size_t begin) const {
    auto sum = load(d, at(begin) + i);
    for (size_t s = begin + 1; s < begin + group_size; ++s) sum = hn::Add(sum, load(d, at(s) + i));
    return sum;
  }
  template <class D>
  HWY_INLINE Vec<D> sum(D d, int64_t i) const {
    auto total = group_sum(d, i, 0);
    for (size_t group = group_size; group < count; group += group_size) {
      total = hn::Add(total, group_sum(d, i, group));
    }
    return total;
  }
  HWY_INLINE void prefetch(int64_t i) const {
    for (size_t s = 0; s < count; ++s) prefetch_block(at(s) + i);
  }
};

template <typename T>
struct OntoAccumulator {
  const float* accumulator;
  const void* const* sources;
  size_t count;

  HWY_INLINE const T* at(size_t s) const { return static_cast<const T*>(sources[s]); }
  template <class D>
  HWY_INLINE Vec<D> sum(D d, int64_t i) const {
    auto total = load(d, accumulator + i);
    for (size_t s = 0; s < count; ++s) total = hn::Add(total, load(d, at(s) + i));
    return total;
  }
  HWY_INLINE void prefetch(int64_t i) const {
    prefetch_block(accumulator + i);
    for (size_t s = 0; s < count; ++s) prefetch_block(at(s) + i);
  }
};

// Calls work(kind of gradient).
template <typename T, class Work>
HWY_INLINE void with_typed(const GradientSources& gradient, const Work& work) {
  const size_t count = gradient.sources.size();
  const void* const* sources = gradient.sources.data();
  if (gradient.accumulator != nullptr) {
    if (count == 0) return work(Single<float>{gradient.accumulator});
    return work(OntoAccumulator<T>{gradient.accumulator, sources, count});
  }
  if (count == 1) return work(Single<T>{static_cast<const T*>(sources[0])});
  work(Sources<T>{sources, count, static_cast<size_t>(gradient.group_size)});
}

template <class Work>
HWY_INLINE void with_gradient(const GradientSources& gradient, const Work& work) {
  gradient.type == DType::bf16 ? with_typed<uint16_t>(gradient, work) : with_typed<float>(gradient, work);
}

template <UpdatePart part, class D>
HWY_INLINE void update_vector(D d, const State& state, int64_t i, Vec<D> sum, const AdamScalars& s, float decay) {
  const hn::RebindToUnsigned<D> bits;
  const hn::Rebind<uint16_t, D> half;
  const auto g = hn::Mul(sum, hn::Set(d, s.gradient_scale));
  const auto old_m = hn::LoadU(d, state.m + i);
  const auto old_v = hn::LoadU(d, state.v + i);
  const auto m = hn::Add(old_m, hn::Mul(hn::Set(d, s.one_minus_beta1), hn::Sub(g, old_m)));
  const auto v = hn::Add(hn::Mul(old_v, hn::Set(d, s.beta2)), hn::Mul(hn::Mul(hn::Set(d, s.one_minus_beta2), g), g));
  if constexpr (part != UpdatePart::moments) {
    const auto lo = load_bits(d, state.lo + i);
    const auto carried = hn::Sub(load_bits(d, state.hi + i), hn::ShiftRight<15>(lo));  // see join_master
    const auto p = hn::BitCast(d, hn::Or(hn::ShiftLeft<16>(carried), lo));
    const auto denominator = hn::Add(hn::Div(hn::Sqrt(v), hn::Set(d, s.bias_correction2_sqrt)), hn::Set(d, s.eps));
    const auto step = hn::Div(hn::Mul(hn::Set(d, s.step_size), m), denominator);
    const auto master = hn::BitCast(bits, hn::Sub(hn::Mul(p, hn::Set(d, decay)), step));
    const auto rounded = hn::ShiftRight<16>(hn::Add(master, hn::Set(bits, 0x8000u)));  // see split_master
    hn::StoreU(hn::TruncateTo(half, rounded), half, state.hi + i);
    hn::StoreU(hn::TruncateTo(half, master), half, state.lo + i);
  }
  if constexpr (part != UpdatePart::weights) {
    hn::StoreU(m, d, state.m + i);
    hn::StoreU(v, d, state.v + i);
  }
}

template <UpdatePart part, class Gradient>
void update_range(const State state, const Gradient gradient, int64_t count, const AdamScalars s, float decay) {
  const Full d;
  int64_t i = 0;
  for (; i + kBlockElements <= count; i += kBlockElements) {
    gradient.prefetch(i + kAhead);
    prefetch_block(state.m + i + kAhead);
    prefetch_block(state.v + i + kAhead);
    if constexpr (part != UpdatePart::moments) {
      prefetch_block(state.hi + i + kAhead);
      prefetch_block(state.lo + i + kAhead);
    }
    for (int64_t j = i; j < i + kBlockElements; j += static_cast<int64_t>(hn::Lanes(d))) {
      update_vector<part>(d, state, j, gradient.sum(d, j), s, decay);
    }
  }
  for (; i < count; ++i) update_vector<part>(One(), state, i, gradient.sum(One(), i), s, decay);
}

void update(const State& state, const GradientSources& gradient, int64_t count, const AdamScalars& s, float decay,
            UpdatePart part) {
  with_gradient(gradient, [&](const auto& kind) HWY_ATTR {
    switch (part) {
      case UpdatePart::whole:
        return update_range<UpdatePart::whole>(state, kind, count, s, decay);
      case UpdatePart::weights:
        return update_range<UpdatePart::weights>(state, kind, count, s, decay);
      case UpdatePart::moments:
        return update_range<UpdatePart::moments>(state, kind, count, s, decay);
    }
  });
}

// Eight interleaved partial sums of the squares, folded in a fixed order.
HWY_INLINE double square_block(const float* block) {
  const hn::CappedTag<double, 8> d;
  const hn::Rebind<float, decltype(d)> narrow;
  constexpr int64_t kParts = 8;
  alignas(64) std::array<double, kParts> part;
  for (int64_t j = 0; j < kParts; j += static_cast<int64_t>(hn::Lanes(d))) {
    auto sum = hn::Zero(d);
    for (int64_t i = j; i < kBlockElements; i += kParts) {
      const auto value = hn::PromoteTo(d, hn::LoadU(narrow, block + i));
      sum = hn::MulAdd(value, value, sum);  // the square is exact
    }
    hn::StoreU(sum, d, part.data() + j);
  }
  return ((part[0] + part[4]) + (part[2] + part[6])) + ((part[1] + part[5]) + (part[3] + part[7]));
}

// The sums of `count` (1 to 64) elements from `begin` on, zeros behind them.
template <class Gradient>
HWY_INLINE void sum_block(const Gradient& gradient, int64_t begin, int64_t count, float* block) {
  const Full d;
  if (count == kBlockElements) {
    for (int64_t j = 0; j < kBlockElements; j += static_cast<int64_t>(hn::Lanes(d))) {
      hn::StoreU(gradient.sum(d, begin + j), d, block + j);
    }
    return;
  }
  for (int64_t j = 0; j < count; ++j) hn::StoreU(gradient.sum(One(), begin + j), One(), block + j);
  std::fill(block + count, block + kBlockElements, 0.0f);
}

void square(const GradientSources& gradient, int64_t count, double* block_sums) {
  with_gradient(gradient, [&](const auto& kind) HWY_ATTR {
    alignas(64) std::array<float, kBlockElements> block;
    for (int64_t i = 0; i < count; i += kBlockElements) {
      kind.prefetch(i + kAhead);
      sum_block(kind, i, std::min(kBlockElements, count - i), block.data());
      *block_sums++ = square_block(block.data());
    }
  });
}

// The accumulator is written past the caches when `stream`: it is then aligned to 64 bytes.
template <bool stream>
HWY_INLINE void store_block(const float* block, int64_t count, float* to) {
  const Full d;
  if (count < kBlockElements) {
    std::copy_n(block, count, to);
    return;
  }
  for (int64_t j = 0; j < kBlockElements; j += static_cast<int64_t>(hn::Lanes(d))) {
    const auto values = hn::Load(d, block + j);
    if constexpr (stream) {
      hn::Stream(values, d, to + j);
    } else {
      hn::StoreU(values, d, to + j);
    }
  }
}

template <bool stream>
void accumulate_range(float* accumulator, const GradientSources& gradient, int64_t count, double* block_sums) {
  with_gradient(gradient, [&](const auto& kind) HWY_ATTR {
    alignas(64) std::array<float, kBlockElements> block;
    for (int64_t i = 0; i < count; i += kBlockElements) {
      kind.prefetch(i + kAhead);
      const int64_t elements = std::min(kBlockElements, count - i);
      sum_block(kind, i, elements, block.data());
      store_block<stream>(block.data(), elements, accumulator + i);
      if (block_sums != nullptr) *block_sums++ = square_block(block.data());
    }
  });
  if constexpr (stream) hwy::FlushStream();
}

void accumulate(float* accumulator, const GradientSources& wave, int64_t count, bool first, double* block_sums) {
  GradientSources gradient = wave;
  gradient.group_size = static_cast<int>(wave.sources.size());
  if (!first) gradient.accumulator = accumulator;
  const bool stream = first && reinterpret_cast<uintptr_t>(accumulator) % 64 == 0;
  stream ? accumulate_range<true>(accumulator, gradient, count, block_sums)
         : accumulate_range<false>(accumulator, gradient, count, block_sums);
}

const char* target() { return hwy::TargetName(HWY_TARGET); }

}  // namespace slidedp::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace slidedp::kernels {

HWY_EXPORT(update);
HWY_EXPORT(square);
HWY_EXPORT(accumulate);
HWY_EXPORT(target);

void update(const State& state, const GradientSources& gradient, int64_t count, const AdamScalars& scalars, float decay,
            UpdatePart part) {
  HWY_DYNAMIC_DISPATCH(update)(state, gradient, count, scalars, decay, part);
}

void square(const GradientSources& gradient, int64_t count, double* block_sums) {
  HWY_DYNAMIC_DISPATCH(square)(gradient, count, block_sums);
}

void accumulate(float* accumulator, const GradientSources& wave, int64_t count, bool first, double* block_sums) {
  HWY_DYNAMIC_DISPATCH(accumulate)(accumulator, wave, count, first, block_sums);
}

const char* target() { return HWY_DYNAMIC_DISPATCH(target)(); }

}  // namespace slidedp::kernels
#endif  // HWY_ONCE
