// Collectives over all ranks of the process. Each rank issues the same sequence of calls, each on its own stream.
#pragma once

#include <cstdint>

#include "model/base/types.h"
#include "runtime/device/device.h"

namespace slidedp {

// Thread-safe: each rank calls from its own issuing thread. A call returns at once; the work is in stream order and is
// complete on a stream when this rank's result is written and its input may be overwritten.
class Collective {
 public:
  virtual ~Collective() = default;
  virtual int ranks() const = 0;
  // full = concatenation of the ranks' shards. In place: shard == full + rank * shard_bytes.
  virtual void all_gather(int rank, Stream&, const void* shard, void* full, int64_t shard_bytes) = 0;
  // shard (this rank's part) = sum over ranks of full. The local backend sums fp32 in rank order and rounds once.
  virtual void reduce_scatter(int rank, Stream&, const void* full, void* shard, int64_t shard_elements, DType) = 0;
  virtual void broadcast(int rank, Stream&, void* data, int64_t bytes, int root) = 0;
  // Unblocks every rank that waits for others; later calls do nothing. Thread-safe, idempotent. A rank whose call is
  // cut short or ignored has its device aborted, so that nothing runs on a result that is missing.
  virtual void abort() = 0;
};

}  // namespace slidedp
