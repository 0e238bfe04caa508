// Storage, as checkpoints meet it.
#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <system_error>

#include "model/base/format.h"
#include "profiler/probe.h"
#include "profiler/rolling.h"

namespace slidedp {
namespace {

namespace fs = std::filesystem;

// A file without a name: gone with its descriptor, however the probe ends.
class ScratchFile {
 public:
  explicit ScratchFile(const fs::path& folder) {
    std::string name = (folder / "slidedp_storage_XXXXXX").string();
    descriptor_ = ::mkstemp(name.data());
    if (descriptor_ < 0) failf("{}: no file can be made there: {}.", folder.string(), std::strerror(errno));
    ::unlink(name.c_str());
  }
  ~ScratchFile() { ::close(descriptor_); }
  ScratchFile(const ScratchFile&) = delete;
  ScratchFile& operator=(const ScratchFile&) = delete;

  double write(const void* data, int64_t bytes) {
    const double begin = steady_seconds();
    transfer(bytes, [&](int64_t at, int64_t count) {
      return ::pwrite(descriptor_, static_cast<const std::byte*>(data) + at, static_cast<size_t>(count), at);
    });
    if (::fdatasync(descriptor_) != 0) failf("A scratch file cannot be written: {}.", std::strerror(errno));
    return steady_seconds() - begin;
  }
  double read(void* data, int64_t bytes) {
    ::posix_fadvise(descriptor_, 0, bytes, POSIX_FADV_DONTNEED);  // out of the page cache
    const double begin = steady_seconds();
    transfer(bytes, [&](int64_t at, int64_t count) {
      return ::pread(descriptor_, static_cast<std::byte*>(data) + at, static_cast<size_t>(count), at);
    });
    return steady_seconds() - begin;
  }

 private:
  template <typename Call>
  static void transfer(int64_t bytes, const Call& call) {
    constexpr int64_t kPiece = int64_t{8} << 20;
    for (int64_t at = 0; at < bytes;) {
      const ssize_t done = call(at, std::min(kPiece, bytes - at));
      if (done <= 0) failf("A scratch file cannot be read or written: {}.", std::strerror(errno));
      at += done;
    }
  }
  int descriptor_ = -1;
};

class StorageProbe final : public Probe {
 public:
  std::string key() const override { return "storage"; }
  std::string method() const override {
    return "writes a nameless file in the folder for temporary files (TMPDIR) until it is on storage, drops it from "
           "the page cache and reads it, in pieces of 8 MiB by one thread; for the record, and in memory where that "
           "folder is a RAM disk";
  }
  std::optional<std::string> waived(const ProbeContext& context) const override {
    std::error_code error;
    const fs::path folder = fs::temp_directory_path(error);
    if (error) return "there is no folder for temporary files";
    const fs::space_info space = fs::space(folder, error);
    if (!error && static_cast<int64_t>(space.available) >= 4 * bytes(context) &&
        context.rolling_bytes >= bytes(context)) {
      return std::nullopt;
    }
    return fmt::format("{} has no room for {}", folder.string(), format_bytes(4 * bytes(context)));
  }

  std::vector<Measurement> run(const ProbeContext& context) const override {
    RollingBuffer data(bytes(context), "the storage probe's data");
    ScratchFile file(fs::temp_directory_path());
    const std::map<std::string, double> parameters{{"bytes", static_cast<double>(data.bytes())}};
    return context.harness(1).measure({{"write", "s", parameters, {}, true}, {"read", "s", parameters, {}, true}}, [&] {
      const double written = file.write(data.data(), data.bytes());
      return std::vector<double>{written, file.read(data.data(), data.bytes())};
    });
  }

 private:
  static int64_t bytes(const ProbeContext& context) { return int64_t{context.quick ? 16 : 256} << 20; }
};

}  // namespace

std::unique_ptr<Probe> make_storage() { return std::make_unique<StorageProbe>(); }

}  // namespace slidedp
