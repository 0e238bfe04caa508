#include "runtime/host/chunk_update.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <limits>
#include <thread>

#include "tests/runtime/host/adam_fixture.h"

namespace slidedp {
namespace {

// Tensors with and without decay, with gaps after most of them.
UnitLayout test_unit() {
  UnitLayout unit;
  unit.name = "layer 0";
  const auto add = [&](const char* name, int64_t elements, bool decay, bool adjacent = false) {
    if (!adjacent) unit.elements = round_up(unit.elements, kBlockElements);
    unit.tensors.push_back({{}, name, {elements}, unit.elements, elements, decay});
    unit.elements += elements;
  };
  add("norm", 100, false);
  add("q.weight", 700, true);
  add("k.weight", 333, true, true);
  add("q.bias", 17, false);
  add("k.bias", 9, false, true);
  add("o.weight", 4000, true);
  add("q_norm", 64, false);
  add("last.weight", 1000, true);
  unit.elements = round_up(unit.elements, kBlockElements);
  return unit;
}

bool in_gap(const UnitLayout& unit, int64_t i) {
  return std::none_of(unit.tensors.begin(), unit.tensors.end(),
                      [i](const TensorLayout& t) { return i >= t.offset && i < t.offset + t.elements; });
}

struct UnitCase {
  UnitLayout unit = test_unit();
  TestState state{random_state(static_cast<size_t>(unit.elements), 11)};
  TestGradient gradient{2, 2, DType::bf16, static_cast<size_t>(unit.elements), 12};
  UnitCase() {
    for (int64_t i = 0; i < unit.elements; ++i) {
      if (!in_gap(unit, i)) continue;
      const auto at = static_cast<size_t>(i);
      state.hi[at] = state.lo[at] = 0;
      state.m[at] = state.v[at] = 0;
      gradient.set(0, at, 0);
      gradient.set(1, at, 0);
    }
  }
  void update(TestState& target, int64_t begin, int64_t elements) const {
    std::vector<const void*> keep;
    update_chunk(unit, target.view(), begin, elements, gradient.from(begin, keep), test_scalars());
  }
};

TEST(UpdateChunk, DecaysTheTensorsThatAskForIt) {
  const UnitCase data;
  TestState state = data.state, decayed = data.state, kept = data.state;
  data.update(state, 0, data.unit.elements);
  adam_update(decayed.hi, decayed.lo, decayed.m, decayed.v, data.gradient.sources(), test_scalars(), true);
  adam_update(kept.hi, kept.lo, kept.m, kept.v, data.gradient.sources(), test_scalars(), false);
  for (const TensorLayout& tensor : data.unit.tensors) {
    const TestState& expected = tensor.decay ? decayed : kept;
    bool shows = false;
    for (auto i = static_cast<size_t>(tensor.offset); i < static_cast<size_t>(tensor.offset + tensor.elements); ++i) {
      ASSERT_EQ(state.master(i), expected.master(i)) << tensor.name;
      shows |= decayed.master(i) != kept.master(i);
    }
    EXPECT_TRUE(shows) << tensor.name;
  }
  for (int64_t i = 0; i < data.unit.elements; ++i) {
    const auto at = static_cast<size_t>(i);
    if (in_gap(data.unit, i)) {
      ASSERT_TRUE(state.hi[at] == 0 && state.lo[at] == 0 && state.m[at] == 0 && state.v[at] == 0);
    } else if (data.gradient.sum(at) != 0) {
      ASSERT_NE(state.m[at], data.state.m[at]) << "element " << i << " was not updated";
    }
  }
}

TEST(UpdateChunk, AnyChunkingGivesTheSameBits) {
  const UnitCase data;
  TestState whole = data.state;
  data.update(whole, 0, data.unit.elements);
  for (int64_t chunk : {64, 128, 448, 1024, 4096, 1 << 20}) {
    TestState state = data.state;
    std::vector<std::jthread> threads;
    for (int64_t t = 0; t < 2; ++t) {
      threads.emplace_back([&, t] {
        for (int64_t begin = t * chunk; begin < data.unit.elements; begin += 2 * chunk) {
          data.update(state, begin, std::min(chunk, data.unit.elements - begin));
        }
      });
    }
    threads.clear();
    EXPECT_TRUE(state == whole) << "chunks of " << chunk;
  }
}

TEST(UpdateChunk, RefusesARangeOutsideTheUnit) {
  UnitCase data;
  EXPECT_THROW(data.update(data.state, 64, data.unit.elements), std::logic_error);
  EXPECT_THROW(data.update(data.state, -64, 128), std::logic_error);
}

TEST(FirstNonfiniteTensor, NamesTheTensorOfTheElement) {
  const UnitCase clean;
  std::vector<const void*> keep;
  EXPECT_EQ(first_nonfinite_tensor(clean.unit, 0, clean.unit.elements, clean.gradient.sources()), "");
  for (const TensorLayout& tensor : clean.unit.tensors) {
    for (int64_t i : {tensor.offset, tensor.offset + tensor.elements - 1}) {
      UnitCase data;
      data.gradient.set(1, static_cast<size_t>(i), std::numeric_limits<float>::infinity());
      data.gradient.set(0, static_cast<size_t>(data.unit.tensors.back().offset), std::nanf(""));
      EXPECT_EQ(first_nonfinite_tensor(data.unit, 0, data.unit.elements, data.gradient.sources()), tensor.name);
      const int64_t begin = i / 64 * 64;
      EXPECT_EQ(first_nonfinite_tensor(data.unit, begin, 64, data.gradient.from(begin, keep)), tensor.name);
    }
  }
}

TEST(MakeScalars, FollowsTorchsFormulas) {
  const AdamSpec adam{.learning_rate = 1e-3, .beta1 = 0.8, .beta2 = 0.95, .eps = 1e-7, .weight_decay = 0.1};
  const AdamScalars s = make_scalars(adam, 0.0, 1e9, 50, 3);
  EXPECT_EQ(s.beta1, 0.8f);
  EXPECT_EQ(s.beta2, 0.95f);
  EXPECT_EQ(s.one_minus_beta1, static_cast<float>(1 - 0.8));
  EXPECT_EQ(s.one_minus_beta2, static_cast<float>(1 - 0.95));
  EXPECT_EQ(s.eps, 1e-7f);
  EXPECT_FLOAT_EQ(s.step_size, static_cast<float>(1e-3 / (1 - 0.512)));
  EXPECT_FLOAT_EQ(s.bias_correction2_sqrt, static_cast<float>(std::sqrt(1 - 0.857375)));
  EXPECT_EQ(s.decay, static_cast<float>(1 - 1e-4));
  EXPECT_EQ(s.gradient_scale, static_cast<float>(1.0 / 50)) << "no clipping at max_grad_norm 0";
  EXPECT_FALSE(s.skip);
}

TEST(MakeScalars, ClipsTheMeanGradientsNorm) {
  // Norm of the mean gradient: 400 / 50 = 8.
  EXPECT_EQ(make_scalars({}, 2.0, 400, 50, 1).gradient_scale, static_cast<float>(2.0 / (8 + 1e-6) / 50));
  EXPECT_EQ(make_scalars({}, 9.0, 400, 50, 1).gradient_scale, static_cast<float>(1.0 / 50)) << "never scaled up";
  EXPECT_TRUE(make_scalars({}, 1.0, std::numeric_limits<double>::infinity(), 50, 1).skip);
  EXPECT_TRUE(make_scalars({}, 1.0, std::nan(""), 50, 1).skip);
  EXPECT_THROW(make_scalars({}, 1.0, 1.0, 0, 1), std::logic_error);
  EXPECT_THROW(make_scalars({}, 1.0, 1.0, 1, 0), std::logic_error);
}

void write_floats(const std::filesystem::path& file, const std::vector<float>& values) {
  std::ofstream(file, std::ios::binary)
      .write(reinterpret_cast<const char*>(values.data()), static_cast<std::streamsize>(values.size() * sizeof(float)));
}

constexpr const char* kTorchAdam = R"(
import sys, torch
folder, elements, steps, tokens = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
read = lambda name: torch.from_file(f"{folder}/{name}", shared=False, size=elements)
p = torch.nn.Parameter(read("start").clone())
adam = torch.optim.AdamW([p], lr=1e-3, betas=(0.9, 0.98), eps=1e-8, weight_decay=0.1)
for step in range(steps):
    p.grad = read(f"gradient{step}") / tokens
    torch.nn.utils.clip_grad_norm_([p], 1.5)
    adam.step()
p.detach().numpy().tofile(f"{folder}/end")
)";

TEST(UpdateChunk, FiveStepsAgreeWithTorchsAdamW) {
  constexpr int kSteps = 5;
  constexpr int64_t kElements = 4096, kTokens = 37;
  const auto folder = std::filesystem::path(testing::TempDir()) / "slidedp_torch_adamw";
  std::filesystem::create_directories(folder);
  const AdamSpec adam{.learning_rate = 1e-3, .beta1 = 0.9, .beta2 = 0.98, .eps = 1e-8, .weight_decay = 0.1};
  UnitLayout unit;
  unit.tensors.push_back({{}, "weight", {kElements}, 0, kElements, true});
  unit.elements = kElements;
  TestState state(kElements);
  std::vector<float> start(kElements);
  for (size_t i = 0; i < kElements; ++i) state.set_master(i, start[i] = std::sin(static_cast<float>(i)));
  write_floats(folder / "start", start);
  for (int step = 0; step < kSteps; ++step) {
    const TestGradient gradient(1, 1, DType::fp32, kElements, static_cast<uint32_t>(step + 1));
    std::vector<float> values(kElements);
    for (size_t i = 0; i < kElements; ++i) values[i] = gradient.sum(i);
    write_floats(folder / ("gradient" + std::to_string(step)), values);
    std::vector<double> sums(kElements / 64);
    ASSERT_TRUE(block_square_sums(gradient.sources(), kElements, sums));
    const double norm = std::sqrt(combine_block_sums(sums));
    ASSERT_GT(norm / kTokens, 1.5) << "the case should clip";
    update_chunk(unit, state.view(), 0, kElements, gradient.sources(),
                 make_scalars(adam, 1.5, norm, kTokens, step + 1));
  }
  std::ofstream(folder / "adam.py") << kTorchAdam;
  const std::string command = std::string(SLIDEDP_PYTHON) + " " + (folder / "adam.py").string() + " " +
                              folder.string() + " " + std::to_string(kElements) + " " + std::to_string(kSteps) + " " +
                              std::to_string(kTokens);
  ASSERT_EQ(std::system(command.c_str()), 0) << command;
  std::vector<float> end(kElements);
  std::ifstream(folder / "end", std::ios::binary)
      .read(reinterpret_cast<char*>(end.data()), static_cast<std::streamsize>(kElements * sizeof(float)));
  // Each step rounds p twice (u = 2^-24 of |p|) in both programs; the clipped mean gradients differ by a few u (torch
  // rounds in between and sums its norm in fp32), which moves an update of size lr by a few tens of u at most.
  for (size_t i = 0; i < kElements; ++i) {
    ASSERT_NEAR(state.master(i), end[i], kSteps * (4 * 0x1p-24 * std::fabs(end[i]) + 64 * 0x1p-24 * 1e-3)) << i;
    ASSERT_NE(state.master(i), start[i]);
  }
  std::filesystem::remove_all(folder);
}

}  // namespace
}  // namespace slidedp
