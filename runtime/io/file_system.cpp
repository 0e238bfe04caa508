#include "runtime/io/file_system.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <system_error>
#include <utility>

#include "model/base/format.h"

namespace slidedp {
namespace {

namespace fs = std::filesystem;

[[noreturn]] void fail_on(const char* action, const fs::path& path, int error) {
  failf("Cannot {} {}: {}.", action, path.string(), std::strerror(error));
}

class PosixWriter : public FileWriter {
 public:
  explicit PosixWriter(const fs::path& path) : path_(path) {
    file_ = ::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    if (file_ < 0) fail_on("create", path_, errno);
  }
  ~PosixWriter() override {
    if (file_ >= 0) ::close(file_);
  }
  PosixWriter(const PosixWriter&) = delete;
  PosixWriter& operator=(const PosixWriter&) = delete;

  void write(std::span<const std::byte> data) override {
    while (!data.empty()) {
      const ssize_t written = ::write(file_, data.data(), data.size());
      if (written < 0 && errno == EINTR) continue;
      if (written < 0) fail_on("write to", path_, errno);
      data = data.subspan(static_cast<size_t>(written));
    }
  }

  void close() override {
    // Delayed allocation reports a full disk only here.
    if (::fsync(file_) != 0) fail_on("flush", path_, errno);
    if (::close(std::exchange(file_, -1)) != 0) fail_on("close", path_, errno);
  }

 private:
  fs::path path_;
  int file_ = -1;
};

// Makes a directory's entries durable. File systems that cannot flush a directory say EINVAL.
void flush_directory(const fs::path& directory) {
  const int file = ::open(directory.empty() ? "." : directory.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (file < 0) fail_on("open", directory, errno);
  const int error = ::fsync(file) == 0 ? 0 : errno;
  ::close(file);
  if (error != 0 && error != EINVAL) fail_on("flush", directory, error);
}

class PosixFileSystem : public FileSystem {
 public:
  std::unique_ptr<FileWriter> create(const fs::path& path) override { return std::make_unique<PosixWriter>(path); }

  void create_directory(const fs::path& path) override {
    if (::mkdir(path.c_str(), 0777) != 0) fail_on("create directory", path, errno);
  }

  void rename(const fs::path& from, const fs::path& to) override {
    if (fs::is_directory(from)) flush_directory(from);
    if (::rename(from.c_str(), to.c_str()) != 0) {
      failf("Cannot rename {} to {}: {}.", from.string(), to.string(), std::strerror(errno));
    }
    try {
      flush_directory(to.parent_path());
      if (from.parent_path() != to.parent_path()) flush_directory(from.parent_path());
    } catch (const Error&) {
      ::rename(to.c_str(), from.c_str());  // failed means not done
      throw;
    }
  }

  void remove_all(const fs::path& path) noexcept override {
    std::error_code ignored;
    fs::remove_all(path, ignored);
  }
};

}  // namespace

FileSystem& posix_file_system() {
  static PosixFileSystem instance;
  return instance;
}

}  // namespace slidedp
