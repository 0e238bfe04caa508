// Collectives over in-process ranks, by size of the full buffer. Rates are bus bandwidth as nccl-tests defines it.
#include <algorithm>
#include <set>

#include "model/base/format.h"
#include "profiler/device_lane.h"
#include "profiler/probe.h"
#include "runtime/device/backends.h"

namespace slidedp {
namespace {

constexpr int64_t kKiB = 1024, kMiB = 1024 * kKiB;

enum class Operation { all_gather, reduce_scatter, broadcast };

class CollectiveProbe final : public Probe {
 public:
  explicit CollectiveProbe(Operation operation) : operation_(operation) {}
  std::string key() const override { return "collective." + name(); }
  std::string method() const override {
    const bool sums = operation_ == Operation::reduce_scatter;
    return "Collective::" + name() + (sums ? " of bf16" : "") +
           ", by size of the full buffer, from the moment that all ranks have come until the last is done; " +
           (operation_ == Operation::broadcast ? "bus bandwidth = bytes / time"
                                               : "bus bandwidth = bytes * (N - 1) / N / time");
  }

  std::optional<std::string> waived(const ProbeContext& context) const override {
    if (context.on_host() || context.ranks > 1) return std::nullopt;
    return "one GPU has nobody to exchange data with";
  }

  std::vector<Measurement> run(const ProbeContext& context) const override {
    std::set<int> rank_counts{collective_ranks(context.ranks)};
    if (!context.quick) rank_counts.insert({2, 4});
    // Each GPU rank needs a GPU.
    if (!context.on_host()) std::erase_if(rank_counts, [&](int ranks) { return ranks > context.ranks; });
    std::vector<int64_t> sizes{64 * kKiB, 256 * kKiB, kMiB, 4 * kMiB, 16 * kMiB};
    if (!context.quick) sizes.push_back(64 * kMiB);
    if (!context.on_host()) sizes.push_back(256 * kMiB);
    const Harness harness = context.harness(static_cast<int>(rank_counts.size() * sizes.size()));
    std::vector<Measurement> result;
    for (int ranks : rank_counts) {
      std::vector<Measurement> of_ranks = by_size(context, harness, ranks, sizes);
      std::move(of_ranks.begin(), of_ranks.end(), std::back_inserter(result));
    }
    return result;
  }

 private:
  std::string name() const {
    return operation_ == Operation::all_gather  ? "all_gather"
           : operation_ == Operation::broadcast ? "broadcast"
                                                : "reduce_scatter";
  }
  double bus_bytes(int64_t bytes, int ranks) const {
    const double share = operation_ == Operation::broadcast ? 1.0 : static_cast<double>(ranks - 1) / ranks;
    return static_cast<double>(bytes) * share;
  }

  std::vector<Measurement> by_size(const ProbeContext& context, const Harness& harness, int ranks,
                                   const std::vector<int64_t>& sizes) const {
    Backend backend = make_backend(context.backend, ranks);
    std::vector<DeviceMemory> full, shards;
    std::vector<DeviceLane> lanes;
    for (const auto& device : backend.devices) {
      full.push_back(device->allocate(sizes.back(), "the collective probe's buffer"));
      shards.push_back(device->allocate(sizes.back() / ranks + kMiB, "the collective probe's shard"));
      lanes.emplace_back(*device, "comm");
    }
    std::vector<Measurement> result;
    for (int64_t size : sizes) {
      const int64_t shard = size / ranks / 128 * 128;  // whole blocks of 64 bf16
      const int64_t bytes = shard * ranks;
      Measurement what{"seconds", "s", {}, {}, true};
      what.parameters = {
          {"ranks", ranks}, {"bytes", static_cast<double>(bytes)}, {"bus_bytes", bus_bytes(bytes, ranks)}};
      result.push_back(harness.measure(std::move(what), [&] {
        for (int rank = 0; rank < ranks; ++rank) {
          const auto r = static_cast<size_t>(rank);
          lanes[r].issue([&](Device&, Stream& stream) {
            call(*backend.collective, rank, stream, full[r].data(), shards[r].data(), shard, bytes);
          });
        }
        return joint_seconds(lanes);
      }));
    }
    return result;
  }

  void call(Collective& collective, int rank, Stream& stream, void* full, void* shard, int64_t shard_bytes,
            int64_t bytes) const {
    switch (operation_) {
      case Operation::all_gather:  // in place, as deliveries are
        collective.all_gather(rank, stream, static_cast<std::byte*>(full) + rank * shard_bytes, full, shard_bytes);
        break;
      case Operation::reduce_scatter:
        collective.reduce_scatter(rank, stream, full, shard, shard_bytes / size_of(DType::bf16), DType::bf16);
        break;
      case Operation::broadcast:
        collective.broadcast(rank, stream, full, bytes, 0);
        break;
    }
  }

  Operation operation_;
};

}  // namespace

std::unique_ptr<Probe> make_collective_all_gather() { return std::make_unique<CollectiveProbe>(Operation::all_gather); }
std::unique_ptr<Probe> make_collective_reduce_scatter() {
  return std::make_unique<CollectiveProbe>(Operation::reduce_scatter);
}
std::unique_ptr<Probe> make_collective_broadcast() { return std::make_unique<CollectiveProbe>(Operation::broadcast); }

}  // namespace slidedp
