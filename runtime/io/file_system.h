// File writing behind an interface, so that tests can inject faults (disk full) into every write.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <string>

namespace slidedp {

class FileWriter {
 public:
  virtual ~FileWriter() = default;
  virtual void write(std::span<const std::byte> data) = 0;  // throws Error that names the file and the cause
  virtual void close() = 0;  // flushes to the disk (fsync); throws Error. Without close() the file is abandoned
};

class FileSystem {
 public:
  virtual ~FileSystem() = default;
  // All but remove_all throw Error that names the path and the cause.
  virtual std::unique_ptr<FileWriter> create(const std::filesystem::path&) = 0;  // an existing file is emptied
  virtual void create_directory(const std::filesystem::path&) = 0;               // its parent must exist, itself not
  // Durable (the directories are flushed) when it returns; when it throws, `from` is still there. Does not replace a
  // directory that has entries.
  virtual void rename(const std::filesystem::path& from, const std::filesystem::path& to) = 0;
  virtual void remove_all(const std::filesystem::path&) noexcept = 0;  // as far as possible
};

FileSystem& posix_file_system();

}  // namespace slidedp
