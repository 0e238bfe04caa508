#include "runtime/run/run_session.h"

namespace slidedp {
namespace {

void check(const std::function<bool()>& stop) {
  if (stop()) throw Error("stopped at once; what was being written is removed", ExitCode::interrupted);
}

class InterruptibleWriter final : public FileWriter {
 public:
  InterruptibleWriter(std::unique_ptr<FileWriter> writer, std::function<bool()> stop)
      : writer_(std::move(writer)), stop_(std::move(stop)) {}
  void write(std::span<const std::byte> data) override {
    constexpr size_t piece = size_t{16} << 20;  // so that a signal is noticed within a large tensor
    for (; data.size() > piece; data = data.subspan(piece)) {
      check(stop_);
      writer_->write(data.first(piece));
    }
    check(stop_);
    writer_->write(data);
  }
  void close() override {
    check(stop_);
    writer_->close();
  }

 private:
  std::unique_ptr<FileWriter> writer_;
  std::function<bool()> stop_;
};

}  // namespace

std::unique_ptr<FileWriter> InterruptibleFileSystem::create(const std::filesystem::path& path) {
  check(stop_);
  return std::make_unique<InterruptibleWriter>(files_.create(path), stop_);
}

void InterruptibleFileSystem::create_directory(const std::filesystem::path& path) {
  check(stop_);
  files_.create_directory(path);
}

}  // namespace slidedp
