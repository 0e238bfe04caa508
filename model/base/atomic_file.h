// A file that appears whole or not at all.
#pragma once

#include <filesystem>
#include <fstream>

namespace slidedp {

// Written beside its place as FILE.partial, moved there by commit(), else removed. What was at FILE stays until then.
// Every method throws Error that names FILE and the cause.
class AtomicFile {
 public:
  explicit AtomicFile(std::filesystem::path file);
  ~AtomicFile();
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;

  std::ostream& stream() { return stream_; }
  const std::filesystem::path& partial() const { return partial_; }
  void finish();  // ends writing: all of it is on the disk, in partial()
  void commit();  // finish(), if it has not been called, and into place

 private:
  [[noreturn]] void give_up(const std::string& reason);
  std::filesystem::path file_, partial_;
  std::ofstream stream_;
};

}  // namespace slidedp
