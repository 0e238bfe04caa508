// main() of all test programs. Where one skips most of its tests (those for a GPU without one), its exit code says so,
// so that it does not count as passed.
#include <gtest/gtest.h>

namespace {
constexpr int kSkipped = 77;  // ctest's SKIP_RETURN_CODE
}

int main(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  const int result = RUN_ALL_TESTS();
  const auto& tests = *::testing::UnitTest::GetInstance();
  const bool mostly_skipped = 2 * tests.skipped_test_count() > tests.test_to_run_count();
  return result == 0 && mostly_skipped ? kSkipped : result;
}
