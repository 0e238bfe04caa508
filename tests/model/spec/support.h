// Shared by the spec tests: files in a temporary folder, and the message of an expected Error.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>

#include "model/base/error.h"

namespace slidedp {

class TempDir : public ::testing::Test {
 protected:
  TempDir() {
    std::string pattern = (std::filesystem::temp_directory_path() / "slidedp_spec_XXXXXX").string();
    if (mkdtemp(pattern.data()) == nullptr) throw std::runtime_error("mkdtemp failed");
    dir = pattern;
  }
  ~TempDir() override { std::filesystem::remove_all(dir); }

  std::filesystem::path write(const std::string& name, const std::string& text) const {
    std::ofstream(dir / name) << text;
    return dir / name;
  }
  std::filesystem::path dir;
};

// The message of the Error that `action` throws; a test failure if it throws none.
template <typename Action>
std::string error_of(Action action) {
  try {
    action();
  } catch (const Error& error) {
    return error.what();
  }
  ADD_FAILURE() << "no Error was thrown";
  return "";
}

inline std::string read_text(const std::filesystem::path& file) {
  std::ifstream stream(file);
  return {std::istreambuf_iterator<char>(stream), {}};
}

// `text` with the one place that holds `from` replaced.
inline std::string replaced(std::string text, const std::string& from, const std::string& to) {
  const size_t at = text.find(from);
  if (at == std::string::npos || text.find(from, at + 1) != std::string::npos) {
    throw std::logic_error("\"" + from + "\" is not in the text exactly once");
  }
  return text.replace(at, from.size(), to);
}

}  // namespace slidedp
