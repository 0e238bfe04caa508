#include "runtime/nn/cuda/cudnn_attention.h"

#include <ATen/cudnn/Handle.h>
#include <c10/util/Exception.h>
#include <cudnn_frontend.h>

#include <cmath>
#include <stdexcept>
#include <unordered_map>

namespace slidedp::nn {
namespace {

namespace fe = cudnn_frontend;
using Tensor = std::shared_ptr<fe::graph::Tensor_attributes>;

enum Operand : int64_t {
  kQuery = 1,
  kKey,
  kValue,
  kOut,
  kLogSumExp,
  kOutGradient,
  kQueryGradient,
  kKeyGradient,
  kValueGradient
};

void require(const fe::error_t& status) {
  if (status.is_bad()) throw std::runtime_error(fe::error_t(status).get_message());
}

using Graph = std::shared_ptr<fe::graph::Graph>;

// The tensors of one shape, all as [rows, heads, seq, head_dim] and in bf16 but the statistics.
class Builder {
 public:
  explicit Builder(const CudnnShape& shape) : shape_(shape) {
    graph_->set_io_data_type(fe::DataType_t::BFLOAT16)
        .set_intermediate_data_type(fe::DataType_t::FLOAT)
        .set_compute_data_type(fe::DataType_t::FLOAT);
  }

  Tensor query() { return heads(kQuery, shape_.heads, shape_.query_stride); }
  Tensor key() { return heads(kKey, shape_.kv_heads, shape_.key_stride); }
  Tensor value() { return heads(kValue, shape_.kv_heads, shape_.value_stride); }
  // Dense [tokens, heads * head_dim].
  Tensor dense(Operand operand) { return heads(operand, shape_.heads, shape_.heads * shape_.head_dim); }
  Tensor log_sum_exp() {
    fe::graph::Tensor_attributes attributes;
    describe_statistics(attributes);
    return graph_->tensor(attributes);
  }

  void output(const Tensor& tensor, Operand operand, int64_t count) const {
    describe(*tensor, operand, count, count * shape_.head_dim);
    tensor->set_output(true);
  }
  void output_statistics(const Tensor& tensor) const {
    describe_statistics(*tensor);
    tensor->set_output(true);
  }

  float scale() const { return 1.0f / std::sqrt(static_cast<float>(shape_.head_dim)); }
  fe::graph::Graph& graph() { return *graph_; }

  Graph finish() {
    require(graph_->build(at::native::getCudnnHandle(), {fe::HeurMode_t::A}));
    return graph_;
  }

 private:
  Tensor heads(Operand operand, int64_t count, int64_t stride) {
    fe::graph::Tensor_attributes attributes;
    describe(attributes, operand, count, stride);
    return graph_->tensor(attributes);
  }
  void describe(fe::graph::Tensor_attributes& tensor, Operand operand, int64_t count, int64_t stride) const {
    tensor.set_uid(operand)
        .set_data_type(fe::DataType_t::BFLOAT16)
        .set_dim({shape_.rows, count, shape_.seq, shape_.head_dim})
        .set_stride({shape_.seq * stride, shape_.head_dim, stride, 1});
  }
  void describe_statistics(fe::graph::Tensor_attributes& tensor) const {
    tensor.set_uid(kLogSumExp)
        .set_data_type(fe::DataType_t::FLOAT)
        .set_dim({shape_.rows, shape_.heads, shape_.seq, 1})
        .set_stride({shape_.heads * shape_.seq, shape_.seq, 1, 1});
  }

  const CudnnShape& shape_;
  Graph graph_ = std::make_shared<fe::graph::Graph>();
};

Graph forward_graph(const CudnnShape& shape) {
  Builder builder(shape);
  const auto options = fe::graph::SDPA_attributes()
                           .set_name("attention")
                           .set_generate_stats(true)
                           .set_causal_mask(true)
                           .set_attn_scale(builder.scale());
  const auto [out, log_sum_exp] = builder.graph().sdpa(builder.query(), builder.key(), builder.value(), options);
  builder.output(out, kOut, shape.heads);
  builder.output_statistics(log_sum_exp);
  return builder.finish();
}

Graph backward_graph(const CudnnShape& shape) {
  Builder builder(shape);
  const auto options = fe::graph::SDPA_backward_attributes()
                           .set_name("attention_backward")
                           .set_causal_mask(true)
                           .set_attn_scale(builder.scale());
  const auto [query, key, value] =
      builder.graph().sdpa_backward(builder.query(), builder.key(), builder.value(), builder.dense(kOut),
                                    builder.dense(kOutGradient), builder.log_sum_exp(), options);
  builder.output(query, kQueryGradient, shape.heads);
  builder.output(key, kKeyGradient, shape.kv_heads);
  builder.output(value, kValueGradient, shape.kv_heads);
  return builder.finish();
}

int64_t workspace_bytes(const fe::graph::Graph& graph) {
  int64_t bytes = 0;
  require(graph.get_workspace_size(bytes));
  return bytes;
}

void run(const CudaContext& context, const fe::graph::Graph& graph, int64_t workspace_bytes,
         std::unordered_map<int64_t, void*> operands) {
  const at::Tensor workspace = context.bytes(workspace_bytes);
  const fe::error_t status = graph.execute(at::native::getCudnnHandle(), operands, workspace.data_ptr());
  TORCH_CHECK(status.is_good(), "cuDNN's attention failed: ", fe::error_t(status).get_message());
}

void* pointer(const void* data) { return const_cast<void*>(data); }

}  // namespace

struct CudnnAttention::Graphs {
  explicit Graphs(const CudnnShape& shape)
      : forward(forward_graph(shape)),
        backward(backward_graph(shape)),
        forward_bytes(workspace_bytes(*forward)),
        backward_bytes(workspace_bytes(*backward)) {}
  Graph forward, backward;
  int64_t forward_bytes, backward_bytes;  // of their workspaces
};

CudnnAttention::CudnnAttention() = default;
CudnnAttention::~CudnnAttention() = default;

bool CudnnAttention::takes(const CudnnShape& shape) {
  const auto known = graphs_.find(shape);
  if (known != graphs_.end()) return known->second != nullptr;
  std::unique_ptr<Graphs>& graphs = graphs_[shape];
  try {
    graphs = std::make_unique<Graphs>(shape);
  } catch (const std::exception& error) {
    refusal_ = error.what();
  }
  return graphs != nullptr;
}

void CudnnAttention::forward(const CudaContext& context, const CudnnShape& shape, const CudnnOperands& o) const {
  const Graphs& graphs = *graphs_.at(shape);
  run(context, *graphs.forward, graphs.forward_bytes,
      {{kQuery, pointer(o.query)},
       {kKey, pointer(o.key)},
       {kValue, pointer(o.value)},
       {kOut, pointer(o.out)},
       {kLogSumExp, pointer(o.log_sum_exp)}});
}

void CudnnAttention::backward(const CudaContext& context, const CudnnShape& shape, const CudnnOperands& o) const {
  const Graphs& graphs = *graphs_.at(shape);
  run(context, *graphs.backward, graphs.backward_bytes,
      {{kQuery, pointer(o.query)},
       {kKey, pointer(o.key)},
       {kValue, pointer(o.value)},
       {kOut, pointer(o.out)},
       {kLogSumExp, pointer(o.log_sum_exp)},
       {kOutGradient, pointer(o.out_gradient)},
       {kQueryGradient, o.query_gradient},
       {kKeyGradient, o.key_gradient},
       {kValueGradient, o.value_gradient}});
}

}  // namespace slidedp::nn
