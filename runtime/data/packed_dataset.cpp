#include "runtime/data/packed_dataset.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
#include <stdexcept>

#include "model/base/format.h"
#include "runtime/io/safetensors.h"

namespace slidedp {
namespace {

constexpr int32_t kIgnored = -100;
constexpr const char* kFormat = "slidedp.packed";
constexpr const char* kVersion = "1";
constexpr const char* kTensors[] = {"input_ids", "labels", "position_ids"};

const std::string& metadata_value(const SafetensorsFile& file, const std::string& key) {
  const auto found = file.metadata().find(key);
  if (found == file.metadata().end()) {
    failf("{}: the metadata has no '{}': not a packed data set of slidedp-data.", file.path().string(), key);
  }
  return found->second;
}

int64_t metadata_integer(const SafetensorsFile& file, const std::string& key) {
  const std::string& text = metadata_value(file, key);
  int64_t value = 0;
  const auto [end, code] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (code != std::errc() || end != text.data() + text.size() || value < 1) {
    failf("{}: metadata '{}' is '{}', but must be a positive integer.", file.path().string(), key, text);
  }
  return value;
}

void check_format(const SafetensorsFile& file) {
  const std::string& format = metadata_value(file, "format");
  const std::string& version = metadata_value(file, "version");
  if (format != kFormat || version != kVersion) {
    failf("{}: format '{}' version '{}' cannot be read, only '{}' version '{}'; make the file again with slidedp-data.",
          file.path().string(), format, version, kFormat, kVersion);
  }
  for (const StoredTensor& tensor : file.tensors()) {
    if (std::find(std::begin(kTensors), std::end(kTensors), tensor.name) == std::end(kTensors)) {
      failf("{}: tensor '{}' does not belong into a packed data set.", file.path().string(), tensor.name);
    }
  }
}

// The hash is only compared, but a cut or hand-written one should not pass as a tokenizer's identity.
const std::string& checked_hash(const SafetensorsFile& file) {
  const std::string& hash = metadata_value(file, "tokenizer_hash");
  constexpr std::string_view prefix = "sha256:";
  const auto digits = std::string_view(hash).substr(std::min(hash.size(), prefix.size()));
  if (!hash.starts_with(prefix) || digits.size() != 64 ||
      digits.find_first_not_of("0123456789abcdef") != std::string_view::npos) {
    failf("{}: metadata 'tokenizer_hash' is '{}', but must be 'sha256:' and 64 lower-case hex digits.",
          file.path().string(), hash);
  }
  return hash;
}

// The tensor's values; checks its type and shape [rows, seq]. rows < 0: any number, which is stored.
const int32_t* tensor_values(const SafetensorsFile& file, const std::string& name, int64_t& rows, int64_t seq) {
  const StoredTensor* tensor = file.find(name);
  if (tensor == nullptr) failf("{}: tensor '{}' is missing.", file.path().string(), name);
  if (tensor->type != StoredType::i32) {
    failf("{}: tensor '{}' has type {}, but must be I32.", file.path().string(), name, tensor->type_name);
  }
  if (tensor->shape.size() != 2 || tensor->shape[1] != seq || tensor->shape[0] < 1 ||
      (rows >= 0 && tensor->shape[0] != rows)) {
    failf("{}: tensor '{}' has shape [{}], but must be [{}, {}] (rows, and seq as in the metadata).",
          file.path().string(), name, fmt::join(tensor->shape, ", "), rows < 0 ? "rows" : std::to_string(rows), seq);
  }
  rows = tensor->shape[0];
  if (reinterpret_cast<uintptr_t>(tensor->data.data()) % alignof(int32_t) != 0) {
    failf("{}: tensor '{}' is not aligned to 4 bytes; make the file again with slidedp-data.", file.path().string(),
          name);
  }
  return reinterpret_cast<const int32_t*>(tensor->data.data());
}

struct RowView {
  const std::string& file;
  int64_t row;
  const int32_t* ids;
  const int32_t* labels;
  const int32_t* positions;
};

void check_row(const RowView& view, int64_t seq, int64_t vocabulary) {
  for (int64_t i = 0; i < seq; ++i) {
    const int32_t id = view.ids[i], label = view.labels[i], position = view.positions[i];
    if (id < 0 || id >= vocabulary) {
      failf(
          "{}: row {}, column {}: token id {} is outside the vocabulary of {}; was the file made with this model's "
          "tokenizer?",
          view.file, view.row, i, id, vocabulary);
    }
    if (position != 0 && i == 0) {
      failf("{}: row {} starts at position {}: a row must start with a document's first token (position 0).", view.file,
            view.row, position);
    }
    if (position != 0 && position != view.positions[i - 1] + 1) {
      failf("{}: row {}, column {}: position {} follows position {}; inside a document positions count up by 1.",
            view.file, view.row, i, position, view.positions[i - 1]);
    }
    if (label != kIgnored && position == 0) {
      failf(
          "{}: row {}, column {}: a document's first token is a target, but nothing precedes it; its label must be "
          "{}.",
          view.file, view.row, i, kIgnored);
    }
    if (label != kIgnored && label != id) {
      failf("{}: row {}, column {}: label {} is neither the token id {} nor {} (ignored); labels are not shifted.",
            view.file, view.row, i, label, id, kIgnored);
    }
  }
}

}  // namespace

PackedDataset::PackedDataset(const std::filesystem::path& file, const ModelSpec& model, int64_t seq)
    : file_(std::make_unique<SafetensorsFile>(file)), seq_(seq) {
  const std::string path = file.string();
  check_format(*file_);
  const int64_t stored_seq = metadata_integer(*file_, "seq");
  if (stored_seq > model.max_position) {
    failf(
        "{}: rows of {} tokens are longer than the {} positions of model {} (max_position_embeddings); pack the data "
        "with a smaller --seq.",
        path, stored_seq, model.max_position, model.name);
  }
  if (stored_seq != seq) {
    failf("{}: rows have {} tokens, but {} are wanted; pack the data with --seq {}, or plan for seq {}.", path,
          stored_seq, seq, seq, stored_seq);
  }
  const int64_t vocabulary = metadata_integer(*file_, "vocabulary_size");
  if (vocabulary > model.vocabulary) {
    failf("{}: made for a vocabulary of {}, but model {} has {}; pack the data with this model's tokenizer.", path,
          vocabulary, model.name, model.vocabulary);
  }
  tokenizer_hash_ = checked_hash(*file_);
  rows_ = -1;
  ids_ = tensor_values(*file_, "input_ids", rows_, seq);
  labels_ = tensor_values(*file_, "labels", rows_, seq);
  positions_ = tensor_values(*file_, "position_ids", rows_, seq);
  for (int64_t row = 0; row < rows_; ++row) {
    const int64_t at = row * seq;
    check_row({path, row, ids_ + at, labels_ + at, positions_ + at}, seq, vocabulary);
  }
}

PackedDataset::~PackedDataset() = default;

void PackedDataset::require_rows(int64_t batch_rows) const {
  if (rows_ < batch_rows) {
    failf("{}: {} rows are fewer than the {} of one step's batch; add data or use a smaller batch.",
          file_->path().string(), rows_, batch_rows);
  }
}

RankBatch PackedDataset::fill(int64_t step, const Plan& plan, int rank, int32_t* out) const {
  if (plan.seq != seq_ || rank < 0 || rank >= plan.ranks || step < 0) {
    throw std::logic_error("PackedDataset::fill: plan, rank or step does not fit");
  }
  require_rows(plan.batch_rows());
  const int64_t parts = plan.micro_batches_per_step();
  const int64_t tokens = plan.micro_batch_tokens();
  int64_t row = step * plan.batch_rows() + rank * parts * plan.micro_batch_rows;
  RankBatch batch;
  for (int64_t part = 0; part < parts; ++part, out += plan.micro_batch_bytes() / 4) {
    auto& starts = batch.document_starts.emplace_back();
    for (int64_t i = 0; i < plan.micro_batch_rows; ++i, ++row) {
      const int64_t from = row % rows_ * seq_, to = i * seq_;
      int32_t* targets = out + tokens + to;
      std::copy_n(ids_ + from, seq_, out + to);
      std::copy_n(labels_ + from + 1, seq_ - 1, targets);
      targets[seq_ - 1] = kIgnored;
      std::copy_n(positions_ + from, seq_, out + 2 * tokens + to);
      for (int64_t t = 0; t < seq_; ++t) {
        if (positions_[from + t] == 0) starts.push_back(static_cast<int32_t>(to + t));
      }
    }
  }
  return batch;
}

int64_t PackedDataset::target_tokens(int64_t step, int64_t batch_rows) const {
  require_rows(batch_rows);
  int64_t count = 0;
  for (int64_t row = step * batch_rows; row < (step + 1) * batch_rows; ++row) {
    const int32_t* labels = labels_ + row % rows_ * seq_;
    count += seq_ - std::count(labels, labels + seq_, kIgnored);
  }
  return count;
}

}  // namespace slidedp
