// The element ranges of touched and untouched rows against a look at every element.
#include "runtime/exec/touched_rows.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>

namespace slidedp {
namespace {

constexpr int64_t kHidden = 128, kRows = 40;

std::vector<int32_t> random_list(std::mt19937& random, unsigned percent) {
  std::vector<int32_t> list;
  for (int32_t row = 0; row < kRows; ++row) {
    if (random() % 100 < percent) list.push_back(row);
  }
  return list;
}

// Block of the unit -> place of the block in the compact gradients, or -1.
std::map<int64_t, int64_t> expected_blocks(const Task& task, const std::vector<int32_t>& list,
                                           const std::vector<int32_t>& gradients) {
  const auto place = [](const std::vector<int32_t>& of, int64_t row) {
    const auto found = std::find(of.begin(), of.end(), row);
    return found == of.end() ? int64_t{-1} : found - of.begin();
  };
  std::map<int64_t, int64_t> blocks;
  for (int64_t at = 0; at < kRows * kHidden; at += kBlockElements) {
    const int64_t row = at / kHidden, listed = place(list, row), lookup = place(gradients, row);
    // Touched rows count by their places in the list.
    const int64_t counted = task.rows == Rows::touched ? listed * kHidden + at % kHidden : at;
    const bool wanted = task.rows == Rows::all || (task.rows == Rows::touched) == (listed >= 0);
    if (!wanted || counted < task.elements_begin || counted >= task.elements_begin + task.elements) continue;
    blocks[at] = lookup < 0 ? -1 : lookup * kHidden + at % kHidden;
  }
  return blocks;
}

TEST(RowRanges, CoverTheTasksRowsOnceWithTheirPlacesAmongTheGradients) {
  std::mt19937 random(3);
  int with_gradient = 0, without = 0;
  for (int round = 0; round < 600; ++round) {
    const unsigned percent = std::vector<unsigned>{0, 10, 60, 100}[random() % 4];
    const std::vector<int32_t> list = random_list(random, percent), gradients = random_list(random, 40);
    Task task;
    task.rows = static_cast<Rows>(round % 3);
    // Chunks of the unit may end inside a row, those of touched rows do not.
    const int64_t grain = task.rows == Rows::touched ? kHidden : kBlockElements, grains = kRows * kHidden / grain;
    task.elements_begin = static_cast<int64_t>(random() % static_cast<uint64_t>(grains)) * grain;
    task.elements = (1 + static_cast<int64_t>(random() % 30)) * grain;
    task.elements = std::min(task.elements, kRows * kHidden - task.elements_begin);
    std::map<int64_t, int64_t> blocks;
    int64_t last = 0;
    for (const RowRange& range : row_ranges(task, kHidden, list, gradients)) {
      ASSERT_GE(range.begin, last);
      ASSERT_GT(range.elements, 0);
      last = range.begin + range.elements;
      for (int64_t at = 0; at < range.elements; at += kBlockElements) {
        blocks[range.begin + at] = range.lookup < 0 ? -1 : range.lookup + at;
      }
      ++(range.lookup < 0 ? without : with_gradient);
    }
    ASSERT_EQ(blocks, expected_blocks(task, list, gradients)) << "round " << round;
  }
  EXPECT_GT(with_gradient, 500);
  EXPECT_GT(without, 500);
}

TEST(RowRanges, OfNeighboursAreOne) {
  Task task;
  task.rows = Rows::untouched;
  task.elements = kRows * kHidden;
  EXPECT_EQ(row_ranges(task, kHidden, {}, {}).size(), 1U);
  const std::vector<int32_t> list{5, 6, 7};
  EXPECT_EQ(row_ranges(task, kHidden, list, list).size(), 2U);
  task.rows = Rows::touched;
  const std::vector<RowRange> touched = row_ranges(task, kHidden, list, list);
  ASSERT_EQ(touched.size(), 1U);
  EXPECT_EQ(touched[0].begin, 5 * kHidden);
  EXPECT_EQ(touched[0].elements, 3 * kHidden);
  EXPECT_EQ(touched[0].lookup, 0);
}

}  // namespace
}  // namespace slidedp
