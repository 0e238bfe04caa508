// One matrix product of a layer on its own, for measuring: what a Compute also is if its backend can do them apart.
#pragma once

#include <cstdint>

namespace slidedp {

// With activations [tokens, inputs] in the compute type, a bf16 matrix [outputs, inputs] and slopes [tokens, outputs]:
enum class ProductPass : uint8_t {
  forward,         // out [tokens, outputs] = activations (a) * matrix (b) transposed
  input_gradient,  // out [tokens, inputs] = slopes (a) * matrix (b)
  weight_gradient  // out [outputs, inputs], in the accumulator's type, = slopes (a) transposed * activations (b)
};

class MatrixProducts {
 public:
  virtual ~MatrixProducts() = default;
  // As the layer's passes do it. Device memory; inside Device::launch, as Compute's functions.
  virtual void product(ProductPass pass, int64_t tokens, int64_t inputs, int64_t outputs, const void* a, const void* b,
                       void* out) = 0;
};

}  // namespace slidedp
