#include "runtime/nn/cuda/cuda_compute.h"

#include <ATen/Context.h>
#include <c10/core/InferenceMode.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <set>
#include <stdexcept>
#include <tuple>
#include <utility>
#include <vector>

#include "model/base/error.h"
#include "model/cost/activations.h"
#include "runtime/nn/cuda/attention.h"
#include "runtime/nn/cuda/context.h"
#include "runtime/nn/cuda/head.h"
#include "runtime/nn/cuda/layer.h"
#include "runtime/nn/kernels.h"
#include "runtime/nn/kernels/convert.h"
#include "runtime/nn/kernels/embedding.h"
#include "runtime/nn/kernels/rms_norm.h"
#include "runtime/nn/matrix_products.h"

namespace slidedp {
namespace {

namespace allocator = c10::cuda::CUDACachingAllocator;

// GPUs that have, or had, a compute object.
struct KnownDevices {
  std::mutex mutex;
  std::set<int> ordinals;
  static KnownDevices& get() {
    static KnownDevices known;
    return known;
  }
};

c10::cuda::CUDAStream wrap(cudaStream_t stream, int device) {
  const auto index = static_cast<c10::DeviceIndex>(device);
  return stream == nullptr ? c10::cuda::getDefaultCUDAStream(index) : c10::cuda::getStreamFromExternal(stream, index);
}

// Every entry point: no autograd; ATen works on the given stream and GPU.
struct Entry {
  Entry(cudaStream_t stream, int device) : guard(wrap(stream, device)) {}
  c10::InferenceMode no_autograd;
  c10::cuda::CUDAStreamGuard guard;
};

void check_supported(const ModelSpec& model, const Plan& plan) {
  if (plan.compute != DType::bf16) fail("The CUDA backend computes in bf16: set the plan's `compute` to bf16.");
  if (plan.head_chunk_tokens < 1) fail("The plan's `head_chunk_tokens` must be at least 1.");
  const auto in_vectors = [&](const char* key, int64_t size) {
    if (size % nn::kVectorElements == 0) return;
    fail("The CUDA backend needs a multiple of 8 for the model's " + std::string(key) + ", not " +
         std::to_string(size) + ": train this model on the cpu backend.");
  };
  in_vectors("hidden_size", model.hidden);
  in_vectors("intermediate_size", model.intermediate);
  in_vectors("head_dim", model.head_dim);
  if (model.hidden > nn::kMaxNormWidth) {
    fail("The CUDA backend takes a hidden_size of at most " + std::to_string(nn::kMaxNormWidth) + ", not " +
         std::to_string(model.hidden) + ".");
  }
  if (model.head_dim > 256) {
    fail("The CUDA backend takes a head_dim of at most 256, not " + std::to_string(model.head_dim) + ".");
  }
}

// One measurement a process for the same GPU and shapes, also if ranks share a GPU: a second one would be disturbed by,
// and disturb, the first rank's work.
nn::CudaAttention::Choice measured_choice(const ModelSpec& model, const Plan& plan, const nn::CudaContext& context) {
  using Shape = std::tuple<int, int64_t, int64_t, int64_t, int64_t, int64_t>;
  static std::mutex mutex;
  static std::map<Shape, nn::CudaAttention::Choice> known;
  const std::lock_guard lock(mutex);
  const Shape shape{context.device, model.heads, model.kv_heads, model.head_dim, plan.seq, plan.micro_batch_rows};
  const auto found = known.find(shape);
  if (found != known.end()) return found->second;
  nn::CudaAttention::Choice choice = nn::CudaAttention::measure(model, plan, context);
  allocator::emptyCache();
  known.emplace(shape, choice);
  return choice;
}

class CudaComputeImpl final : public CudaCompute, public MatrixProducts {
 public:
  CudaComputeImpl(const ModelSpec& model, const ModelLayout& layout, const Plan& plan, int device, void* stream,
                  CudaComputeOptions options)
      : model_(model),
        layout_(layout),
        plan_(plan),
        device_(device),
        stream_(static_cast<cudaStream_t>(stream)),
        options_(std::move(options)) {
    at::globalContext().lazyInitDevice(c10::DeviceType::CUDA);
    {
      KnownDevices& known = KnownDevices::get();
      const std::lock_guard lock(known.mutex);
      known.ordinals.insert(device);
    }
    const Entry entry(stream_, device_);
    // One piece: the allocator rounds each up.
    kept_ = nn::device_bytes(kCudaProductWorkspaceBytes + cuda_rope_table_bytes(model_, plan_), device_);
    gemm_ = std::make_unique<nn::Gemm>(kept_.data_ptr(), kCudaProductWorkspaceBytes);
    fill_rope_table();
    attention_ = std::make_unique<nn::CudaAttention>(model_, options_.deterministic
                                                                 ? nn::CudaAttention::deterministic()
                                                                 : measured_choice(model_, plan_, context(stream_)));
  }

  // Gives the memory back to the device: blocks of a stream that is gone would serve nobody. The caller has waited for
  // the work.
  ~CudaComputeImpl() override {
    attention_.reset();
    gemm_.reset();
    kept_.reset();
    try {
      allocator::emptyCache();
    } catch (const std::exception&) {
      // The GPU has failed, which its device reports.
    }
  }

  void embedding_forward(const void* weights, const MicroBatch& batch, void* hidden_out) override {
    run([&](const nn::CudaContext& context) {
      nn::embedding_gather(static_cast<const uint16_t*>(weights) + embedding_offset(), batch.ids, batch.tokens(),
                           model_.hidden, model_.vocabulary, static_cast<uint16_t*>(hidden_out), context.stream);
    });
  }

  void embedding_backward(const MicroBatch& batch, const void* hidden_gradient, void* gradients, int64_t rows,
                          bool first) override {
    run([&](const nn::CudaContext& context) {
      const nn::CudaGradientSlot slot{gradients, plan_.accumulator, first};
      if (rows == model_.vocabulary) slot.zero_gaps(layout_.embedding(), context.stream);
      const at::Tensor scratch = context.bytes(nn::embedding_scratch_bytes(batch.tokens(), model_.hidden));
      nn::embedding_scatter(batch.ids, batch.tokens(), model_.hidden, static_cast<const uint16_t*>(hidden_gradient),
                            rows, slot.at(embedding_offset()), scratch.data_ptr(), context.stream);
    });
  }

  void block_forward(LayerBlock block, int layer, const void* weights, const MicroBatch& batch, const void* hidden_in,
                     void* saved, void* hidden_out) override {
    run([&](const nn::CudaContext& context) {
      this->layer(context, layer, weights, batch, hidden_in, saved).forward(block, static_cast<uint16_t*>(hidden_out));
    });
  }

  void block_backward(LayerBlock block, int layer, const void* weights, const MicroBatch& batch, const void* hidden_in,
                      void* saved, void* hidden_gradient, void* gradients, bool first) override {
    run([&](const nn::CudaContext& context) {
      this->layer(context, layer, weights, batch, hidden_in, saved)
          .backward(block, static_cast<uint16_t*>(hidden_gradient), {gradients, plan_.accumulator, first});
    });
  }

  void head(const void* weights, const void* vocabulary, const MicroBatch& batch, const void* hidden_in,
            void* hidden_gradient, void* gradients, void* vocabulary_gradients, bool first, double* loss_sum) override {
    run([&](const nn::CudaContext& context) {
      const UnitLayout& unit = layout_.head();
      const nn::CudaGradientSlot slot{gradients, plan_.accumulator, first};
      const nn::CudaGradientSlot matrix_slot{model_.tied ? vocabulary_gradients : gradients, plan_.accumulator, first};
      slot.zero_gaps(unit, context.stream);
      if (model_.tied) matrix_slot.zero_gaps(layout_.embedding(), context.stream);
      const int64_t norm_offset = unit.at(TensorRole::final_norm).offset;
      const int64_t matrix_offset = model_.tied ? embedding_offset() : unit.at(TensorRole::lm_head).offset;
      const auto* matrix = static_cast<const uint16_t*>(model_.tied ? vocabulary : weights) + matrix_offset;
      const nn::CudaHeadCall call{model_,
                                  batch,
                                  plan_.head_chunk_tokens,
                                  static_cast<const uint16_t*>(weights) + norm_offset,
                                  matrix,
                                  slot,
                                  norm_offset,
                                  matrix_slot,
                                  matrix_offset};
      nn::cuda_head(context, call, static_cast<const uint16_t*>(hidden_in), static_cast<uint16_t*>(hidden_gradient),
                    loss_sum);
    });
  }

  void product(ProductPass pass, int64_t tokens, int64_t inputs, int64_t outputs, const void* a, const void* b,
               void* out) override {
    run([&](const nn::CudaContext& context) {
      const auto *left = static_cast<const uint16_t*>(a), *right = static_cast<const uint16_t*>(b);
      if (pass == ProductPass::forward) {
        context.multiply({.rows = tokens,
                          .columns = outputs,
                          .inner = inputs,
                          .a = {.data = left, .stride = inputs},
                          .b = {.data = right, .stride = inputs, .transposed = true},
                          .out = out,
                          .out_stride = outputs});
      } else if (pass == ProductPass::input_gradient) {
        nn::input_gradient(context, left, outputs, right, inputs, tokens, static_cast<uint16_t*>(out));
      } else {
        const nn::CudaGradientSlot slot{out, plan_.accumulator, true};
        nn::weight_gradient(context, slot, 0, left, outputs, right, inputs, tokens);
      }
    });
  }

  // Takes no temporaries and no workspace, so it may run beside the rest on another stream.
  void cast(const void* from, DType from_type, void* to, DType to_type, int64_t elements) override {
    const cudaStream_t stream = current_stream();
    const c10::cuda::CUDAGuard guard(static_cast<c10::DeviceIndex>(device_));
    if (from_type == to_type) {
      if (from == to) return;
      nn::check_cuda(cudaMemcpyAsync(to, from, static_cast<size_t>(elements * size_of(from_type)),
                                     cudaMemcpyDeviceToDevice, stream),
                     "cudaMemcpyAsync");
    } else if (from_type == DType::fp32) {
      nn::narrow_to_bf16(static_cast<const float*>(from), static_cast<uint16_t*>(to), elements, stream);
    } else {
      nn::widen_to_fp32(static_cast<const uint16_t*>(from), static_cast<float*>(to), elements, stream);
    }
  }

  const std::string& attention_report() const override { return attention_->report(); }

 private:
  cudaStream_t current_stream() const {
    return options_.current_stream ? static_cast<cudaStream_t>(options_.current_stream()) : stream_;
  }
  nn::CudaContext context(cudaStream_t stream) const { return {device_, stream, *gemm_}; }

  template <typename Work>
  void run(const Work& work) {
    const cudaStream_t stream = current_stream();
    const Entry entry(stream, device_);
    take_temporaries(stream);
    work(context(stream));
  }

  // All large temporaries at once, as one block of the caching allocator: what follows is cut from it and given back to
  // it, so the device's memory is asked for once and does not fragment.
  void take_temporaries(cudaStream_t stream) {
    if (taken_for_ == std::make_pair(true, stream)) return;
    const int64_t bytes = cuda_temporary_block_bytes(model_, plan_);
    try {
      const at::Tensor block = context(stream).bytes(bytes);
    } catch (const c10::OutOfMemoryError&) {
      size_t free = 0, total = 0;
      nn::check_cuda(cudaMemGetInfo(&free, &total), "cudaMemGetInfo");
      fail("The plan's temporaries need " + std::to_string(bytes) + " bytes of GPU " + std::to_string(device_) +
           ", which has " + std::to_string(free) + " of " + std::to_string(total) +
           " bytes free: end what else uses this GPU, or make a plan for less memory.");
    }
    taken_for_ = {true, stream};
  }

  nn::CudaLayer layer(const nn::CudaContext& context, int layer, const void* weights, const MicroBatch& batch,
                      const void* hidden_in, void* saved) {
    if (batch.document_starts.empty() || batch.document_starts.front() != 0) {
      throw std::logic_error("MicroBatch::document_starts must begin with 0");
    }
    const auto index = static_cast<size_t>(layer);
    return {context, *attention_, model_, layout_.units.at(index + 1), plan_.activation.at(index), table_, batch,
            weights, hidden_in,   saved};
  }

  void fill_rope_table() {
    const int64_t half = model_.head_dim / 2, elements = plan_.seq * half;
    std::vector<float> cos(static_cast<size_t>(elements)), sin(cos.size());
    nn::fill_rope_table(nn::rope_frequencies(model_.rope, model_.head_dim), plan_.seq, cos.data(), sin.data());
    auto* place = reinterpret_cast<float*>(static_cast<std::byte*>(kept_.data_ptr()) + kCudaProductWorkspaceBytes);
    const size_t bytes = cos.size() * sizeof(float);
    nn::check_cuda(cudaMemcpyAsync(place, cos.data(), bytes, cudaMemcpyHostToDevice, stream_), "cudaMemcpyAsync");
    nn::check_cuda(cudaMemcpyAsync(place + elements, sin.data(), bytes, cudaMemcpyHostToDevice, stream_),
                   "cudaMemcpyAsync");
    // Other streams may use the table.
    nn::check_cuda(cudaStreamSynchronize(stream_), "cudaStreamSynchronize");
    table_ = {place, place + elements, plan_.seq};
  }

  int64_t embedding_offset() const { return layout_.embedding().at(TensorRole::embedding).offset; }

  ModelSpec model_;
  ModelLayout layout_;
  Plan plan_;
  int device_;
  cudaStream_t stream_;
  CudaComputeOptions options_;
  at::Tensor kept_;  // the products' workspace, then the table of rotations
  std::unique_ptr<nn::Gemm> gemm_;
  nn::CudaRopeTable table_;
  std::unique_ptr<nn::CudaAttention> attention_;
  std::pair<bool, cudaStream_t> taken_for_{false, nullptr};  // whether, and for which stream
};

}  // namespace

std::unique_ptr<CudaCompute> make_cuda_compute(const ModelSpec& model, const ModelLayout& layout, const Plan& plan,
                                               int device_ordinal, void* cuda_stream, CudaComputeOptions options) {
  check_supported(model, plan);
  return std::make_unique<CudaComputeImpl>(model, layout, plan, device_ordinal, cuda_stream, std::move(options));
}

CudaTemporaries cuda_temporaries() {
  KnownDevices& known = KnownDevices::get();
  const std::lock_guard lock(known.mutex);
  CudaTemporaries sum;
  for (const int device : known.ordinals) {
    const auto stats = allocator::getDeviceStats(static_cast<c10::DeviceIndex>(device));
    // The first entry of every statistic is the sum over the allocator's pools.
    sum.in_use += stats.allocated_bytes[0].current;
    sum.peak += stats.allocated_bytes[0].peak;
    sum.reserved += stats.reserved_bytes[0].current;
  }
  return sum;
}

void reset_cuda_temporaries_peak() {
  KnownDevices& known = KnownDevices::get();
  const std::lock_guard lock(known.mutex);
  for (const int device : known.ordinals) allocator::resetPeakStats(static_cast<c10::DeviceIndex>(device));
}

}  // namespace slidedp
