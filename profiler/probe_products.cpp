// Matrix products on their own, as a layer's passes do them.
#include <algorithm>
#include <array>

#include "model/base/format.h"
#include "profiler/kernel_bench.h"
#include "profiler/probe.h"
#include "runtime/nn/matrix_products.h"

namespace slidedp {
namespace {

struct ProductShape {
  int64_t tokens, inputs, outputs;
  double flops() const {
    return 2.0 * static_cast<double>(tokens) * static_cast<double>(inputs) * static_cast<double>(outputs);
  }
};

// The products of a layer: qkv, o, gate and up, down; at two micro-batches.
std::vector<ProductShape> product_shapes(const ModelSpec& model, const ProbeContext& context) {
  const int64_t queries = model.heads * model.head_dim, keys = model.kv_heads * model.head_dim;
  std::vector<int64_t> tokens{64, 256};
  if (!context.on_host()) tokens = {whole_row(model), 8 * whole_row(model)};
  std::vector<ProductShape> shapes;
  for (const int64_t count : tokens) {
    shapes.push_back({count, model.hidden, queries + 2 * keys});
    shapes.push_back({count, queries, model.hidden});
    shapes.push_back({count, model.hidden, 2 * model.intermediate});
    shapes.push_back({count, model.intermediate, model.hidden});
  }
  return shapes;
}

constexpr std::array<std::pair<ProductPass, const char*>, 3> kPasses{
    {{ProductPass::forward, "forward"},
     {ProductPass::input_gradient, "input_gradient"},
     {ProductPass::weight_gradient, "weight_gradient"}}};

class ProductsProbe final : public Probe {
 public:
  std::string key() const override { return "kernel.product"; }
  std::string method() const override {
    return "each matrix product of a layer on its own (qkv, o, gate and up, down), forward, input gradient and weight "
           "gradient, at two micro-batches (GPU: several in a row after warming up), one intra-op thread; for the "
           "record, layers are priced as a whole";
  }
  std::optional<std::string> waived(const ProbeContext& context) const override {
    const ModelSpec model = measured_model(context);
    const int64_t bytes = bytes_of(context, largest(product_shapes(model, context)));
    if (bytes <= context.device_available_bytes) return std::nullopt;
    return fmt::format("needs {}, but only {} is available", format_bytes(bytes),
                       format_bytes(context.device_available_bytes));
  }

  std::vector<Measurement> run(const ProbeContext& context) const override {
    const ModelSpec model = measured_model(context);
    Backend backend = kernel_backend(context, model, kernel_shapes(context, model).front());
    auto* products = dynamic_cast<MatrixProducts*>(backend.compute.front().get());
    if (products == nullptr) return {};
    Device& device = *backend.devices.front();
    DeviceLane lane(device, "compute");
    const std::vector<ProductShape> shapes = product_shapes(model, context);
    const Sizes sizes = largest(shapes);
    std::array<DeviceMemory, 3> memory;
    // As bf16 throughout: two of those are a fine fp32 number as well, for a backend that takes one for activations.
    for (DeviceMemory& part : memory) {
      part = device.allocate(sizes.elements * 4, "product probe's matrix");
      fill_random(device, lane.stream(), part, DType::bf16);
    }
    const Harness harness = context.harness(static_cast<int>(shapes.size() * kPasses.size()));
    std::vector<Measurement> result;
    for (const ProductShape& shape : shapes) {
      for (const auto& [pass, name] : kPasses) {
        const std::function<void()> call = [&, pass = pass] {
          products->product(pass, shape.tokens, shape.inputs, shape.outputs, memory[0].data(), memory[1].data(),
                            memory[2].data());
        };
        int calls = 1;
        result.push_back(harness.measure(point(name, shape), [&] { return seconds_of(context, lane, call, calls); }));
      }
    }
    return result;
  }

 private:
  struct Sizes {
    int64_t elements = 0;  // of the largest matrix
  };
  static Sizes largest(const std::vector<ProductShape>& shapes) {
    Sizes sizes;
    for (const ProductShape& shape : shapes) {
      sizes.elements = std::max(
          {sizes.elements, shape.tokens * shape.inputs, shape.tokens * shape.outputs, shape.inputs * shape.outputs});
    }
    return sizes;
  }
  static int64_t bytes_of(const ProbeContext& context, const Sizes& sizes) {
    // On the CPU backend a matrix is widened on its way.
    return (context.on_host() ? 4 : 3) * sizes.elements * 4 + (int64_t{256} << 20);
  }

  static Measurement point(const char* name, const ProductShape& shape) {
    const auto number = [](int64_t value) { return static_cast<double>(value); };
    return {name,
            "s",
            {{"tokens", number(shape.tokens)},
             {"inputs", number(shape.inputs)},
             {"outputs", number(shape.outputs)},
             {"flops", shape.flops()}},
            {},
            true};
  }

  // The mean of several in a row, long enough for a GPU's clock to settle; `calls` grows to that.
  static double seconds_of(const ProbeContext& context, DeviceLane& lane, const std::function<void()>& call,
                           int& calls) {
    constexpr double kLong = 0.03;
    constexpr int kMost = 1024;
    for (;;) {
      const double seconds = timed(lane, [&](Device& device, Stream& stream) {
        for (int i = 0; i < calls; ++i) device.launch(stream, call);
      });
      if (context.on_host() || seconds > kLong / 2 || calls >= kMost) return seconds / calls;
      calls *= 2;
    }
  }
};

}  // namespace

std::unique_ptr<Probe> make_kernel_product() { return std::make_unique<ProductsProbe>(); }

}  // namespace slidedp
