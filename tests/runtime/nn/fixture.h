// Small models, batches and slots for the tests of the CPU compute. No torch types.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <ostream>
#include <span>
#include <string>
#include <vector>

#include "model/spec/layout.h"
#include "model/spec/model_spec.h"
#include "model/spec/plan.h"
#include "runtime/nn/compute.h"

namespace slidedp {

// For googletest: parameters are printed by name.
inline void PrintTo(const ModelSpec& model, std::ostream* out) { *out << model.name; }

// Device-like memory: aligned to 256 bytes, `shift` elements of a further 64 bytes into a block, filled with a pattern
// that is NaN in fp32 and bf16, so that reading what nobody wrote shows.
template <typename T>
class Slot {
 public:
  explicit Slot(int64_t elements, int shift = 0) : elements_(elements) {
    const size_t bytes = static_cast<size_t>(round_up(elements * static_cast<int64_t>(sizeof(T)), 256)) + 4096;
    block_.reset(static_cast<char*>(std::aligned_alloc(256, round_up(static_cast<int64_t>(bytes), 256))));
    std::fill_n(block_.get(), bytes, static_cast<char>(0xff));
    data_ = reinterpret_cast<T*>(block_.get() + 64 * shift);
  }
  T* data() const { return data_; }
  int64_t elements() const { return elements_; }
  std::span<T> span() const { return {data_, static_cast<size_t>(elements_)}; }
  std::vector<T> copy() const { return {data_, data_ + elements_}; }

 private:
  struct Free {
    void operator()(char* pointer) const { std::free(pointer); }
  };
  std::unique_ptr<char, Free> block_;
  int64_t elements_;
  T* data_;
};

// Models that together use every feature of a layer; sizes are no multiples of a vector register.
ModelSpec llama_model();  // grouped heads, untied
std::vector<ModelSpec> all_models();

Plan plan_for(const ModelSpec& model, int64_t rows, int64_t seq, int threads = 1,
              ActivationPolicy policy = ActivationPolicy::keep);  // of every layer

// Weights of one unit: matrices ~ 1/sqrt(inputs), norms around 1, gaps NaN.
Slot<uint16_t> random_weights(const UnitLayout& unit, uint32_t seed);
Slot<float> random_hidden(int64_t elements, uint32_t seed, double scale = 1.0);

// Rows of `seq` tokens with documents of the given lengths one after another (they sum to rows * seq and none crosses a
// row). A document's first token and every fifth token are no targets; targets are the next token of the document.
struct TestBatch {
  TestBatch(const ModelSpec& model, int64_t rows, int64_t seq, std::vector<int64_t> documents, uint32_t seed);
  std::vector<int32_t> ids, targets, positions, starts;
  int64_t rows, seq;
  MicroBatch micro_batch() const { return {rows, seq, ids.data(), targets.data(), positions.data(), starts}; }
};

// |a - b| / |b|
double relative_difference(std::span<const float> a, std::span<const double> b);

}  // namespace slidedp
