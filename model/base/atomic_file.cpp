#include "model/base/atomic_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <string>
#include <system_error>
#include <utility>

#include "model/base/format.h"

namespace slidedp {

AtomicFile::AtomicFile(std::filesystem::path file) : file_(std::move(file)), partial_(file_) {
  partial_ += ".partial";
  errno = 0;
  stream_.open(partial_, std::ios::binary | std::ios::trunc);
  if (!stream_) give_up(std::strerror(errno));
}

AtomicFile::~AtomicFile() {
  stream_.close();
  std::error_code ignored;
  // A directory of that name is not ours.
  if (std::filesystem::is_regular_file(partial_, ignored)) std::filesystem::remove(partial_, ignored);
}

void AtomicFile::finish() {
  errno = 0;
  stream_.close();
  if (!stream_) give_up(std::strerror(errno));
  const int handle = ::open(partial_.c_str(), O_RDONLY | O_CLOEXEC);
  const bool flushed = handle >= 0 && ::fsync(handle) == 0;
  const int error = errno;
  if (handle >= 0) ::close(handle);
  if (!flushed) give_up(std::strerror(error));
}

void AtomicFile::commit() {
  if (stream_.is_open()) finish();
  std::error_code error;
  std::filesystem::rename(partial_, file_, error);
  if (error) give_up(error.message());
}

void AtomicFile::give_up(const std::string& reason) {
  failf("{}: cannot be written: {}. Check that the folder exists, is writable and has space.", file_.string(), reason);
}

}  // namespace slidedp
