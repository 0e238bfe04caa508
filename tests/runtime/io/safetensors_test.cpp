#include "runtime/io/safetensors.h"

#include <cstring>
#include <stdexcept>
#include <utility>

#include "tests/runtime/io/io_fixture.h"

namespace slidedp {
namespace {

using testing::HasSubstr;

// A file of this header (or of raw bytes) and data.
std::string with_header(const std::string& header, const std::string& data) {
  std::string text(8, '\0');
  const uint64_t length = header.size();
  std::memcpy(text.data(), &length, 8);
  return text + header + data;
}

class SafetensorsTest : public testing::Test {
 protected:
  std::string error_of_file(const std::string& content) {
    write_file(file_, content);
    const std::string message = error_of([&] { SafetensorsFile file(file_); });
    EXPECT_THAT(message, HasSubstr(file_.string()));
    return message;
  }
  // For one tensor "a" with the given description and data.
  std::string error_of_tensor(const std::string& description, size_t data_bytes) {
    return error_of_file(with_header("{\"a\":" + description + "}", std::string(data_bytes, 'x')));
  }
  TemporaryFolder folder_;
  fs::path file_ = folder_ / "test.safetensors";
};

TEST_F(SafetensorsTest, RoundTrip) {
  const std::vector<uint16_t> half{1, 2, 3, 4, 5, 6};
  const std::vector<int32_t> whole{-100, 7};
  const std::vector<float> scalar{2.5f};
  const std::vector<TensorToStore> tensors{
      {"z first", StoredType::bf16, {2, 3}, std::as_bytes(std::span(half))},
      {"a \"quoted\" \u00fc", StoredType::i32, {2}, std::as_bytes(std::span(whole))},
      {"scalar", StoredType::f32, {}, std::as_bytes(std::span(scalar))},
      {"empty", StoredType::f16, {0, 5}, {}}};
  write_safetensors(posix_file_system(), file_, tensors, {{"format", "pt"}, {"seq", "16"}});
  SafetensorsFile opened(file_);
  const SafetensorsFile file = std::move(opened);
  EXPECT_EQ(file.path(), file_);
  EXPECT_THAT(file.metadata(), testing::ElementsAre(testing::Pair("format", "pt"), testing::Pair("seq", "16")));
  ASSERT_EQ(file.tensors().size(), tensors.size());
  for (const TensorToStore& wanted : tensors) {
    const StoredTensor* found = file.find(wanted.name);
    ASSERT_NE(found, nullptr) << wanted.name;
    EXPECT_EQ(found->type, wanted.type);
    EXPECT_EQ(found->type_name, stored_name(wanted.type));
    EXPECT_EQ(found->shape, wanted.shape);
    ASSERT_EQ(found->data.size(), wanted.data.size());
    EXPECT_TRUE(std::equal(found->data.begin(), found->data.end(), wanted.data.begin()));
  }
  EXPECT_EQ(file.find("scalar")->elements(), 1);
  EXPECT_EQ(file.find("empty")->elements(), 0);
  EXPECT_EQ(file.find("absent"), nullptr);
  uint64_t header = 0;
  std::memcpy(&header, read_file(file_).data(), 8);
  EXPECT_EQ(header % 8, 0u) << "data is to be aligned";
}

TEST_F(SafetensorsTest, TruncatedAnywhereIsAnError) {
  const std::string data(24, 'x');
  save(file_, {{"a", {StoredType::f32, {2}, data.substr(0, 8)}}, {"b", {StoredType::bf16, {4, 2}, data.substr(8)}}});
  const std::string whole = read_file(file_);
  for (size_t length = 0; length < whole.size(); ++length) {
    write_file(file_, whole.substr(0, length));
    EXPECT_THROW(SafetensorsFile{file_}, Error) << length << " of " << whole.size() << " bytes";
  }
  write_file(file_, whole);
  EXPECT_EQ(SafetensorsFile(file_).tensors().size(), 2u);
  EXPECT_THAT(error_of_file(whole + "x"), HasSubstr("1 bytes follow the last tensor"));
  EXPECT_THAT(error_of_file(whole.substr(0, whole.size() - 1)), HasSubstr("truncated"));
  EXPECT_THAT(error_of_file(whole.substr(0, 20)), HasSubstr("truncated inside the header"));
}

TEST_F(SafetensorsTest, NoSuchFileOrNotAFile) {
  EXPECT_THAT(error_of([&] { SafetensorsFile file(folder_ / "absent"); }), HasSubstr("No such file"));
  EXPECT_THAT(error_of([&] { SafetensorsFile file(folder_.path()); }), HasSubstr("not a regular file"));
}

TEST_F(SafetensorsTest, MalformedHeaders) {
  EXPECT_THAT(error_of_file(std::string(8, '\xff') + "{}"), HasSubstr("more than 100 MB"));
  EXPECT_THAT(error_of_file(with_header("", "")), HasSubstr("does not start with {"));
  EXPECT_THAT(error_of_file(with_header(" {}", "")), HasSubstr("does not start with {"));
  EXPECT_THAT(error_of_file(with_header("[1]", "")), HasSubstr("does not start with {"));
  EXPECT_THAT(error_of_file(with_header("{\"a\":", "")), HasSubstr("not JSON"));
  EXPECT_THAT(error_of_file(with_header("{} x", "")), HasSubstr("not JSON"));
  EXPECT_THAT(error_of_file(with_header("{\"\xff\":1}", "")), HasSubstr("not JSON"));
  EXPECT_THAT(error_of_file(with_header("{\"__metadata__\":3}", "")), HasSubstr("__metadata__"));
  EXPECT_THAT(error_of_file(with_header("{\"__metadata__\":{\"seq\":3}}", "")), HasSubstr("seq"));
  const std::string tensor = R"({"dtype":"U8","shape":[1],"data_offsets":[0,1]})";
  EXPECT_THAT(error_of_file(with_header("{\"a\":" + tensor + ",\"a\":" + tensor + "}", "x")), HasSubstr("a twice"));
  write_file(file_, with_header("{}  ", ""));
  EXPECT_TRUE(SafetensorsFile(file_).tensors().empty()) << "spaces may follow the header";
}

TEST_F(SafetensorsTest, MalformedTensors) {
  EXPECT_THAT(error_of_tensor("3", 0), HasSubstr("tensor a"));
  EXPECT_THAT(error_of_tensor(R"({"dtype":"U8","shape":[1]})", 1), HasSubstr("data_offsets"));
  EXPECT_THAT(error_of_tensor(R"({"dtype":"U8","shape":[1],"data_offsets":[0,1],"more":1})", 1), HasSubstr("exactly"));
  EXPECT_THAT(error_of_tensor(R"({"dtype":"U9","shape":[1],"data_offsets":[0,1]})", 1), HasSubstr("U9"));
  EXPECT_THAT(error_of_tensor(R"({"dtype":8,"shape":[1],"data_offsets":[0,1]})", 1), HasSubstr("dtype"));
  EXPECT_THAT(error_of_tensor(R"({"dtype":"U8","shape":1,"data_offsets":[0,1]})", 1), HasSubstr("shape"));
  EXPECT_THAT(error_of_tensor(R"({"dtype":"U8","shape":[-1],"data_offsets":[0,1]})", 1), HasSubstr("shape"));
  EXPECT_THAT(error_of_tensor(R"({"dtype":"U8","shape":[1.0],"data_offsets":[0,1]})", 1), HasSubstr("shape"));
  EXPECT_THAT(error_of_tensor(R"({"dtype":"U8","shape":[1],"data_offsets":[0]})", 1), HasSubstr("pair"));
  EXPECT_THAT(error_of_tensor(R"({"dtype":"U8","shape":[1],"data_offsets":[1,0]})", 1), HasSubstr("range"));
  EXPECT_THAT(error_of_tensor(R"({"dtype":"U8","shape":[2],"data_offsets":[0,1]})", 1), HasSubstr("not its shape"));
  EXPECT_THAT(error_of_tensor(R"({"dtype":"BF16","shape":[2],"data_offsets":[0,2]})", 2), HasSubstr("not its shape"));
  EXPECT_THAT(error_of_tensor(R"({"dtype":"F4","shape":[3],"data_offsets":[0,2]})", 2), HasSubstr("not its shape"));
  EXPECT_THAT(error_of_tensor(R"({"dtype":"U8","shape":[1],"data_offsets":[0,18446744073709551615]})", 1),
              HasSubstr("range"));
  // 2^32 * 2^32 bytes wrap to 0.
  EXPECT_THAT(error_of_tensor(R"({"dtype":"U8","shape":[4294967296,4294967296],"data_offsets":[0,0]})", 0),
              HasSubstr("not its shape"));
}

TEST_F(SafetensorsTest, GapsAndOverlaps) {
  const auto two = [&](const std::string& first, const std::string& second) {
    return error_of_file(with_header("{\"a\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":" + first +
                                         "},\"b\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":" + second + "}}",
                                     std::string(12, 'x')));
  };
  EXPECT_THAT(two("[0,4]", "[8,12]"), HasSubstr("a gap"));
  EXPECT_THAT(two("[4,8]", "[8,12]"), HasSubstr("a gap"));
  EXPECT_THAT(two("[0,4]", "[3,7]"), HasSubstr("an overlap"));
  EXPECT_THAT(two("[0,4]", "[0,4]"), HasSubstr("an overlap"));
  EXPECT_THAT(two("[0,4]", "[4,8]"), HasSubstr("4 bytes follow"));
}

// Whatever one byte of the file becomes, reading ends in an Error or in tensors inside the file.
TEST_F(SafetensorsTest, CorruptedBytesNeverReachBeyondTheFile) {
  save(file_,
       {{"a", {StoredType::f32, {2}, std::string(8, 'x')}}, {"b", {StoredType::bf16, {2, 2}, std::string(8, 'y')}}});
  const std::string whole = read_file(file_);
  int errors = 0, accepted = 0;
  for (size_t at = 0; at < whole.size() - 16; ++at) {
    for (char byte : {'\0', '\xff', '9', '"', '}', ','}) {
      std::string changed = whole;
      changed[at] = byte;
      write_file(file_, changed);
      try {
        const SafetensorsFile file(file_);
        int64_t bytes = 0;
        for (const StoredTensor& tensor : file.tensors()) {
          for (std::byte value : tensor.data) bytes += value == std::byte{'x'} || value == std::byte{'y'};
        }
        ASSERT_EQ(bytes, 16) << "byte " << at;
        ++accepted;
      } catch (const Error&) {
        ++errors;
      }
    }
  }
  EXPECT_GT(errors, 500);
  EXPECT_GT(accepted, 10) << "a changed name is still a valid file";
}

TEST_F(SafetensorsTest, WriterRefusesWhatWouldBeMalformed) {
  const std::string data(8, 'x');
  const auto bytes = std::as_bytes(std::span(data));
  const auto write = [&](std::vector<TensorToStore> tensors) {
    write_safetensors(posix_file_system(), file_, tensors, {});
  };
  EXPECT_THROW(write({{"a", StoredType::f32, {3}, bytes}}), std::logic_error);
  EXPECT_THROW(write({{"a", StoredType::f32, {2}, bytes}, {"a", StoredType::f32, {2}, bytes}}), std::logic_error);
  EXPECT_THROW(write({{"a", StoredType::other, {8}, bytes}}), std::logic_error);
  EXPECT_FALSE(fs::exists(file_));
}

}  // namespace
}  // namespace slidedp
