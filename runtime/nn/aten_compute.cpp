#include "runtime/nn/aten_compute.h"

#include <ATen/Parallel.h>
#include <c10/core/InferenceMode.h>

#include <cstring>
#include <mutex>
#include <stdexcept>
#include <string>

#include "model/base/error.h"
#include "runtime/nn/counting_allocator.h"
#include "runtime/nn/decoder_layer.h"
#include "runtime/nn/embedding.h"
#include "runtime/nn/head.h"
#include "runtime/nn/matrix_products.h"
#include "runtime/nn/tensors.h"

// Exported by libtorch, which carries MKL: the number of MKL threads of the calling thread.
extern "C" int MKL_Set_Num_Threads_Local(int threads);

namespace slidedp {
namespace {

// ATen's intra-op threads are a setting of the calling thread, so it is made on the thread that computes.
// at::set_num_threads also writes process-wide state: one thread at a time.
void use_threads(int threads) {
  thread_local int configured = 0;
  if (configured == threads && at::get_num_threads() == threads) return;
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  static_cast<void>(at::get_num_threads());  // the thread's own first-use default comes before, not after
  at::set_num_threads(threads);
  configured = threads;
}

// One MKL thread in every intra-op thread: the loops around MKL are parallel, and MKL splits a product by the number of
// threads that it believes to have, inside parallel loops too, which changes bits. At every entry, since the OpenMP
// runtime may have replaced its threads in between (a few microseconds).
void use_one_mkl_thread(int threads) {
  at::parallel_for(0, threads, 1, [](int64_t, int64_t) { MKL_Set_Num_Threads_Local(1); });
}

// Every entry point: no autograd, the plan's threads.
struct Entry {
  explicit Entry(int threads) {
    use_threads(threads);
    use_one_mkl_thread(threads);
  }
  c10::InferenceMode no_autograd;
};

class AtenCompute final : public Compute, public MatrixProducts {
 public:
  AtenCompute(const ModelSpec& model, const ModelLayout& layout, const Plan& plan)
      : model_(model), layout_(layout), plan_(plan) {
    if (plan.compute != DType::fp32) fail("The CPU backend computes in fp32: set the plan's `compute` to fp32.");
    if (plan.head_chunk_tokens < 1) fail("The plan's `head_chunk_tokens` must be at least 1.");
    if (plan.threads.compute_per_rank < 1) fail("The plan's `threads.compute_per_rank` must be at least 1.");
    install_counting_allocator();
    const c10::InferenceMode no_autograd;
    const std::vector<float> frequencies = nn::rope_frequencies(model.rope, model.head_dim);
    rope_cos_ = nn::matrix(plan.seq, model.head_dim / 2);
    rope_sin_ = nn::matrix(plan.seq, model.head_dim / 2);
    nn::fill_rope_table(frequencies, plan.seq, rope_cos_.data_ptr<float>(), rope_sin_.data_ptr<float>());
    rope_ = {model.head_dim / 2, plan.seq, rope_cos_.const_data_ptr<float>(), rope_sin_.const_data_ptr<float>()};
  }

  void embedding_forward(const void* weights, const MicroBatch& batch, void* hidden_out) override {
    const Entry entry(plan_.threads.compute_per_rank);
    check_ids(batch);
    nn::embedding_lookup(static_cast<const uint16_t*>(weights) + embedding_offset(), batch.ids, batch.tokens(),
                         model_.hidden, static_cast<float*>(hidden_out));
  }

  void embedding_backward(const MicroBatch& batch, const void* hidden_gradient, void* gradients, int64_t rows,
                          bool first) override {
    const Entry entry(plan_.threads.compute_per_rank);
    check_ids(batch);
    const nn::GradientSlot slot(gradients, plan_.accumulator, first);
    if (rows == model_.vocabulary) slot.zero_gaps(layout_.embedding());
    nn::embedding_scatter(batch.ids, batch.tokens(), model_.hidden, static_cast<const float*>(hidden_gradient), slot,
                          embedding_offset(), rows);
  }

  void block_forward(LayerBlock block, int layer, const void* weights, const MicroBatch& batch, const void* hidden_in,
                     void* saved, void* hidden_out) override {
    const Entry entry(plan_.threads.compute_per_rank);
    check_positions(batch);
    nn::block_forward(call(layer, weights, batch, hidden_in, saved), block, static_cast<float*>(hidden_out));
  }

  void block_backward(LayerBlock block, int layer, const void* weights, const MicroBatch& batch, const void* hidden_in,
                      void* saved, void* hidden_gradient, void* gradients, bool first) override {
    const Entry entry(plan_.threads.compute_per_rank);
    check_positions(batch);
    nn::block_backward(call(layer, weights, batch, hidden_in, saved), block, static_cast<float*>(hidden_gradient),
                       nn::GradientSlot(gradients, plan_.accumulator, first));
  }

  void head(const void* weights, const void* vocabulary, const MicroBatch& batch, const void* hidden_in,
            void* hidden_gradient, void* gradients, void* vocabulary_gradients, bool first, double* loss_sum) override {
    const Entry entry(plan_.threads.compute_per_rank);
    check_targets(batch);
    const UnitLayout& unit = layout_.head();
    const nn::GradientSlot slot(gradients, plan_.accumulator, first);
    const nn::GradientSlot matrix_slot(model_.tied ? vocabulary_gradients : gradients, plan_.accumulator, first);
    slot.zero_gaps(unit);
    if (model_.tied) matrix_slot.zero_gaps(layout_.embedding());
    const auto* norm = static_cast<const uint16_t*>(weights) + unit.at(TensorRole::final_norm).offset;
    const int64_t matrix_offset = model_.tied ? embedding_offset() : unit.at(TensorRole::lm_head).offset;
    const auto* matrix = static_cast<const uint16_t*>(model_.tied ? vocabulary : weights) + matrix_offset;
    const nn::HeadCall call{
        model_,      batch,        plan_.head_chunk_tokens, norm, matrix, slot, unit.at(TensorRole::final_norm).offset,
        matrix_slot, matrix_offset};
    *loss_sum =
        nn::head_forward_backward(call, static_cast<const float*>(hidden_in), static_cast<float*>(hidden_gradient));
  }

  void product(ProductPass pass, int64_t tokens, int64_t inputs, int64_t outputs, const void* a, const void* b,
               void* out) override {
    const Entry entry(plan_.threads.compute_per_rank);
    const auto* left = static_cast<const float*>(a);
    auto* result = static_cast<float*>(out);
    if (pass == ProductPass::weight_gradient) {
      at::Tensor gradient = nn::view(result, outputs, inputs);
      nn::multiply(gradient, nn::view(left, tokens, outputs).t(),
                   nn::view(static_cast<const float*>(b), tokens, inputs), false);
      return;
    }
    const bool forward = pass == ProductPass::forward;
    const at::Tensor matrix = nn::weights_as_fp32(static_cast<const uint16_t*>(b), outputs, inputs);
    at::Tensor product = nn::view(result, tokens, forward ? outputs : inputs);
    nn::multiply(product, nn::view(left, tokens, forward ? inputs : outputs), forward ? matrix.t() : matrix, false);
  }

  void cast(const void* from, DType from_type, void* to, DType to_type, int64_t elements) override {
    const Entry entry(plan_.threads.compute_per_rank);
    if (from_type == to_type) {
      std::memmove(to, from, static_cast<size_t>(elements * size_of(from_type)));
    } else if (from_type == DType::fp32) {
      nn::narrow(static_cast<const float*>(from), static_cast<uint16_t*>(to), elements);
    } else {
      nn::widen(static_cast<const uint16_t*>(from), static_cast<float*>(to), elements);
    }
  }

 private:
  nn::LayerCall call(int layer, const void* weights, const MicroBatch& batch, const void* hidden_in,
                     void* saved) const {
    const size_t index = static_cast<size_t>(layer);
    return {model_, layout_.units.at(index + 1), plan_.activation.at(index), rope_, batch, weights, hidden_in, saved};
  }
  int64_t embedding_offset() const { return layout_.embedding().at(TensorRole::embedding).offset; }

  // The data set checks its files; these keep a wrong batch from reading or writing outside its arrays.
  void check_ids(const MicroBatch& batch) const {
    for (int64_t t = 0; t < batch.tokens(); ++t) {
      if (batch.ids[t] < 0 || batch.ids[t] >= model_.vocabulary) {
        fail("Token id " + std::to_string(batch.ids[t]) + " is outside the model's vocabulary of " +
             std::to_string(model_.vocabulary) + ": pack the data with this model's tokenizer.");
      }
    }
  }
  void check_targets(const MicroBatch& batch) const {
    for (int64_t t = 0; t < batch.tokens(); ++t) {
      if (batch.targets[t] != -100 && (batch.targets[t] < 0 || batch.targets[t] >= model_.vocabulary)) {
        fail("Target " + std::to_string(batch.targets[t]) + " is neither -100 nor inside the model's vocabulary of " +
             std::to_string(model_.vocabulary) + ": pack the data with this model's tokenizer.");
      }
    }
  }
  void check_positions(const MicroBatch& batch) const {
    if (batch.document_starts.empty() || batch.document_starts.front() != 0) {
      throw std::logic_error("MicroBatch::document_starts must begin with 0");
    }
    for (int64_t t = 0; t < batch.tokens(); ++t) {
      if (batch.positions[t] < 0 || batch.positions[t] >= rope_.positions) {
        fail("Position " + std::to_string(batch.positions[t]) + " is outside the plan's sequence length of " +
             std::to_string(rope_.positions) + ": positions count from 0 inside a document.");
      }
    }
  }

  ModelSpec model_;
  ModelLayout layout_;
  Plan plan_;
  at::Tensor rope_cos_, rope_sin_;
  nn::RopeTable rope_;
};

}  // namespace

std::unique_ptr<Compute> make_aten_compute(const ModelSpec& model, const ModelLayout& layout, const Plan& plan) {
  nn::check_blas();
  return std::make_unique<AtenCompute>(model, layout, plan);
}

}  // namespace slidedp
