#include "runtime/io/file_system.h"

#include "tests/runtime/io/io_fixture.h"

namespace slidedp {
namespace {

using testing::HasSubstr;

std::span<const std::byte> bytes_of(const std::string& text) { return std::as_bytes(std::span(text)); }

TEST(PosixFileSystem, WritesRenamesAndRemoves) {
  TemporaryFolder folder;
  FileSystem& files = posix_file_system();
  files.create_directory(folder / "a");
  const std::string first = "one ", second = "two";
  const auto writer = files.create(folder / "a/file");
  writer->write(bytes_of(first));
  writer->write({});
  writer->write(bytes_of(second));
  writer->close();
  files.rename(folder / "a", folder / "b");
  EXPECT_FALSE(fs::exists(folder / "a"));
  EXPECT_EQ(read_file(folder / "b/file"), "one two");
  files.create(folder / "b/file")->close();
  EXPECT_EQ(read_file(folder / "b/file"), "") << "an existing file is emptied";
  files.remove_all(folder / "b");
  EXPECT_FALSE(fs::exists(folder / "b"));
  files.remove_all(folder / "b");
}

TEST(PosixFileSystem, ErrorsNamePathAndCause) {
  TemporaryFolder folder;
  FileSystem& files = posix_file_system();
  EXPECT_THAT(error_of([&] { files.create(folder / "no/file"); }),
              testing::AllOf(HasSubstr((folder / "no/file").string()), HasSubstr("No such file")));
  EXPECT_THAT(error_of([&] { files.create_directory(folder / "no/folder"); }), HasSubstr("No such file"));
  EXPECT_THAT(error_of([&] { files.create_directory(folder.path()); }), HasSubstr("File exists"));
  EXPECT_THAT(error_of([&] { files.rename(folder / "no", folder / "other"); }), HasSubstr("No such file"));
  write_file(folder / "full/file", "x");
  files.create_directory(folder / "new");
  EXPECT_THAT(error_of([&] { files.rename(folder / "new", folder / "full"); }), HasSubstr("not empty"));
  EXPECT_TRUE(fs::exists(folder / "new"));
}

TEST(PosixFileSystem, AFullDiskIsAnError) {
  if (!fs::exists("/dev/full")) GTEST_SKIP() << "no /dev/full here";
  const std::string text(100, 'x');
  const auto writer = posix_file_system().create("/dev/full");
  EXPECT_THAT(error_of([&] { writer->write(bytes_of(text)); }),
              testing::AllOf(HasSubstr("/dev/full"), HasSubstr("No space left")));
}

}  // namespace
}  // namespace slidedp
