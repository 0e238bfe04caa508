// main() of all test programs. A program whose tests were all skipped says so with an exit code of its own.
#include <gtest/gtest.h>

namespace {
constexpr int kAllSkipped = 77;  // ctest's SKIP_RETURN_CODE
}

int main(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  const int result = RUN_ALL_TESTS();
  const auto& tests = *::testing::UnitTest::GetInstance();
  const bool all_skipped = tests.skipped_test_count() > 0 && tests.skipped_test_count() == tests.test_to_run_count();
  return result == 0 && all_skipped ? kAllSkipped : result;
}
