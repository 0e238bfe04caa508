// A step's lists of touched vocabulary rows, and the element ranges that they stand for.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "model/graph/step_graph.h"
#include "runtime/exec/graph_memory.h"

namespace slidedp {

// By wave: the rows that its tokens touch, ascending. Empty without a step (flush) or if the plan does without.
struct RowLists {
  std::vector<std::vector<int32_t>> waves;
  std::span<const int32_t> of(int wave) const {
    return waves.empty() ? std::span<const int32_t>() : waves[static_cast<size_t>(wave)];
  }
};

// Reads the token ids in the batch buffers of the execution with this number, writes each one's place in its wave's
// list beside them, and the lists to where the devices read them. Throws Error for an id outside the vocabulary.
RowLists list_touched_rows(const StepGraph& graph, const GraphMemory& memory, int64_t sequence);

// Elements of a chunk of touched rows that the list fills.
int64_t listed_elements(const StepGraph& graph, const Task& task, std::span<const int32_t> list);

// A contiguous range of the unit that lies contiguously in the compact matrix too, or does not touch it.
struct RowRange {
  int64_t begin = 0, elements = 0;  // in the unit
  int64_t lookup = -1;              // where it begins in the compact matrix of gradients, in elements; -1: not there
};

// What a task of the embedding's unit works on, in ascending order. `list` divides the rows into touched and untouched
// ones; `gradients` is the list by which the lookup's gradients landed.
std::vector<RowRange> row_ranges(const Task& task, int64_t hidden, std::span<const int32_t> list,
                                 std::span<const int32_t> gradients);

}  // namespace slidedp
