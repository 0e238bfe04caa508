#include <cstdlib>
#include <nlohmann/json.hpp>
#include <set>

#include "runtime/io/checkpoint_hf.h"
#include "tests/runtime/io/io_fixture.h"

namespace slidedp {
namespace {

using testing::AllOf;
using testing::HasSubstr;

constexpr const char* kConfig = R"({
  "architectures": ["Qwen3ForCausalLM"],
  "rms_norm_eps": 1e-06,
  "torch_dtype": "bfloat16",
  "name": "\u00fc"
}
)";

class ExportTest : public testing::Test {
 protected:
  ExportTest() {
    fill_random(state_, 1);
    write_file(source_ / "config.json", kConfig);
    for (const char* name : {"generation_config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model",
                             "special_tokens_map.json", "vocab.json", "merges.txt", "chat_template.jinja",
                             "other.jinja", "added_tokens.json", "spiece.model", "sentencepiece.bpe.model"}) {
      write_file(source_ / name, std::string("content of ") + name);
      travelling_.insert(name);
    }
    for (const char* name :
         {"model.safetensors", "optimizer.pt", "README.md", "training_args.bin", "tokenizer/inner"}) {
      write_file(source_ / name, "stays");
    }
  }

  // The directory holds the weights of `state` and everything else that belongs to it, and nothing else.
  void expect_complete(const fs::path& dir, HostState& state) {
    HostState loaded(state.layout());
    EXPECT_TRUE(load_hf_checkpoint(dir, loaded, 2).empty());
    for (const UnitLayout& unit : state.layout().units) {
      EXPECT_TRUE(std::ranges::equal(loaded.unit(unit.unit).hi, state.unit(unit.unit).hi)) << unit.name;
    }
    std::set<std::string> names;
    for (const auto& [name, content] : snapshot(dir)) {
      if (name.starts_with("model")) continue;
      names.insert(name);
      EXPECT_EQ(content, read_file(source_ / name)) << name;
    }
    std::set<std::string> expected = travelling_;
    expected.insert("config.json");
    EXPECT_EQ(names, expected);
  }
  void expect_no_leftovers() {
    EXPECT_FALSE(fs::exists(partial_directory(dir_)));
    EXPECT_FALSE(fs::exists(replaced_directory(dir_)));
  }

  TemporaryFolder folder_;
  fs::path source_ = folder_ / "source";
  fs::path dir_ = folder_ / "hf";
  HostState state_{tiny_layout(true)};
  std::set<std::string> travelling_;
};

TEST_F(ExportTest, WritesACompleteCheckpoint) {
  const UnitState first = state_.unit(0);
  const std::vector<uint16_t> lo(first.lo.begin(), first.lo.end());
  export_hf_checkpoint(posix_file_system(), read_export_files(source_), state_, dir_);
  expect_complete(dir_, state_);
  expect_no_leftovers();
  EXPECT_TRUE(std::ranges::equal(first.lo, lo)) << "exporting does not touch the state";
  const SafetensorsFile file(dir_ / "model.safetensors");
  EXPECT_EQ(file.metadata().at("format"), "pt");
  EXPECT_EQ(file.find("lm_head.weight"), nullptr) << "a tied head is not written";
  for (const StoredTensor& tensor : file.tensors()) EXPECT_EQ(tensor.type_name, "BF16");
}

TEST_F(ExportTest, AnUntiedHeadIsWritten) {
  HostState untied(tiny_layout(false));
  fill_random(untied, 2);
  export_hf_checkpoint(posix_file_system(), read_export_files(source_), untied, dir_);
  expect_complete(dir_, untied);
  EXPECT_NE(SafetensorsFile(dir_ / "model.safetensors").find("lm_head.weight"), nullptr);
}

TEST_F(ExportTest, ATrailingSlashChangesNothing) {
  export_hf_checkpoint(posix_file_system(), read_export_files(source_), state_, dir_.string() + "/");
  expect_complete(dir_, state_);
  expect_no_leftovers();
}

TEST_F(ExportTest, ShardsStayBelowTheLimit) {
  constexpr int64_t kLimit = 5000;
  export_hf_checkpoint(posix_file_system(), read_export_files(source_), state_, dir_, kLimit);
  expect_complete(dir_, state_);
  const auto index = nlohmann::json::parse(read_file(dir_ / "model.safetensors.index.json"));
  std::set<std::string> files;
  int64_t total = 0;
  size_t tensors = 0;
  for (const auto& [name, file] : index["weight_map"].items()) files.insert(file.get<std::string>());
  ASSERT_GT(files.size(), 2u);
  EXPECT_EQ(*files.begin(), "model-00001-of-0000" + std::to_string(files.size()) + ".safetensors");
  for (const std::string& name : files) {
    const SafetensorsFile file(dir_ / name);
    int64_t bytes = 0;
    for (const StoredTensor& tensor : file.tensors()) {
      bytes += static_cast<int64_t>(tensor.data.size());
      EXPECT_EQ(index["weight_map"][tensor.name], name);
    }
    EXPECT_LE(bytes, kLimit);
    total += bytes;
    tensors += file.tensors().size();
  }
  EXPECT_EQ(index["weight_map"].size(), tensors);
  EXPECT_EQ(index["metadata"]["total_size"], total);
  EXPECT_FALSE(fs::exists(dir_ / "model.safetensors"));
}

TEST_F(ExportTest, ConfigNamesBf16AndKeepsTheRest) {
  const std::string text = R"({"zeta": 1e-06, "torch_dtype": "float32", "dtype": "float16", "alpha": [1, 10000.0]})";
  write_file(source_ / "config.json", text);
  export_hf_checkpoint(posix_file_system(), read_export_files(source_), state_, dir_);
  auto expected = nlohmann::ordered_json::parse(text);
  expected["torch_dtype"] = expected["dtype"] = "bfloat16";
  EXPECT_EQ(nlohmann::ordered_json::parse(read_file(dir_ / "config.json")), expected);
  write_file(source_ / "config.json", R"({"no_dtype" :   1})");
  export_hf_checkpoint(posix_file_system(), read_export_files(source_), state_, dir_);
  EXPECT_EQ(read_file(dir_ / "config.json"), R"({"no_dtype" :   1})") << "what says nothing else stays byte for byte";
}

TEST_F(ExportTest, BadSourceOrTarget) {
  write_file(source_ / "config.json", "{");
  EXPECT_THAT(error_of([&] { export_hf_checkpoint(posix_file_system(), read_export_files(source_), state_, dir_); }),
              AllOf(HasSubstr("config.json"), HasSubstr("not JSON")));
  fs::remove(source_ / "config.json");
  EXPECT_THAT(error_of([&] { export_hf_checkpoint(posix_file_system(), read_export_files(source_), state_, dir_); }),
              HasSubstr("config.json"));
  EXPECT_FALSE(fs::exists(dir_));
  expect_no_leftovers();
  write_file(source_ / "config.json", "{}");
  write_file(dir_, "a file");
  EXPECT_THAT(error_of([&] { export_hf_checkpoint(posix_file_system(), read_export_files(source_), state_, dir_); }),
              HasSubstr("not a directory"));
}

// Every operation fails once, with and without a previous export, with one file and with shards.
TEST_F(ExportTest, AFullDiskAtAnyOperationLeavesThePreviousExport) {
  for (int64_t shard_bytes : {kMaxShardBytes, int64_t{8000}}) {
    for (bool previous : {false, true}) {
      fs::remove_all(dir_);
      HostState old(tiny_layout(true));
      fill_random(old, 3);
      if (previous) export_hf_checkpoint(posix_file_system(), read_export_files(source_), old, dir_);
      FaultyFileSystem counting;
      export_hf_checkpoint(counting, read_export_files(source_), state_, folder_ / "counted", shard_bytes);
      fs::remove_all(folder_ / "counted");
      const int operations = counting.operations() + (previous ? 1 : 0);  // one more rename
      ASSERT_GT(operations, 50);
      for (int at = 0; at < operations; ++at) {
        FaultyFileSystem files(at);
        const std::string message =
            error_of([&] { export_hf_checkpoint(files, read_export_files(source_), state_, dir_, shard_bytes); });
        EXPECT_THAT(message, AllOf(HasSubstr("No space left"), HasSubstr(dir_.string()))) << files.failed_at();
        expect_no_leftovers();
        ASSERT_EQ(fs::exists(dir_), previous) << files.failed_at();
        if (previous) expect_complete(dir_, old);
        if (HasFailure()) return;
      }
      FaultyFileSystem enough(operations);
      export_hf_checkpoint(enough, read_export_files(source_), state_, dir_, shard_bytes);
      EXPECT_EQ(enough.operations(), operations);
      expect_complete(dir_, state_);
      expect_no_leftovers();
    }
  }
}

// The new export cannot take its place and the previous one cannot go back: it is complete beside, and the next export
// or a reader finds it.
TEST_F(ExportTest, NothingIsLostWhenNothingCanBeRenamed) {
  HostState old(tiny_layout(true));
  fill_random(old, 3);
  export_hf_checkpoint(posix_file_system(), read_export_files(source_), old, dir_);
  FaultyFileSystem counting;
  export_hf_checkpoint(counting, read_export_files(source_), state_, folder_ / "counted");
  FaultyFileSystem files(counting.operations(), true);  // the second rename and whatever follows
  EXPECT_THAT(error_of([&] { export_hf_checkpoint(files, read_export_files(source_), state_, dir_); }),
              HasSubstr(replaced_directory(dir_).string()));
  EXPECT_FALSE(fs::exists(dir_));
  expect_complete(replaced_directory(dir_), old);
  EXPECT_THAT(error_of([&] { load_hf_checkpoint(dir_, state_, 1); }),
              AllOf(HasSubstr("interrupted"), HasSubstr(replaced_directory(dir_).string())));
  // An export that fails brings it back, one that succeeds replaces it.
  FaultyFileSystem fails(2);
  error_of([&] { export_hf_checkpoint(fails, read_export_files(source_), state_, dir_); });
  expect_complete(dir_, old);
  expect_no_leftovers();
}

TEST_F(ExportTest, LeftoversOfAKilledExportAreRemoved) {
  write_file(partial_directory(dir_) / "model.safetensors", "half");
  export_hf_checkpoint(posix_file_system(), read_export_files(source_), state_, dir_);
  expect_complete(dir_, state_);
  // Killed after the renames, before the previous export was removed.
  write_file(replaced_directory(dir_) / "model.safetensors", "old");
  export_hf_checkpoint(posix_file_system(), read_export_files(source_), state_, dir_);
  expect_complete(dir_, state_);
  expect_no_leftovers();
}

constexpr const char* kResave = R"(
import sys
from safetensors import safe_open
from safetensors.torch import save_file
source, target = sys.argv[1:]
tensors = {}
with safe_open(source, framework="pt") as file:
    assert file.metadata() == {"format": "pt"}, file.metadata()
    for name in file.keys():
        tensors[name] = file.get_tensor(name)
assert all(str(tensor.dtype) == "torch.bfloat16" for tensor in tensors.values())
save_file(tensors, target, metadata={"format": "pt"})
)";

TEST_F(ExportTest, TheReferenceLibraryReadsItAndWritesItBack) {
  export_hf_checkpoint(posix_file_system(), read_export_files(source_), state_, dir_);
  write_file(folder_ / "resave.py", kResave);
  fs::create_directory(folder_ / "again");
  const std::string command = std::string(SLIDEDP_PYTHON) + " " + (folder_ / "resave.py").string() + " " +
                              (dir_ / "model.safetensors").string() + " " +
                              (folder_ / "again/model.safetensors").string();
  ASSERT_EQ(std::system(command.c_str()), 0) << command;
  HostState loaded(state_.layout());
  load_hf_checkpoint(folder_ / "again", loaded, 2);
  for (const UnitLayout& unit : state_.layout().units) {
    EXPECT_TRUE(std::ranges::equal(loaded.unit(unit.unit).hi, state_.unit(unit.unit).hi)) << unit.name;
  }
}

}  // namespace
}  // namespace slidedp
