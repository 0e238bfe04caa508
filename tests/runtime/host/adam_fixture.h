// Random host state and gradients for the tests of the update.
#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <random>
#include <span>
#include <stdexcept>
#include <vector>

#include "runtime/host/cpu_adam.h"
#include "runtime/host/host_state.h"

namespace slidedp {

// One range's state in vectors.
struct TestState {
  std::vector<uint16_t> hi, lo;
  std::vector<float> m, v;
  explicit TestState(size_t elements) : hi(elements), lo(elements), m(elements), v(elements) {}
  float master(size_t i) const { return join_master({hi[i], lo[i]}); }
  void set_master(size_t i, float value) {
    const HiLo parts = split_master(value);
    hi[i] = parts.hi;
    lo[i] = parts.lo;
  }
  UnitState view() { return {hi, lo, m, v}; }
  bool operator==(const TestState& other) const {  // of bits
    const auto same = [](const std::vector<float>& a, const std::vector<float>& b) {
      return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                        [](float x, float y) { return std::bit_cast<uint32_t>(x) == std::bit_cast<uint32_t>(y); });
    };
    return hi == other.hi && lo == other.lo && same(m, other.m) && same(v, other.v);
  }
};

// Weights about 1, moments like those of gradients about 1e-2, over many magnitudes, some exactly zero.
inline TestState random_state(size_t elements, uint32_t seed) {
  TestState state(elements);
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  for (size_t i = 0; i < elements; ++i) {
    const float scale = std::ldexp(1.0f, static_cast<int>(random() % 20) - 15);
    state.set_master(i, normal(random));
    state.m[i] = i % 17 == 0 ? 0.0f : 1e-2f * scale * normal(random);
    state.v[i] = i % 17 == 0 ? 0.0f : std::pow(1e-2f * scale * normal(random), 2.0f);
  }
  return state;
}

// `sources` arrays of random gradients of one type; some are zero or subnormal.
class TestGradient {
 public:
  TestGradient(int sources, int group_size, DType type, size_t elements, uint32_t seed)
      : group_size_(group_size), type_(type) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    for (int s = 0; s < sources; ++s) {
      std::vector<float>& values = values_.emplace_back(elements);
      std::vector<uint16_t>& narrow = narrow_.emplace_back(elements);
      for (size_t i = 0; i < elements; ++i) {
        float value = normal(random) * std::ldexp(1.0f, static_cast<int>(random() % 12) - 6);
        if (i % 29 == 3) value = 0.0f;
        if (i % 31 == 5) value = std::bit_cast<float>(static_cast<uint32_t>(random()) & 0x807fffffu);  // subnormal
        narrow[i] = split_master(value).hi;
        values[i] = type == DType::bf16 ? std::bit_cast<float>(static_cast<uint32_t>(narrow[i]) << 16) : value;
      }
    }
    for (size_t s = 0; s < values_.size(); ++s) {
      pointers_.push_back(type == DType::bf16 ? static_cast<const void*>(narrow_[s].data()) : values_[s].data());
    }
  }
  TestGradient(const TestGradient&) = delete;  // pointers_ point into this object
  TestGradient& operator=(const TestGradient&) = delete;
  // Overwrites one element of one source.
  void set(int source, size_t index, float value) {
    narrow_[static_cast<size_t>(source)][index] = split_master(value).hi;
    values_[static_cast<size_t>(source)][index] = value;
  }
  GradientSources sources() const { return {pointers_, group_size_, type_}; }
  // The same, from element `begin` on. The result's pointers live in `keep`.
  GradientSources from(int64_t begin, std::vector<const void*>& keep) const {
    keep.clear();
    for (const void* pointer : pointers_) {
      keep.push_back(static_cast<const std::byte*>(pointer) + begin * size_of(type_));
    }
    return {keep, group_size_, type_};
  }
  // Element i of one source.
  float value(int source, size_t i) const { return values_[static_cast<size_t>(source)][i]; }
  // Sum of element i as the contract says: in fp32, in order inside a group, then the groups.
  float sum(size_t i) const {
    float total = 0;
    for (size_t group = 0; group < values_.size(); group += static_cast<size_t>(group_size_)) {
      float part = values_[group][i];
      for (int s = 1; s < group_size_; ++s) part += values_[group + static_cast<size_t>(s)][i];
      total = group == 0 ? part : total + part;
    }
    return total;
  }

 private:
  int group_size_;
  DType type_;
  std::vector<std::vector<float>> values_;
  std::vector<std::vector<uint16_t>> narrow_;
  std::vector<const void*> pointers_;
};

// A block of memory that faults on what `protection` (PROT_NONE, PROT_READ) does not allow.
class GuardedMemory {
 public:
  template <typename T>
  explicit GuardedMemory(std::span<const T> content, int protection) : bytes_(content.size_bytes()) {
    data_ = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (data_ == MAP_FAILED) throw std::runtime_error("GuardedMemory: mmap failed");
    std::memcpy(data_, content.data(), bytes_);
    if (mprotect(data_, bytes_, protection) != 0) throw std::runtime_error("GuardedMemory: mprotect failed");
  }
  GuardedMemory(const GuardedMemory&) = delete;
  GuardedMemory& operator=(const GuardedMemory&) = delete;
  ~GuardedMemory() { munmap(data_, bytes_); }
  template <typename T>
  std::span<T> view() const {
    return {static_cast<T*>(data_), bytes_ / sizeof(T)};
  }

 private:
  void* data_;
  size_t bytes_;
};

// The reference: element i of `state` in one rounded operation after another (volatile keeps the compiler from fusing).
inline void update_in_scalar_code(TestState& state, size_t i, float sum, const AdamScalars& s, float decay) {
  const volatile float g = sum * s.gradient_scale;
  const volatile float difference = g - state.m[i];
  const volatile float first_step = s.one_minus_beta1 * difference;
  state.m[i] += first_step;
  const volatile float kept_v = state.v[i] * s.beta2;
  const volatile float scaled = s.one_minus_beta2 * g;
  const volatile float square = scaled * g;
  state.v[i] = kept_v + square;
  const volatile float root = std::sqrt(state.v[i]);
  const volatile float corrected = root / s.bias_correction2_sqrt;
  const volatile float denominator = corrected + s.eps;
  const volatile float numerator = s.step_size * state.m[i];
  const volatile float update = numerator / denominator;
  const volatile float kept = state.master(i) * decay;
  state.set_master(i, kept - update);
}

inline AdamScalars test_scalars() {
  AdamScalars s;
  s.beta1 = 0.9f;
  s.beta2 = 0.999f;
  s.one_minus_beta1 = 0.1f;
  s.one_minus_beta2 = 0.001f;
  s.eps = 1e-8f;
  s.step_size = 1e-3f / 0.271f;
  s.bias_correction2_sqrt = std::sqrt(1 - 0.999f * 0.999f * 0.999f);
  s.decay = 1 - 1e-3f * 0.1f;
  s.gradient_scale = 1.0f / 77;
  return s;
}

}  // namespace slidedp
