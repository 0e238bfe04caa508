// Every file in configs/ loads, and the model catalogue agrees with transformers.
#include <map>
#include <sstream>

#include "model/spec/hardware_spec.h"
#include "model/spec/layout.h"
#include "model/spec/model_spec.h"
#include "model/spec/train_spec.h"
#include "tests/model/spec/support.h"
#include "tests/support/programs.h"

namespace slidedp {
namespace {

const std::filesystem::path kConfigs = std::filesystem::path(SLIDEDP_SOURCE_DIR) / "configs";

std::vector<std::filesystem::path> files_in(const std::string& folder) {
  std::vector<std::filesystem::path> files;
  for (const auto& entry : std::filesystem::directory_iterator(kConfigs / folder)) files.push_back(entry.path());
  return files;
}

// Parameters that transformers 5.24 counts when it builds the model from the file (list_parameters.py).
const std::map<std::string, int64_t> kParameters{
    {"SmolLM2-135M", 134515008},    {"Qwen3-0.6B", 596049920},       {"Qwen3-4B", 4022468096},
    {"Qwen3-8B", 8190735360},       {"Qwen3-14B", 14768307200},      {"Qwen3-32B", 32762123264},
    {"Qwen2.5-7B", 7615616512},     {"Qwen2.5-72B", 72706203648},    {"Llama-3.1-8B", 8030261248},
    {"Llama-3.1-70B", 70553706496}, {"Mistral-7B-v0.3", 7248023552},
};

int64_t tensor_elements(const ModelLayout& layout) {
  int64_t sum = 0;
  for (const UnitLayout& unit : layout.units) {
    for (const TensorLayout& tensor : unit.tensors) sum += tensor.elements;
  }
  return sum;
}

TEST(Configs, ModelsHaveTheirExactParameterCount) {
  size_t found = 0;
  for (const auto& file : files_in("model")) {
    const ModelSpec spec = load_model_spec(file);
    ASSERT_TRUE(kParameters.contains(spec.name)) << file << " has no count in this test";
    EXPECT_EQ(spec.parameters(), kParameters.at(spec.name)) << spec.name;
    EXPECT_EQ(tensor_elements(make_layout(spec)), kParameters.at(spec.name)) << spec.name;
    ++found;
  }
  EXPECT_EQ(found, kParameters.size()) << "a model of the catalogue is missing";
}

TEST(Configs, KnownValuesOfTheCatalogue) {
  const ModelSpec llama = load_model_spec(kConfigs / "model" / "Llama-3.1-8B.json");
  EXPECT_EQ(llama.rope, (RopeSpec{RopeKind::llama3, 500000, 8, 1, 4, 8192}));
  EXPECT_EQ(llama.head_dim, 128);
  EXPECT_FALSE(llama.tied);
  const ModelSpec smol = load_model_spec(kConfigs / "model" / "SmolLM2-135M.json");
  EXPECT_EQ(smol.rope.theta, 100000);
  EXPECT_TRUE(smol.tied);
  const ModelSpec qwen = load_model_spec(kConfigs / "model" / "Qwen3-0.6B.json");
  EXPECT_EQ(qwen.head_dim, 128);  // not hidden / heads = 64
  EXPECT_TRUE(qwen.qk_norm);
}

TEST(Configs, HardwareLoadsAndRoundTrips) {
  ASSERT_FALSE(files_in("hardware").empty());
  for (const auto& file : files_in("hardware")) {
    // Parts of machines: catalogue_test.cpp.
    if (file.filename() == "gpu" || file.filename() == "host") continue;
    const HardwareSpec spec = load_hardware_spec(file);
    const std::filesystem::path copy =
        std::filesystem::path(::testing::TempDir()) / ("copy-" + file.filename().string());
    std::ofstream(copy) << to_yaml(spec);
    EXPECT_EQ(load_hardware_spec(copy), spec) << file;
    std::filesystem::remove(copy);
  }
}

TEST(Configs, TrainingSpecsLoad) {
  if (!std::filesystem::exists(kConfigs / "train")) GTEST_SKIP() << "configs/train does not exist";
  for (const auto& file : files_in("train")) EXPECT_NO_THROW(load_train_spec(file)) << file;
}

TEST(Configs, NothingElseIsThere) {
  for (const auto& entry : std::filesystem::directory_iterator(kConfigs)) {
    const std::string name = entry.path().filename().string();
    EXPECT_TRUE(name == "model" || name == "hardware" || name == "train") << name << " is loaded by no test";
  }
}

// ---- Names and shapes against transformers.

using Shapes = std::map<std::string, std::vector<int64_t>>;

// Runs list_parameters.py over the files: parameters by file.
std::map<std::string, Shapes> transformers_parameters(const std::vector<std::filesystem::path>& files) {
  std::string command = std::string(SLIDEDP_PYTHON) + " " + SLIDEDP_SOURCE_DIR + "/tests/model/spec/list_parameters.py";
  for (const auto& file : files) command += " '" + file.string() + "'";
  const test::Finished list = test::run_command(command);
  EXPECT_EQ(list.status, 0) << "list_parameters.py failed";
  std::map<std::string, Shapes> result;
  std::istringstream lines(list.output);
  for (std::string line; std::getline(lines, line);) {
    std::istringstream words(line);
    std::string file, name;
    words >> file >> name;
    std::vector<int64_t>& shape = result[file][name];
    for (int64_t size; words >> size;) shape.push_back(size);
  }
  return result;
}

class AgainstTransformers : public TempDir {};

// The catalogue, and small configs for what it lacks: biases everywhere, absent keys with class defaults.
TEST_F(AgainstTransformers, EveryParameterHasItsNameAndShape) {
  std::vector<std::filesystem::path> files = files_in("model");
  const std::string sizes =
      R"("hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 50,
         "max_position_embeddings": 128, )";
  files.push_back(write("llama_biased.json", "{" + sizes + R"("model_type": "llama", "num_attention_heads": 4,
      "num_key_value_heads": 2, "head_dim": 24, "attention_bias": true, "mlp_bias": true})"));
  files.push_back(write("llama_defaults.json", "{" + sizes + R"("model_type": "llama", "num_attention_heads": 4})"));
  files.push_back(
      write("mistral_defaults.json", "{" + sizes + R"("model_type": "mistral", "num_attention_heads": 16})"));
  files.push_back(write("qwen2_defaults.json", "{" + sizes + R"("model_type": "qwen2", "num_attention_heads": 32})"));
  files.push_back(write("qwen3_defaults.json", "{" + sizes + R"("model_type": "qwen3", "num_attention_heads": 32,
      "attention_bias": true, "tie_word_embeddings": true})"));
  const auto wanted = transformers_parameters(files);
  ASSERT_EQ(wanted.size(), files.size());
  for (const auto& file : files) {
    Shapes shapes;
    for (const UnitLayout& unit : make_layout(load_model_spec(file)).units) {
      for (const TensorLayout& tensor : unit.tensors) shapes[tensor.name] = tensor.shape;
    }
    EXPECT_EQ(shapes, wanted.at(file.string())) << file;
  }
}

}  // namespace
}  // namespace slidedp
