#include "runtime/data/packed_dataset.h"

#include <gmock/gmock.h>
#include <unistd.h>

#include <filesystem>
#include <functional>
#include <map>

#include "model/base/error.h"
#include "runtime/io/safetensors.h"

namespace slidedp {
namespace {

using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;

constexpr int64_t kSeq = 6;
constexpr int64_t kVocabulary = 1000;
const std::string kHash = "sha256:" + std::string(64, 'a');

// A data set that can be spoilt before it is written.
struct Content {
  int64_t rows = 0;
  std::vector<int32_t> ids, labels, positions;
  std::map<std::string, std::string> metadata = {{"format", "slidedp.packed"},
                                                 {"version", "1"},
                                                 {"seq", std::to_string(kSeq)},
                                                 {"vocabulary_size", std::to_string(kVocabulary)},
                                                 {"tokenizer_hash", kHash}};

  // Row r: documents of the given lengths; ids 100 r + column, every token but a document's first is a target.
  void add_row(const std::vector<int>& documents) {
    int column = 0;
    for (int length : documents) {
      for (int i = 0; i < length; ++i, ++column) {
        ids.push_back(static_cast<int32_t>(100 * rows + column));
        labels.push_back(i == 0 ? -100 : ids.back());
        positions.push_back(i);
      }
    }
    ASSERT_EQ(column, kSeq);
    ++rows;
  }
  int32_t& at(std::vector<int32_t>& values, int64_t row, int64_t column) { return values[row * kSeq + column]; }
  std::vector<TensorToStore> tensors() const {
    const auto tensor = [this](const std::string& name, const std::vector<int32_t>& values) {
      return TensorToStore{name, StoredType::i32, {rows, kSeq}, std::as_bytes(std::span(values))};
    };
    return {tensor("input_ids", ids), tensor("labels", labels), tensor("position_ids", positions)};
  }
};

class PackedDatasetTest : public testing::Test {
 protected:
  PackedDatasetTest() {
    directory_ = std::filesystem::temp_directory_path() / ("slidedp-data-" + std::to_string(getpid()));
    std::filesystem::create_directories(directory_);
    model_.name = "tiny";
    model_.vocabulary = kVocabulary;
    model_.max_position = 16;
    for (const auto& documents : {std::vector{6}, {2, 4}, {3, 1, 2}, {6}, {1, 5}}) content_.add_row(documents);
  }
  ~PackedDatasetTest() override { std::filesystem::remove_all(directory_); }

  std::filesystem::path file() const { return directory_ / "packed.safetensors"; }
  void write(const std::vector<TensorToStore>& tensors) const {
    write_safetensors(posix_file_system(), file(), tensors, content_.metadata);
  }
  PackedDataset open(int64_t seq = kSeq) const {
    write(content_.tensors());
    return PackedDataset(file(), model_, seq);
  }
  // The message of the refusal; it must name the file.
  std::string refusal(int64_t seq = kSeq) const {
    return message_of([&] { open(seq); });
  }
  std::string message_of(const std::function<void()>& action) const {
    try {
      action();
    } catch (const Error& error) {
      EXPECT_THAT(error.what(), HasSubstr("packed.safetensors"));
      return error.what();
    }
    ADD_FAILURE() << "not refused";
    return "";
  }

  std::filesystem::path directory_;
  ModelSpec model_;
  Content content_;
};

Plan plan_of(int ranks, int waves, int micro_batches, int64_t rows) {
  Plan plan;
  plan.seq = kSeq;
  plan.ranks = ranks;
  plan.waves = waves;
  plan.micro_batches = micro_batches;
  plan.micro_batch_rows = rows;
  return plan;
}

TEST_F(PackedDatasetTest, ReadsWhatIsThere) {
  const PackedDataset data = open();
  EXPECT_EQ(data.rows(), 5);
  EXPECT_EQ(data.seq(), kSeq);
  EXPECT_EQ(data.tokenizer_hash(), kHash);
}

TEST_F(PackedDatasetTest, TargetsAreTheNextLabelsAndDocumentsStartAtPositionZero) {
  content_.at(content_.labels, 1, 4) = -100;  // an ignored token in the middle of a document
  const PackedDataset data = open();
  const Plan plan = plan_of(1, 1, 1, 3);
  std::vector<int32_t> out(plan.batch_bytes() / 4, 77);
  const RankBatch batch = data.fill(0, plan, 0, out.data());
  EXPECT_THAT(std::vector(out.begin(), out.begin() + 18),
              ElementsAre(0, 1, 2, 3, 4, 5, 100, 101, 102, 103, 104, 105, 200, 201, 202, 203, 204, 205));
  // Nothing is predicted across a document's end or a row's end.
  EXPECT_THAT(std::vector(out.begin() + 18, out.begin() + 36),
              ElementsAre(1, 2, 3, 4, 5, -100, 101, -100, 103, -100, 105, -100, 201, 202, -100, -100, 205, -100));
  EXPECT_THAT(std::vector(out.begin() + 36, out.end()),
              ElementsAre(0, 1, 2, 3, 4, 5, 0, 1, 0, 1, 2, 3, 0, 1, 2, 0, 0, 1));
  ASSERT_EQ(batch.document_starts.size(), 1u);
  EXPECT_THAT(batch.document_starts[0], ElementsAre(0, 6, 8, 12, 15, 16));
  EXPECT_EQ(data.target_tokens(0, 3), 5 + 3 + 3);
}

TEST_F(PackedDatasetTest, RanksThenWavesThenMicroBatchesTakeContiguousRows) {
  for (int row = 5; row < 10; ++row) content_.add_row({6});
  const PackedDataset data = open();
  // 8 rows a step, 10 rows in the file: step 1 starts at row 8 and wraps.
  for (const Plan& plan : {plan_of(1, 1, 1, 8), plan_of(2, 1, 2, 2), plan_of(2, 2, 2, 1), plan_of(4, 2, 1, 1),
                           plan_of(1, 2, 2, 2), plan_of(8, 1, 1, 1)}) {
    for (int64_t step = 0; step < 6; ++step) {
      std::vector<int64_t> order;
      for (int rank = 0; rank < plan.ranks; ++rank) {
        std::vector<int32_t> out(plan.batch_bytes() / 4);
        const RankBatch batch = data.fill(step, plan, rank, out.data());
        EXPECT_EQ(batch.document_starts.size(), static_cast<size_t>(plan.waves * plan.micro_batches));
        for (int part = 0; part < plan.waves * plan.micro_batches; ++part) {
          for (int64_t row = 0; row < plan.micro_batch_rows; ++row) {
            order.push_back(out[part * 3 * plan.micro_batch_tokens() + row * kSeq] / 100);
          }
        }
      }
      std::vector<int64_t> expected;
      for (int64_t row = 0; row < 8; ++row) expected.push_back((step * 8 + row) % 10);
      EXPECT_EQ(order, expected);
    }
  }
}

TEST_F(PackedDatasetTest, TargetTokensCountsTheWholeStepAndWraps) {
  const PackedDataset data = open();
  const int per_row[] = {5, 4, 3, 5, 4};
  for (int64_t step = 0; step < 10; ++step) {
    int64_t expected = 0;
    for (int64_t row = 0; row < 3; ++row) expected += per_row[(step * 3 + row) % 5];
    EXPECT_EQ(data.target_tokens(step, 3), expected) << step;
  }
}

TEST_F(PackedDatasetTest, StepWithoutTargetsIsZeroNotAnError) {
  for (auto& label : content_.labels) label = -100;
  EXPECT_EQ(open().target_tokens(0, 2), 0);
}

TEST_F(PackedDatasetTest, BatchLargerThanTheFileIsRefused) {
  const PackedDataset data = open();
  EXPECT_NO_THROW(data.require_rows(5));
  std::vector<int32_t> out(6 * 3 * kSeq);
  for (const auto& action :
       std::vector<std::function<void()>>{[&] { data.require_rows(6); }, [&] { data.target_tokens(0, 6); },
                                          [&] { data.fill(0, plan_of(2, 1, 1, 3), 0, out.data()); }}) {
    EXPECT_THAT(message_of(action), AllOf(HasSubstr("5 rows"), HasSubstr("6 of one step")));
  }
}

TEST_F(PackedDatasetTest, FillRefusesAPlanOfAnotherSeq) {
  const PackedDataset data = open();
  Plan plan = plan_of(1, 1, 1, 1);
  plan.seq = kSeq - 1;
  std::vector<int32_t> out(100);
  EXPECT_THROW(data.fill(0, plan, 0, out.data()), std::logic_error);
}

TEST_F(PackedDatasetTest, MissingFileIsRefused) {
  EXPECT_THAT(message_of([&] { PackedDataset(file(), model_, kSeq); }), HasSubstr("packed.safetensors"));
}

TEST_F(PackedDatasetTest, TruncatedFileIsRefused) {
  write(content_.tensors());
  std::filesystem::resize_file(file(), std::filesystem::file_size(file()) - 4);
  message_of([&] { PackedDataset(file(), model_, kSeq); });
}

TEST_F(PackedDatasetTest, MetadataIsChecked) {
  const auto original = content_.metadata;
  for (const auto& [key, value] : original) {
    content_.metadata = original;
    content_.metadata.erase(key);
    EXPECT_THAT(refusal(), HasSubstr("'" + key + "'"));
  }
  const std::vector<std::array<std::string, 3>> wrong = {
      {"format", "other.packed", "other.packed"},
      {"version", "2", "version '2'"},
      {"seq", "six", "'seq' is 'six'"},
      {"seq", "6 ", "'seq'"},
      {"seq", "-6", "'seq'"},
      {"vocabulary_size", "0", "'vocabulary_size'"},
      {"tokenizer_hash", "sha256:ab", "tokenizer_hash"},
      {"tokenizer_hash", "md5:" + std::string(64, 'a'), "md5"},
      {"tokenizer_hash", "sha256:" + std::string(64, 'A'), "lower-case"}};
  for (const auto& [key, value, text] : wrong) {
    content_.metadata = original;
    content_.metadata[key] = value;
    EXPECT_THAT(refusal(), HasSubstr(text)) << key << " = " << value;
  }
  content_.metadata = original;
  content_.metadata["made_by"] = "anyone";  // other keys are allowed
  EXPECT_NO_THROW(open());
}

TEST_F(PackedDatasetTest, TensorsAreChecked) {
  for (const char* name : {"input_ids", "labels", "position_ids"}) {
    auto tensors = content_.tensors();
    std::erase_if(tensors, [&](const auto& tensor) { return tensor.name == name; });
    write(tensors);
    EXPECT_THAT(message_of([&] { PackedDataset(file(), model_, kSeq); }), AllOf(HasSubstr(name), HasSubstr("missing")));
  }
  auto tensors = content_.tensors();
  tensors.push_back(tensors[0]);
  tensors.back().name = "attention_mask";
  write(tensors);
  EXPECT_THAT(message_of([&] { PackedDataset(file(), model_, kSeq); }), HasSubstr("attention_mask"));

  tensors = content_.tensors();
  tensors[1].type = StoredType::f32;
  write(tensors);
  EXPECT_THAT(message_of([&] { PackedDataset(file(), model_, kSeq); }),
              AllOf(HasSubstr("labels"), HasSubstr("F32"), HasSubstr("I32")));
}

TEST_F(PackedDatasetTest, ShapesAreChecked) {
  const std::vector<int32_t> values(5 * kSeq);
  const std::vector<std::vector<int64_t>> shapes = {{5 * kSeq}, {kSeq, 5}, {4, kSeq}, {5, kSeq, 1}};
  for (int index : {0, 1, 2}) {
    for (const auto& shape : shapes) {
      if (index == 0 && shape == std::vector<int64_t>{4, kSeq}) continue;  // then the others have one row too many
      int64_t elements = 1;
      for (int64_t extent : shape) elements *= extent;
      auto tensors = content_.tensors();
      tensors[index].shape = shape;
      tensors[index].data = std::as_bytes(std::span(values).first(elements));
      write(tensors);
      EXPECT_THAT(message_of([&] { PackedDataset(file(), model_, kSeq); }),
                  AllOf(HasSubstr(tensors[index].name), HasSubstr("shape")));
    }
  }
  content_.rows = 0;
  content_.ids = content_.labels = content_.positions = {};
  EXPECT_THAT(refusal(), HasSubstr("shape [0, 6]"));
}

TEST_F(PackedDatasetTest, SeqMustBeThePlansAndFitTheModel) {
  EXPECT_THAT(refusal(kSeq - 1), AllOf(HasSubstr("6 tokens"), HasSubstr("5 are wanted")));
  EXPECT_THAT(refusal(kSeq + 1), HasSubstr("7 are wanted"));
  model_.max_position = kSeq;
  EXPECT_NO_THROW(open());
  model_.max_position = kSeq - 1;
  EXPECT_THAT(refusal(), AllOf(HasSubstr("max_position_embeddings"), HasSubstr("5 positions")));
}

TEST_F(PackedDatasetTest, VocabularyMustFitTheModel) {
  model_.vocabulary = kVocabulary - 1;
  EXPECT_THAT(refusal(), AllOf(HasSubstr("1000"), HasSubstr("999"), HasSubstr("tiny")));
  model_.vocabulary = kVocabulary + 24;  // padded models have more rows than the tokenizer has tokens
  EXPECT_NO_THROW(open());
}

// One spoilt entry each: row, column and value are named.
TEST_F(PackedDatasetTest, EntriesAreChecked) {
  struct Case {
    std::vector<int32_t> Content::*tensor;
    int64_t row, column;
    int32_t value;
    const char* text;
  };
  const std::vector<Case> cases = {
      {&Content::ids, 3, 2, 1000, "token id 1000 is outside the vocabulary"},
      {&Content::ids, 4, 5, -1, "token id -1 is outside the vocabulary"},
      {&Content::labels, 2, 3, 203, "first token is a target"},
      {&Content::labels, 1, 0, 100, "first token is a target"},
      {&Content::labels, 3, 2, 303, "labels are not shifted"},
      {&Content::labels, 3, 2, -1, "label -1"},
      {&Content::positions, 2, 0, 1, "row 2 starts at position 1"},
      {&Content::positions, 3, 4, 5, "position 5 follows position 3"},
      {&Content::positions, 3, 4, 3, "position 3 follows position 3"},
      {&Content::positions, 3, 4, -1, "position -1"},
  };
  const Content good = content_;
  for (const Case& c : cases) {
    content_ = good;
    content_.at(content_.*c.tensor, c.row, c.column) = c.value;
    const std::string message = refusal();
    EXPECT_THAT(message, AllOf(HasSubstr(c.text), HasSubstr("row " + std::to_string(c.row))));
    const std::string column = "column " + std::to_string(c.column);
    EXPECT_THAT(message, HasSubstr(c.tensor == &Content::positions && c.column == 0 ? "" : column));
  }
}

}  // namespace
}  // namespace slidedp
