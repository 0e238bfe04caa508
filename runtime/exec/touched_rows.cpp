#include "runtime/exec/touched_rows.h"

#include <algorithm>

#include "model/base/error.h"

namespace slidedp {
namespace {

// Cuts [begin, end) where rows of `gradients` begin and end.
void cut_by_gradients(int64_t begin, int64_t end, int64_t hidden, std::span<const int32_t> gradients,
                      std::vector<RowRange>& ranges) {
  auto next = std::lower_bound(gradients.begin(), gradients.end(), begin / hidden);
  while (begin < end) {
    if (next == gradients.end() || *next * hidden >= end) {
      ranges.push_back({begin, end - begin, -1});
      return;
    }
    const int64_t row = *next * hidden;
    if (row > begin) {
      ranges.push_back({begin, row - begin, -1});
      begin = row;
    }
    // A run of rows in the list, from place `first` on.
    const auto first = next;
    while (next != gradients.end() && *next - *first == next - first && *next * hidden < end) ++next;
    const int64_t stop = std::min(end, (*first + (next - first)) * hidden);
    ranges.push_back({begin, stop - begin, (first - gradients.begin()) * hidden + begin - row});
    begin = stop;
  }
}

}  // namespace

RowLists list_touched_rows(const StepGraph& graph, const GraphMemory& memory, int64_t sequence) {
  const Plan& plan = graph.plan;
  const int64_t tokens = plan.micro_batch_tokens(), vocabulary = graph.layout.embedding().tensors.front().shape.front();
  auto* lists = static_cast<int32_t*>(memory.base(memory.of_kind(BufferKind::touched_rows), sequence));
  std::vector<int32_t> place(static_cast<size_t>(vocabulary));
  RowLists rows;
  for (int wave = 0; wave < plan.waves; ++wave) {
    const auto each = [&](const auto& visit) {
      for (int rank = 0; rank < plan.ranks; ++rank) {
        auto* batch = static_cast<int32_t*>(memory.base(memory.of_rank(BufferKind::batch_host, rank), sequence));
        for (int m = 0; m < plan.micro_batches; ++m) {
          int32_t* ids = batch + (wave * plan.micro_batches + m) * plan.batch_arrays() * tokens;
          for (int64_t t = 0; t < tokens; ++t) visit(ids[t], ids[3 * tokens + t]);
        }
      }
    };
    std::fill(place.begin(), place.end(), -1);
    each([&](int32_t id, int32_t&) {
      if (id < 0 || id >= vocabulary) {
        fail("Token id " + std::to_string(id) + " is outside the model's vocabulary of " + std::to_string(vocabulary) +
             ": pack the data with this model's tokenizer.");
      }
      place[static_cast<size_t>(id)] = 0;
    });
    std::vector<int32_t>& list = rows.waves.emplace_back();
    for (int64_t row = 0; row < vocabulary; ++row) {
      if (place[static_cast<size_t>(row)] < 0) continue;
      place[static_cast<size_t>(row)] = static_cast<int32_t>(list.size());
      list.push_back(static_cast<int32_t>(row));
    }
    each([&](int32_t id, int32_t& to) { to = place[static_cast<size_t>(id)]; });
    std::copy(list.begin(), list.end(), lists + wave * graph.touched.capacity);
  }
  return rows;
}

int64_t listed_elements(const StepGraph& graph, const Task& task, std::span<const int32_t> list) {
  const Chunk& chunk = graph.touched.chunks[static_cast<size_t>(task.chunk)];
  const int64_t hidden = graph.layout.embedding().tensors.front().shape.back();
  return std::clamp<int64_t>(static_cast<int64_t>(list.size()) * hidden - chunk.begin, 0, chunk.elements);
}

std::vector<RowRange> row_ranges(const Task& task, int64_t hidden, std::span<const int32_t> list,
                                 std::span<const int32_t> gradients) {
  std::vector<RowRange> ranges;
  const int64_t begin = task.elements_begin, end = begin + task.elements;
  if (task.rows == Rows::all) {
    cut_by_gradients(begin, end, hidden, gradients, ranges);
  } else if (task.rows == Rows::touched) {
    const auto rows = static_cast<int64_t>(list.size());
    const int64_t last = std::min(end / hidden, rows);
    for (int64_t i = begin / hidden; i < last;) {
      const int64_t first = list[static_cast<size_t>(i)];
      int64_t count = 1;
      while (i + count < last && list[static_cast<size_t>(i + count)] == first + count) ++count;
      cut_by_gradients(first * hidden, (first + count) * hidden, hidden, gradients, ranges);
      i += count;
    }
  } else {
    int64_t at = begin;
    for (auto row = std::lower_bound(list.begin(), list.end(), begin / hidden); row != list.end(); ++row) {
      if (*row * hidden >= end) break;
      if (*row * hidden > at) cut_by_gradients(at, *row * hidden, hidden, gradients, ranges);
      at = (*row + int64_t{1}) * hidden;
    }
    if (at < end) cut_by_gradients(at, end, hidden, gradients, ranges);
  }
  return ranges;
}

}  // namespace slidedp
