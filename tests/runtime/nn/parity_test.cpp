// Whole models against transformers: loss and every gradient. The reference is written by tests/parity/nn_reference.py.
#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>

#include "model/cost/activations.h"
#include "model/spec/model_spec.h"
#include "runtime/nn/aten_compute.h"
#include "tests/runtime/nn/fixture.h"

namespace slidedp {
namespace {

namespace fs = std::filesystem;

template <typename T>
std::vector<T> read_file(const fs::path& path) {
  std::vector<T> data(fs::file_size(path) / sizeof(T));
  std::ifstream file(path, std::ios::binary);
  file.read(reinterpret_cast<char*>(data.data()), static_cast<std::streamsize>(data.size() * sizeof(T)));
  if (!file) throw std::runtime_error("cannot read " + path.string());
  return data;
}

// Embedding, all layers, head and back, one micro-batch, as the step graph does it on one rank.
class WholeModel {
 public:
  explicit WholeModel(const fs::path& reference)
      : dir_(reference), model_(load_model_spec(dir_)), layout_(make_layout(model_)) {
    result_ = nlohmann::json::parse(std::ifstream(dir_ / "result.json"));
    rows_ = result_.at("rows");
    seq_ = result_.at("seq");
    batch_ = read_file<int32_t>(dir_ / "batch.bin");
    starts_ = read_file<int32_t>(dir_ / "starts.bin");
    for (const UnitLayout& unit : layout_.units) {
      Slot<uint16_t>& slot = weights_.emplace_back(unit.elements);
      gradients_.emplace_back(unit.elements);
      for (const TensorLayout& tensor : unit.tensors) {
        const auto data = read_file<uint16_t>(dir_ / (tensor.name + ".weight.bin"));
        std::copy(data.begin(), data.end(), slot.data() + tensor.offset);
      }
    }
  }

  double step(int64_t head_chunk_tokens) {
    Plan plan = plan_for(model_, rows_, seq_);
    plan.head_chunk_tokens = head_chunk_tokens;
    const auto compute = make_aten_compute(model_, layout_, plan);
    const int64_t tokens = rows_ * seq_;
    const MicroBatch batch{rows_, seq_, batch_.data(), batch_.data() + tokens, batch_.data() + 2 * tokens, starts_};
    const size_t layers = static_cast<size_t>(model_.layers);
    std::vector<Slot<float>> hidden, saved;
    hidden.emplace_back(tokens * model_.hidden);
    compute->embedding_forward(weights_.front().data(), batch, hidden[0].data());
    for (size_t layer = 0; layer < layers; ++layer) {
      hidden.emplace_back(tokens * model_.hidden);
      saved.emplace_back(saved_layout(model_, tokens, DType::fp32, ActivationPolicy::keep).bytes / 4);
      compute->layer_forward(static_cast<int>(layer), weights_[layer + 1].data(), batch, hidden[layer].data(),
                             saved[layer].data(), hidden[layer + 1].data());
    }
    Slot<float> gradient(tokens * model_.hidden);
    Slot<float> tied(layout_.embedding().elements);  // the head's share of a tied matrix
    double loss = NAN;
    compute->head(weights_.back().data(), model_.tied ? weights_.front().data() : nullptr, batch, hidden.back().data(),
                  gradient.data(), gradients_.back().data(), model_.tied ? tied.data() : nullptr, true, &loss);
    for (size_t layer = layers; layer-- > 0;) {
      compute->layer_backward(static_cast<int>(layer), weights_[layer + 1].data(), batch, hidden[layer].data(),
                              saved[layer].data(), gradient.data(), gradients_[layer + 1].data(), true);
    }
    compute->embedding_backward(batch, gradient.data(), gradients_.front().data(), model_.vocabulary, true);
    if (model_.tied) {
      for (int64_t i = 0; i < tied.elements(); ++i) gradients_.front().data()[i] += tied.data()[i];
    }
    return loss;
  }

  // Checks every tensor; returns how many there were.
  int compare_gradients(double tolerance) const {
    int tensors = 0;
    for (size_t unit = 0; unit < layout_.units.size(); ++unit) {
      for (const TensorLayout& tensor : layout_.units[unit].tensors) {
        const auto expected = read_file<float>(dir_ / (tensor.name + ".gradient.bin"));
        const std::span<const float> ours =
            gradients_[unit].span().subspan(static_cast<size_t>(tensor.offset), static_cast<size_t>(tensor.elements));
        const double difference = relative_difference(ours, std::vector<double>(expected.begin(), expected.end()));
        EXPECT_LT(difference, tolerance) << tensor.name;
        ++tensors;
      }
    }
    return tensors;
  }

  double reference_loss() const { return result_.at("loss"); }
  nlohmann::json isolation() const { return result_.at("isolation"); }

 private:
  fs::path dir_;
  ModelSpec model_;
  ModelLayout layout_;
  nlohmann::json result_;
  int64_t rows_ = 0, seq_ = 0;
  std::vector<int32_t> batch_, starts_;
  std::vector<Slot<uint16_t>> weights_;
  std::vector<Slot<float>> gradients_;
};

// One test for all models: ctest runs every test in a process of its own, and importing transformers is most of the
// time.
TEST(Parity, TinyModelsMatchTransformersAndTheReferenceKeepsDocumentsApart) {
  std::string pattern = (fs::temp_directory_path() / "slidedp_parity_XXXXXX").string();
  ASSERT_NE(mkdtemp(pattern.data()), nullptr);
  const fs::path dir = pattern;
  const std::string script = std::string(SLIDEDP_SOURCE_DIR) + "/tests/parity/nn_reference.py";
  const std::string command = std::string(SLIDEDP_PYTHON) + " " + script + " " + dir.string();
  ASSERT_EQ(std::system(command.c_str()), 0) << command;

  const std::map<std::string, int> models = {
      {"llama", 3 * 9 + 3}, {"llama3_rope", 3 * 16 + 3}, {"qwen2", 3 * 12 + 3}, {"qwen3", 3 * 11 + 2}};
  for (const auto& [name, tensors] : models) {
    SCOPED_TRACE(name);
    WholeModel model(dir / name);
    // Measured: 3e-8 on the loss, 2e-6 on the worst gradient (fp32 on both sides, sums in another order).
    const double loss = model.step(/*head_chunk_tokens=*/32);
    EXPECT_NEAR(loss / model.reference_loss(), 1.0, 1e-6) << loss << " and " << model.reference_loss();
    EXPECT_EQ(model.compare_gradients(1e-5), tensors);

    // Document 2's loss before and after document 1's tokens changed; with a mask that is causal only it does change.
    const nlohmann::json losses = model.isolation();
    EXPECT_EQ(losses.at("plain").get<double>(), losses.at("changed").get<double>());
    EXPECT_NE(losses.at("causal_plain").get<double>(), losses.at("causal_changed").get<double>());
  }
  fs::remove_all(dir);
}

}  // namespace
}  // namespace slidedp
