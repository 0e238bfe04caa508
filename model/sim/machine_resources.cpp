#include "model/sim/machine_resources.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "model/base/format.h"

namespace slidedp {
namespace {

constexpr int kHostResources = 5;
constexpr int kRankResources = 4;
constexpr double kGiga = 1e9;

// HardwareSpec's values are for all of `dram`, bytes/s.
Contention contention(double dram, double headroom, double of_own, std::vector<Beside> beside) {
  std::erase_if(beside, [](const Beside& one) { return one.per_unit == 0; });
  for (Beside& one : beside) one.per_unit /= dram;
  return {headroom, of_own > 0 ? of_own / dram : 0, std::move(beside)};
}

}  // namespace

double needed(double rate, const char* key) {
  if (!(rate > 0)) {
    failf(
        "The hardware profile's {} is {}, but this plan needs it: measure the machine with slidedp-profile, or set "
        "the key to a positive rate.",
        key, rate);
  }
  return rate;
}

MachineResources::MachineResources(const HardwareSpec& hardware, int ranks, int alike, bool memory_caps)
    : alike_(alike), lanes_take_cores_(hardware.device.backend == "cpu"), cores_(hardware.host.cores) {
  const PcieSpec& pcie = hardware.pcie;
  const HostSpec& host = hardware.host;
  const CopyContention &down = hardware.contention.h2d, &up = hardware.contention.d2h;
  const StreamContention& streams = hardware.contention.streams;
  const double dram = host.dram_gbps * kGiga;
  const auto cap = [memory_caps](double gbps) {
    return memory_caps ? gbps * kGiga : std::numeric_limits<double>::max();
  };
  const ResourceId cpu_stream = id(HostResource::cpu_stream);
  const ResourceId root_h2d = id(HostResource::root_h2d), root_d2h = id(HostResource::root_d2h);
  resources_ = {
      {"root h2d", pcie.root_h2d_gbps * kGiga},
      {"root d2h", pcie.root_d2h_gbps * kGiga},
      {"host DRAM", cap(host.dram_gbps)},
      {"CPU streaming", cap(host.cpu_stream_gbps),
       contention(dram, 1, streams.beside_streams, {{root_h2d, streams.beside_h2d}, {root_d2h, streams.beside_d2h}})},
      {"CPU cores", cores_}};
  for (int rank = 0; rank < ranks; ++rank) {
    resources_.push_back({fmt::format("rank {} compute units", rank), 1.0});
    resources_.push_back(
        {fmt::format("rank {} h2d link", rank), pcie.h2d.gbps * kGiga,
         contention(dram, down.headroom, 0, {{cpu_stream, down.beside_streams}, {root_d2h, down.beside_copies}})});
    resources_.push_back(
        {fmt::format("rank {} d2h link", rank), pcie.d2h.gbps * kGiga,
         contention(dram, up.headroom, 0, {{cpu_stream, up.beside_streams}, {root_h2d, up.beside_copies}})});
    resources_.push_back({fmt::format("rank {} duplex link", rank), pcie.duplex_gbps * kGiga});
  }
}

ResourceId MachineResources::id(RankResource resource, int rank) const {
  return kHostResources + rank * kRankResources + static_cast<int>(resource);
}

// `times`: as many ranks do it at the same time.
void MachineResources::add(TaskCost& cost, ResourceId id, double amount, const char* key, int times) const {
  if (amount <= 0) return;
  const double capacity = needed(resources_[static_cast<size_t>(id)].capacity, key);
  cost.demands.push_back({id, times * amount});
  cost.solo_s = std::max(cost.solo_s, amount / capacity);
}

void MachineResources::add_copy(TaskCost& cost, bool host_to_device, int rank, double link_bytes,
                                double memory_bytes) const {
  if (host_to_device) {
    add(cost, id(RankResource::h2d_link, rank), link_bytes, "pcie.h2d.gbps");
    add(cost, id(HostResource::root_h2d), link_bytes, "pcie.root_h2d_gbps", alike_);
  } else {
    add(cost, id(RankResource::d2h_link, rank), link_bytes, "pcie.d2h.gbps");
    add(cost, id(HostResource::root_d2h), link_bytes, "pcie.root_d2h_gbps", alike_);
  }
  add(cost, id(RankResource::duplex, rank), link_bytes, "pcie.duplex_gbps");
  add(cost, id(HostResource::dram), memory_bytes, "host.dram_gbps", alike_);
}

void MachineResources::add_host_stream(TaskCost& cost, double bytes) const {
  add(cost, id(HostResource::cpu_stream), bytes, "host.cpu_stream_gbps");
  add(cost, id(HostResource::dram), bytes, "host.dram_gbps");
  add(cost, id(HostResource::cores), cost.solo_s, "host.cores");
}

void MachineResources::add_lane_threads(TaskCost& cost, double threads) const {
  if (!lanes_take_cores_) return;
  // Threads beyond the cores do no further work, so they demand no more than there is.
  const double cores = std::clamp(threads, 1.0, std::max(1.0, cores_));
  add(cost, id(HostResource::cores), cores * cost.solo_s, "host.cores", alike_);
}

}  // namespace slidedp
