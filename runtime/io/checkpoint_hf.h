// Hugging Face checkpoints: read into the host state, export from it. Formats: runtime/io/FORMATS.md.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "model/spec/model_spec.h"
#include "runtime/host/host_state.h"
#include "runtime/io/file_system.h"

namespace slidedp {

// Reads DIR/model.safetensors or DIR/model.safetensors.index.json's shards straight into hi/lo (m and v stay as they
// are), `threads` pieces of tensors at a time. bf16, fp16 and fp32 tensors are accepted. Throws Error that names file
// and tensor: missing, extra, wrong shape, wrong dtype, a weight that is not finite. Returns notes about accepted
// extras (rotary inv_freq buffers, an lm_head of a tied model that equals the embedding).
std::vector<std::string> load_hf_checkpoint(const std::filesystem::path& dir, HostState& state, int threads);

// Tensor bytes of one file of an export; a larger tensor gets a file of its own.
inline constexpr int64_t kMaxShardBytes = 5'000'000'000;

// The files of a checkpoint that an export copies (config, tokenizer, chat template, generation), by name. Read before
// training, so that the export does not depend on the source's still being there.
using ExportFiles = std::map<std::string, std::string>;
ExportFiles read_export_files(const std::filesystem::path& source);

// Writes DIR: the files of `source`, weights = hi as bf16 (single file, or
// shards of at most `max_shard_bytes` with an index). Atomic: written to DIR + ".partial", then renamed; on failure the
// partial directory is removed and an Error says why. An existing DIR is replaced only after the new one is complete:
// it is renamed to DIR + ".replaced" and removed once the new one has its place. An export that was killed between the
// two is undone by the next one; load_hf_checkpoint names both directories.
void export_hf_checkpoint(FileSystem&, const ExportFiles& source, HostState& state, const std::filesystem::path& dir,
                          int64_t max_shard_bytes = kMaxShardBytes);

// Where an export of `dir` is written before it is complete, and where the previous one waits meanwhile.
std::filesystem::path partial_directory(const std::filesystem::path& dir);
std::filesystem::path replaced_directory(const std::filesystem::path& dir);

}  // namespace slidedp
