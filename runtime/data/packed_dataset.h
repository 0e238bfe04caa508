// Packed token rows (see runtime/io/FORMATS.md) and the batch of one step.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "model/spec/model_spec.h"
#include "model/spec/plan.h"
#include "runtime/nn/compute.h"

namespace slidedp {

class SafetensorsFile;

// One rank's tokens of one step, all waves and micro-batches, in the order (wave, micro-batch). Arrays are laid out as
// the graph's batch buffers: [waves * micro_batches][3][micro-batch tokens] int32: ids, targets, positions.
struct RankBatch {
  std::vector<std::vector<int32_t>> document_starts;  // per micro-batch, see MicroBatch
};

class PackedDataset {
 public:
  // Reads and checks the whole file. Throws Error that names file and row: malformed file or metadata, rows longer than
  // max_position_embeddings, token ids outside the vocabulary, another seq than wanted, positions that do not count up
  // from a document's start, a label that is not its token, a document's first token that is a target.
  PackedDataset(const std::filesystem::path& file, const ModelSpec& model, int64_t seq);
  ~PackedDataset();
  int64_t rows() const { return rows_; }
  int64_t seq() const { return seq_; }
  const std::string& tokenizer_hash() const { return tokenizer_hash_; }

  // Throws Error if there are fewer rows than one step's batch; fill() and target_tokens() check it too.
  void require_rows(int64_t batch_rows) const;

  // Step s takes rows [sB, (s+1)B), B = plan.batch_rows(), wrapping at the end; rank, then wave, then micro-batch take
  // contiguous parts. Fills `out` (plan.batch_bytes()) for one rank, but for places in lists of touched rows.
  RankBatch fill(int64_t step, const Plan& plan, int rank, int32_t* out) const;
  // Target tokens of the whole step over all ranks; 0 is the caller's error to report.
  int64_t target_tokens(int64_t step, int64_t batch_rows) const;

 private:
  std::unique_ptr<SafetensorsFile> file_;
  const int32_t* ids_ = nullptr;
  const int32_t* labels_ = nullptr;
  const int32_t* positions_ = nullptr;
  int64_t rows_ = 0, seq_ = 0;
  std::string tokenizer_hash_;
};

}  // namespace slidedp
