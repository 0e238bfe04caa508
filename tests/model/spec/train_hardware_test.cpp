// The training and hardware specs' YAML, and through them the strict reader.
#include <cmath>
#include <limits>
#include <sstream>

#include "model/spec/hardware_spec.h"
#include "model/spec/train_spec.h"
#include "tests/model/spec/support.h"

namespace slidedp {
namespace {

using ::testing::AllOf;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::Not;

// Lines are counted in the tests below.
const std::string kTrain =
    "schema: slidedp.train/1\n"
    "seq: 512\n"
    "batch_rows: 8\n"
    "steps: 100\n"
    "seed: 7\n"
    "adam:\n"
    "  learning_rate: 1.0e-4\n"
    "  beta1: 0.9\n"
    "  beta2: 0.95\n"
    "  eps: 1.0e-8\n"
    "  weight_decay: 0.1\n"
    "max_grad_norm: 1\n"
    "touched_vocabulary_share: 0.5\n";

class TrainYaml : public TempDir {
 protected:
  std::string refused(const std::string& text) {
    return error_of([&] { load_train_spec(write("train.yaml", text)); });
  }
  std::string at(int line) const { return (dir / "train.yaml").string() + ":" + std::to_string(line) + ": "; }
};

TEST_F(TrainYaml, Reads) {
  TrainSpec wanted;
  wanted.seq = 512;
  wanted.batch_rows = 8;
  wanted.steps = 100;
  wanted.seed = 7;
  wanted.adam = {1e-4, 0.9, 0.95, 1e-8, 0.1};
  wanted.max_grad_norm = 1;
  wanted.touched_vocabulary_share = 0.5;
  EXPECT_EQ(load_train_spec(write("train.yaml", kTrain)), wanted);
}

TEST_F(TrainYaml, SeedAndTouchedShareHaveDefaults) {
  const std::string text = replaced(replaced(kTrain, "seed: 7\n", ""), "touched_vocabulary_share: 0.5\n", "");
  const TrainSpec spec = load_train_spec(write("train.yaml", text));
  EXPECT_EQ(spec.seed, TrainSpec{}.seed);
  EXPECT_EQ(spec.touched_vocabulary_share, TrainSpec{}.touched_vocabulary_share);
}

TEST_F(TrainYaml, EveryOtherKeyIsRequired) {
  for (const std::string line :
       {"seq: 512\n", "batch_rows: 8\n", "steps: 100\n", "  learning_rate: 1.0e-4\n", "  beta1: 0.9\n",
        "  beta2: 0.95\n", "  eps: 1.0e-8\n", "  weight_decay: 0.1\n", "max_grad_norm: 1\n"}) {
    std::string key = line.substr(0, line.find(':'));
    if (key.front() == ' ') key = "adam." + key.substr(2);
    EXPECT_THAT(refused(replaced(kTrain, line, "")),
                AllOf(HasSubstr(key.front() == 'a' ? at(7) : at(1)), HasSubstr("key \"" + key + "\" is missing")));
  }
  const size_t adam = kTrain.find("adam:");
  EXPECT_THAT(refused(kTrain.substr(0, adam) + "max_grad_norm: 1\n"), HasSubstr("key \"adam\" is missing"));
}

TEST_F(TrainYaml, UnknownKeysNameTheNearest) {
  EXPECT_THAT(
      refused(replaced(kTrain, "batch_rows", "batch_row")),
      AllOf(HasSubstr(at(3)), HasSubstr("\"batch_row\" is unknown"), HasSubstr("did you mean \"batch_rows\"?")));
  EXPECT_THAT(refused(replaced(kTrain, "beta2", "betas")),
              AllOf(HasSubstr(at(9)), HasSubstr("\"adam.betas\" is unknown"), HasSubstr("\"adam.beta")));
  EXPECT_THAT(refused(kTrain + "extra: 1\n"), AllOf(HasSubstr(at(14)), HasSubstr("\"extra\" is unknown")));
}

TEST_F(TrainYaml, KeysAppearOnce) {
  EXPECT_THAT(refused(kTrain + "seq: 512\n"), AllOf(HasSubstr(at(14)), HasSubstr("\"seq\" appears twice")));
}

struct BadValue {
  std::string from, to;
  int line;
  std::string message;
};

TEST_F(TrainYaml, BadValuesAreNamedWithTheirLine) {
  const std::vector<BadValue> cases{
      {"seq: 512", "seq: many", 2, "\"seq\" is \"many\", but must be an integer"},
      {"seq: 512", "seq: 512.0", 2, "must be an integer"},
      {"seq: 512", "seq: 1e3", 2, "must be an integer"},
      {"seq: 512", "seq: 0", 2, "greater than 0"},
      {"seq: 512", "seq: -4", 2, "greater than 0"},
      {"seq: 512", "seq: 99999999999999999999", 2, "must be an integer"},
      {"seq: 512", "seq: 2147483648", 2, "at most 2147483647"},
      {"seq: 512", "seq: \"512\"", 2, "without quotes"},
      {"seq: 512", "seq: [512]", 2, "single value"},
      {"seq: 512", "seq:", 2, "single value"},
      {"batch_rows: 8", "batch_rows: 0", 3, "greater than 0"},
      {"batch_rows: 8", "batch_rows: 2147483648", 3, "at most 2147483647"},
      {"steps: 100", "steps: 0", 4, "greater than 0"},
      {"seed: 7", "seed: -1", 5, "not negative"},
      {"learning_rate: 1.0e-4", "learning_rate: -1", 7, "\"adam.learning_rate\" is -1, but must be 0 or greater"},
      {"learning_rate: 1.0e-4", "learning_rate: .nan", 7, "finite number"},
      {"learning_rate: 1.0e-4", "learning_rate: nan", 7, "finite number"},
      {"learning_rate: 1.0e-4", "learning_rate: inf", 7, "finite number"},
      {"learning_rate: 1.0e-4", "learning_rate: 1e999", 7, "finite number"},
      {"learning_rate: 1.0e-4", "learning_rate: 1.0e-4x", 7, "finite number"},
      {"beta1: 0.9", "beta1: 1.0", 8, "below 1"},
      {"beta2: 0.95", "beta2: -0.1", 9, "at least 0"},
      {"eps: 1.0e-8", "eps: 0", 10, "greater than 0"},
      {"weight_decay: 0.1", "weight_decay: -0.1", 11, "0 or greater"},
      {"max_grad_norm: 1", "max_grad_norm: -1", 12, "0 or greater"},
      {"share: 0.5", "share: 0", 13, "above 0 and at most 1"},
      {"share: 0.5", "share: 1.5", 13, "above 0 and at most 1"},
  };
  for (const BadValue& bad : cases) {
    EXPECT_THAT(refused(replaced(kTrain, bad.from, bad.to)), AllOf(HasSubstr(at(bad.line)), HasSubstr(bad.message)))
        << bad.to;
  }
}

TEST_F(TrainYaml, SectionsMustBeMappings) {
  const size_t adam = kTrain.find("adam:"), rest = kTrain.find("max_grad_norm");
  EXPECT_THAT(refused(kTrain.substr(0, adam) + "adam: 3\n" + kTrain.substr(rest)),
              AllOf(HasSubstr(at(6)), HasSubstr("\"adam\" must be a mapping")));
}

TEST_F(TrainYaml, Schema) {
  EXPECT_THAT(refused(replaced(kTrain, "train/1", "train/2")),
              AllOf(HasSubstr(at(1)), HasSubstr("slidedp.train/2"), HasSubstr("slidedp.train/1")));
  EXPECT_THAT(refused(replaced(kTrain, "schema: slidedp.train/1\n", "")),
              AllOf(HasSubstr(at(1)), HasSubstr("\"schema\" is missing")));
  EXPECT_THAT(refused(replaced(kTrain, "slidedp.train/1", "[1]")), HasSubstr("a list or mapping"));
}

TEST_F(TrainYaml, NotYaml) {
  EXPECT_THAT(refused("schema: [\n"), AllOf(HasSubstr("train.yaml:"), HasSubstr("not valid YAML")));
  EXPECT_THAT(refused("- 1\n"), HasSubstr("must be a mapping"));
  EXPECT_THAT(refused(""), HasSubstr("one YAML document"));
  EXPECT_THAT(refused(kTrain + "---\n" + kTrain), HasSubstr("one YAML document, has 2"));
}

TEST_F(TrainYaml, NoFile) {
  EXPECT_THAT(error_of([&] { load_train_spec(dir / "absent.yaml"); }), HasSubstr("absent.yaml: cannot open"));
  EXPECT_THAT(error_of([&] { load_train_spec(dir); }), HasSubstr("cannot open"));
}

TEST_F(TrainYaml, RoundTripIsExact) {
  TrainSpec spec;
  spec.seq = 4096;
  spec.batch_rows = 2147483647;
  spec.steps = int64_t{1} << 62;
  spec.seed = std::numeric_limits<uint64_t>::max();
  spec.adam = {0.1 + 0.2, std::nextafter(1.0, 0.0), 1.0 / 3, std::numeric_limits<double>::denorm_min(),
               std::numeric_limits<double>::max()};
  spec.max_grad_norm = 1e-5;
  spec.touched_vocabulary_share = 2.0 / 3;
  const std::string text = to_yaml(spec);
  EXPECT_EQ(load_train_spec(write("train.yaml", text)), spec);
  EXPECT_EQ(to_yaml(load_train_spec(dir / "train.yaml")), text);
  // YAML 1.1 readers want a point in a number with an exponent.
  EXPECT_THAT(text, AllOf(HasSubstr("max_grad_norm: 1.0e-05\n"), EndsWith("\n"), Not(EndsWith("\n\n"))));
}

HardwareSpec sample_hardware() {
  HardwareSpec spec;
  spec.name = "a: name, with \"quotes\" # and more";
  spec.measured = true;
  spec.gpus = 4;
  spec.device = {"null", "cuda", 22 * (int64_t{1} << 30), 12345};
  spec.pcie = {{1.0 / 3, 55.5}, {1e-6, 54.25}, 98.1, 200.7, 190.3};
  spec.collectives = {{1e-5, 101}, {2e-5, 102}, {3e-5, 103}};
  spec.kernels = {{6e5, 1e-3}, {5e5, 0}, {4e5, 1}, {3e3, 2}, 4100, 5e-6, 4e5, 3e5, 2900, 2800};
  spec.host = {16, 125 * (int64_t{1} << 30), 172, 117, 4e8, 3e9, 10, 7e8, 6e8};
  spec.contention = {{1.25, 0.1 + 0.2, 1.0 / 3}, {1.5, 0.7, 0.6}, {0.2, 0.0625, 0.4}};
  return spec;
}

class HardwareYaml : public TempDir {
 protected:
  std::string refused(const std::string& text) {
    return error_of([&] { load_hardware_spec(write("hw.yaml", text)); });
  }
  // The sample's YAML with one line's value changed.
  std::string refused(const std::string& from, const std::string& to) {
    return refused(replaced(to_yaml(sample_hardware()), from, to));
  }
};

TEST_F(HardwareYaml, RoundTripIsExact) {
  const std::string text = to_yaml(sample_hardware());
  EXPECT_EQ(load_hardware_spec(write("hw.yaml", text)), sample_hardware());
  EXPECT_EQ(to_yaml(load_hardware_spec(dir / "hw.yaml")), text);
}

TEST_F(HardwareYaml, TextsSurvive) {
  for (const std::string name :
       {"", "~", "true", "12", "- x", "a\nb\ttab", " spaces ", "é ü 漢", "'", "\\", "{a: 1}"}) {
    HardwareSpec spec = sample_hardware();
    spec.name = name;
    EXPECT_EQ(load_hardware_spec(write("hw.yaml", to_yaml(spec))), spec) << name;
  }
}

TEST_F(HardwareYaml, SizesMayHaveUnitsAndAreWrittenAsBytes) {
  const std::string text = to_yaml(sample_hardware());
  EXPECT_THAT(text, HasSubstr("memory_bytes: 23622320128\n"));
  for (const std::string size : {"22GiB", "\"22 GiB\"", "22528MiB"}) {
    EXPECT_EQ(load_hardware_spec(write("hw.yaml", replaced(text, "23622320128", size))), sample_hardware()) << size;
  }
  EXPECT_THAT(refused("23622320128", "22GB/s"), AllOf(HasSubstr("hw.yaml:8: "), HasSubstr("device.memory_bytes")));
  EXPECT_THAT(refused("23622320128", "0"), HasSubstr("greater than 0"));
  EXPECT_THAT(refused("23622320128", "-5"), HasSubstr("device.memory_bytes"));
}

TEST_F(HardwareYaml, FlowSectionsAreStrictToo) {
  EXPECT_THAT(refused("gbps: 101}", "gpbs: 101}"),
              AllOf(HasSubstr("\"collectives.all_gather.gpbs\" is unknown"), HasSubstr("collectives.all_gather.gbps")));
  EXPECT_THAT(refused(", gbps: 101}", "}"), HasSubstr("\"collectives.all_gather.gbps\" is missing"));
}

TEST_F(HardwareYaml, RatesMustBePositive) {
  EXPECT_THAT(refused("gbps: 55.5", "gbps: 0"), AllOf(HasSubstr("hw.yaml:11: "), HasSubstr("\"pcie.h2d.gbps\" is 0")));
  EXPECT_THAT(refused("gbps: 54.25", "gbps: 0"), AllOf(HasSubstr("hw.yaml:12: "), HasSubstr("\"pcie.d2h.gbps\" is 0")));
  EXPECT_THAT(refused("gbps: 55.5", "gbps: -1"), HasSubstr("0 or greater"));
  EXPECT_THAT(refused("duplex_gbps: 98.1", "duplex_gbps: 0"), HasSubstr("greater than 0"));
  EXPECT_THAT(refused("dram_gbps: 172", "dram_gbps: 0"), HasSubstr("\"host.dram_gbps\" is 0"));
  EXPECT_THAT(refused("peak_gflops: 600000", "peak_gflops: 0"), HasSubstr("kernels.layer_fwd.peak_gflops"));
  EXPECT_THAT(refused("cores: 16", "cores: 0"), HasSubstr("\"host.cores\" is 0"));
  EXPECT_THAT(refused("gpus: 4", "gpus: 99999999999"), HasSubstr("at most 32 bits"));
}

TEST_F(HardwareYaml, CollectivesMayBeUnmeasuredOnOneGpuOnly) {
  HardwareSpec spec = sample_hardware();
  spec.collectives = {};
  for (const char* key : {"all_gather", "reduce_scatter", "broadcast"}) {
    HardwareSpec two = sample_hardware();
    auto& rate = key[0] == 'a'   ? two.collectives.all_gather
                 : key[0] == 'r' ? two.collectives.reduce_scatter
                                 : two.collectives.broadcast;
    rate.gbps = 0;
    EXPECT_THAT(refused(to_yaml(two)), HasSubstr("collectives." + std::string(key) + ".gbps\" is 0"));
  }
  spec.gpus = 1;
  EXPECT_EQ(load_hardware_spec(write("hw.yaml", to_yaml(spec))), spec);
}

TEST_F(HardwareYaml, WhatNeedNotBeMeasuredHasDefaults) {
  HardwareSpec spec = sample_hardware();
  spec.contention = {};
  spec.kernels.attention_fwd_gflops = spec.kernels.attention_bwd_gflops = 0;
  spec.kernels.layer_fwd_gbps = spec.kernels.layer_bwd_gbps = 0;
  spec.host.split_weights_elements_per_s = spec.host.split_moments_elements_per_s = 0;
  std::string text;
  std::istringstream lines(to_yaml(sample_hardware()));
  int dropped = 0;
  for (std::string line; std::getline(lines, line);) {
    const bool optional = std::ranges::any_of(
        std::array{"split", "attention", "layer_fwd_gbps", "layer_bwd_gbps", "contention:", "headroom", "beside_h2d"},
        [&](const char* part) { return line.find(part) != std::string::npos; });
    dropped += optional ? 1 : 0;
    if (!optional) text += line + "\n";
  }
  EXPECT_EQ(dropped, 10);
  EXPECT_EQ(load_hardware_spec(write("hw.yaml", text)), spec);
}

TEST_F(HardwareYaml, ContentionNeverMakesFaster) {
  HardwareSpec spec = sample_hardware();
  spec.contention.d2h.headroom = 0.9;
  EXPECT_THAT(refused(to_yaml(spec)), AllOf(HasSubstr("contention.d2h.headroom"), HasSubstr("at least 1")));
  spec = sample_hardware();
  spec.contention.streams.beside_h2d = -0.1;
  EXPECT_THAT(refused(to_yaml(spec)), HasSubstr("contention.streams.beside_h2d"));
}

TEST(Hardware, ACorrectedCapLeavesContentionAsItWas) {
  HardwareSpec spec = sample_hardware();
  const ContentionSpec before = spec.contention;
  correct_dram_cap(spec, 2 * spec.host.dram_gbps);
  EXPECT_EQ(spec.host.dram_gbps, 344);
  EXPECT_DOUBLE_EQ(spec.contention.h2d.beside_streams, 2 * before.h2d.beside_streams);
  EXPECT_DOUBLE_EQ(spec.contention.h2d.beside_copies, 2 * before.h2d.beside_copies);
  EXPECT_DOUBLE_EQ(spec.contention.d2h.beside_copies, 2 * before.d2h.beside_copies);
  EXPECT_DOUBLE_EQ(spec.contention.streams.beside_streams, 2 * before.streams.beside_streams);
  EXPECT_DOUBLE_EQ(spec.contention.streams.beside_d2h, 2 * before.streams.beside_d2h);
  EXPECT_EQ(spec.contention.d2h.headroom, before.d2h.headroom);
}

TEST_F(HardwareYaml, OtherRules) {
  EXPECT_THAT(refused("backend: cuda", "backend: tpu"), AllOf(HasSubstr("hw.yaml:7: "), HasSubstr("cpu or cuda")));
  EXPECT_THAT(refused("measured: true", "measured: yes"), HasSubstr("true or false"));
  EXPECT_THAT(refused("context_bytes: 12345", "context_bytes: 30GiB"),
              AllOf(HasSubstr("hw.yaml:9: "), HasSubstr("must be less than device.memory_bytes")));
  EXPECT_THAT(refused("slidedp.hardware/1", "slidedp.train/1"), HasSubstr("slidedp.hardware/1"));
}

}  // namespace
}  // namespace slidedp
