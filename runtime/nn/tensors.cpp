#include "runtime/nn/tensors.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <dlfcn.h>

#include <algorithm>
#include <stdexcept>
#include <string>

#include "runtime/nn/kernels.h"

// libtorch carries MKL and exports its Fortran BLAS (32-bit integers).
extern "C" void sgemm_(const char* transa, const char* transb, const int* m, const int* n, const int* k,
                       const float* alpha, const float* a, const int* lda, const float* b, const int* ldb,
                       const float* beta, float* c, const int* ldc);

namespace slidedp::nn {
namespace {

using BlasInt = int;

// MKL splits a product by the number of its threads, sometimes along the summed dimension, which changes bits. So each
// product is cut here into blocks of a fixed size, each computed by one thread.
constexpr int64_t kBlockRows = 256, kBlockColumns = 256;

// A matrix as BLAS wants it: rows or columns dense, `stride` elements between them.
struct Operand {
  const float* data;
  char transposed;
  BlasInt stride;
};

Operand operand(const at::Tensor& matrix) {
  if (matrix.stride(1) == 1) return {matrix.const_data_ptr<float>(), 'N', static_cast<BlasInt>(matrix.stride(0))};
  if (matrix.stride(0) == 1) return {matrix.const_data_ptr<float>(), 'T', static_cast<BlasInt>(matrix.stride(1))};
  throw std::logic_error("a matrix operand must have dense rows or columns");
}

}  // namespace

void check_blas() {
  Dl_info found{};
  const bool known = dladdr(reinterpret_cast<void*>(&sgemm_), &found) != 0;
  const std::string library = known && found.dli_fname != nullptr ? found.dli_fname : "";
  if (library.find("libtorch") != std::string::npos) return;
  throw std::logic_error("matrix products would run in " + library +
                         " instead of libtorch: link libtorch before every other BLAS");
}

at::Tensor view(float* data, int64_t rows, int64_t columns, int64_t stride) {
  return at::from_blob(data, {rows, columns}, {stride == 0 ? columns : stride, 1}, at::dtype(at::kFloat));
}

at::Tensor view(const float* data, int64_t rows, int64_t columns) {
  return view(const_cast<float*>(data), rows, columns);
}

at::Tensor matrix(int64_t rows, int64_t columns) { return at::empty({rows, columns}, at::dtype(at::kFloat)); }

at::Tensor saved_or_temporary(float* saved, int64_t rows, int64_t columns) {
  return saved != nullptr ? view(saved, rows, columns) : matrix(rows, columns);
}

at::Tensor weights_as_fp32(const uint16_t* data, int64_t rows, int64_t columns) {
  at::Tensor result = matrix(rows, columns);
  widen(data, result.data_ptr<float>(), rows * columns);
  return result;
}

void multiply(at::Tensor& out, const at::Tensor& a, const at::Tensor& b, bool add) {
  const BlasInt depth = static_cast<BlasInt>(a.size(1));
  const Operand left = operand(a), right = operand(b);
  float* to = out.data_ptr<float>();
  const BlasInt out_stride = static_cast<BlasInt>(out.stride(0));
  const float alpha = 1.0f, beta = add ? 1.0f : 0.0f;
  const int64_t columns = ceil_div(b.size(1), kBlockColumns), blocks = ceil_div(a.size(0), kBlockRows) * columns;
  at::parallel_for(0, blocks, 1, [&](int64_t first, int64_t last) {
    for (int64_t block = first; block < last; ++block) {
      const int64_t row = block / columns * kBlockRows, column = block % columns * kBlockColumns;
      const BlasInt m = static_cast<BlasInt>(std::min(kBlockRows, a.size(0) - row));
      const BlasInt n = static_cast<BlasInt>(std::min(kBlockColumns, b.size(1) - column));
      // BLAS counts columns first: it sees the transposes of all three, so out^T = b^T a^T.
      sgemm_(&right.transposed, &left.transposed, &n, &m, &depth, &alpha, right.data + column * b.stride(1),
             &right.stride, left.data + row * a.stride(0), &left.stride, &beta, to + row * out.stride(0) + column,
             &out_stride);
    }
  });
}

}  // namespace slidedp::nn
