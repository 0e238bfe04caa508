// Collectives of ranks that share an address space: each rank reads the others' buffers directly. Works on devices
// whose launch() runs on a worker of the stream (the CPU backend, ranks that share a GPU); alone, a rank may use any.
//
// The k-th call of every rank meets the k-th call of the others. All ranks wait until every input is ready, each
// computes its own output, and all wait again, so that inputs may be overwritten afterwards. Ranks whose k-th calls
// differ all fail with the same Error. A rank whose device skips its call (it failed or was aborted) releases the
// others: their devices are aborted, for there is no result to go on with.
#pragma once

#include <memory>
#include <vector>

#include "runtime/comm/collective.h"
#include "runtime/comm/local/local_operations.h"

namespace slidedp {

class LocalCollective final : public Collective {
 public:
  // devices[r] drives rank r. They must outlive all work that was issued.
  LocalCollective(std::vector<Device*> devices, std::shared_ptr<LocalOperations> operations);
  explicit LocalCollective(std::vector<Device*> devices);  // of the CPU backend
  ~LocalCollective() override;

  int ranks() const override;
  void all_gather(int rank, Stream&, const void* shard, void* full, int64_t shard_bytes) override;
  void reduce_scatter(int rank, Stream&, const void* full, void* shard, int64_t shard_elements, DType) override;
  void broadcast(int rank, Stream&, void* data, int64_t bytes, int root) override;
  void abort() override;

 private:
  class Meetings;
  struct Call;
  struct Departure;
  void issue(int rank, Stream& stream, const Call& call);

  const std::vector<Device*> devices_;
  const std::shared_ptr<LocalOperations> operations_;  // shared with the queued work
  const std::shared_ptr<Meetings> meetings_;           // likewise
};

}  // namespace slidedp
