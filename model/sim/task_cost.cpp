#include "model/sim/task_cost.h"

#include <algorithm>

#include "model/base/format.h"
#include "model/cost/layer_work.h"

namespace slidedp {
namespace {

constexpr int kSharedResources = 5;
constexpr int kRankResources = 4;
constexpr double kGiga = 1e9;

// A rate of the profile that some task needs.
double needed(double rate, const char* key) {
  if (!(rate > 0)) {
    failf(
        "The hardware profile's {} is {}, but this plan needs it: measure the machine with slidedp-profile, or set "
        "the key to a positive rate.",
        key, rate);
  }
  return rate;
}

// Work that takes as long as the slowest of its demands. `times`: as many ranks do it at the same time.
void demand(TaskCost& cost, const std::vector<Resource>& resources, ResourceId id, double amount, const char* key,
            int times = 1) {
  if (amount <= 0) return;
  const double capacity = needed(resources[static_cast<size_t>(id)].capacity, key);
  cost.demands.push_back({id, times * amount});
  cost.solo_s = std::max(cost.solo_s, amount / capacity);
}

std::vector<Loss> losses(std::vector<Loss> all) {
  std::erase_if(all, [](const Loss& loss) { return loss.share == 0; });
  return all;
}

double host_bytes(const Work& work) { return static_cast<double>(work.host_read_bytes + work.host_write_bytes); }

}  // namespace

CostModel::CostModel(const StepGraph& graph, const HardwareSpec& hardware)
    : graph_(&graph), hardware_(hardware), cpu_backend_(hardware.device.backend == "cpu") {
  const PcieSpec& pcie = hardware_.pcie;
  const HostSpec& host = hardware_.host;
  resources_ = {{"root h2d", pcie.root_h2d_gbps * kGiga},
                {"root d2h", pcie.root_d2h_gbps * kGiga},
                {"host DRAM", host.dram_gbps * kGiga},
                {"CPU streaming", host.cpu_stream_gbps * kGiga,
                 losses({{id(Shared::root_h2d), host.stream_loss_h2d}, {id(Shared::root_d2h), host.stream_loss_d2h}})},
                {"CPU cores", static_cast<double>(host.cores)}};
  for (int rank = 0; rank < graph.ranks(); ++rank) {
    resources_.push_back({fmt::format("rank {} compute units", rank), 1.0});
    resources_.push_back({fmt::format("rank {} h2d link", rank), pcie.h2d.gbps * kGiga,
                          losses({{id(Shared::cpu_stream), pcie.h2d_loss}})});
    resources_.push_back({fmt::format("rank {} d2h link", rank), pcie.d2h.gbps * kGiga,
                          losses({{id(Shared::cpu_stream), pcie.d2h_loss}})});
    resources_.push_back({fmt::format("rank {} duplex link", rank), pcie.duplex_gbps * kGiga});
  }
}

ResourceId CostModel::id(PerRank resource, int rank) const {
  return kSharedResources + rank * kRankResources + static_cast<int>(resource);
}

TaskCost CostModel::cost(const Task& task) const {
  TaskCost cost;
  // A chunk of touched rows that the list is not expected to fill: its task does nothing.
  if (task.rows == Rows::touched && task.work.elements == 0) return cost;
  cost.demands.reserve(5);
  // On the CPU backend every lane is a thread of the host; what it does beyond the streams of the pool costs cores.
  double device_cores = 1;
  switch (task.kind) {
    case TaskKind::h2d:
    case TaskKind::d2h:
    case TaskKind::act_h2d:
    case TaskKind::act_d2h:
      copy(task, cost);
      break;
    case TaskKind::all_gather:
    case TaskKind::reduce_scatter:
    case TaskKind::broadcast:
      collective(task, cost);
      break;
    case TaskKind::fwd:
    case TaskKind::head:
    case TaskKind::recompute:
    case TaskKind::bwd:
      device_cores = graph_->plan.threads.compute_per_rank;
      kernel(task, cost);
      break;
    case TaskKind::cast:
      kernel(task, cost);
      break;
    case TaskKind::host_accumulate:
    case TaskKind::norm:
    case TaskKind::update:
      host_stream(task, cost);
      return cost;
  }
  if (cpu_backend_) {
    // Threads beyond the cores do no further work, so they demand no more than there is.
    const double cores = std::clamp(device_cores, 1.0, std::max(1.0, static_cast<double>(hardware_.host.cores)));
    demand(cost, resources_, id(Shared::cores), cores * cost.solo_s, "host.cores", graph_->alike);
  }
  return cost;
}

void CostModel::copy(const Task& task, TaskCost& cost) const {
  const bool down = task.kind == TaskKind::h2d || task.kind == TaskKind::act_h2d;  // host to device
  const auto bytes = static_cast<double>(task.work.link_bytes);
  cost.latency_s = down ? hardware_.pcie.h2d.latency_s : hardware_.pcie.d2h.latency_s;
  if (down) {
    demand(cost, resources_, id(PerRank::h2d_link, task.rank), bytes, "pcie.h2d.gbps");
    demand(cost, resources_, id(Shared::root_h2d), bytes, "pcie.root_h2d_gbps", graph_->alike);
  } else {
    demand(cost, resources_, id(PerRank::d2h_link, task.rank), bytes, "pcie.d2h.gbps");
    demand(cost, resources_, id(Shared::root_d2h), bytes, "pcie.root_d2h_gbps", graph_->alike);
  }
  demand(cost, resources_, id(PerRank::duplex, task.rank), bytes, "pcie.duplex_gbps");
  const HostSpec& host = hardware_.host;
  const double memory_bytes = host_bytes(task.work) * (down ? host.h2d_cost : host.d2h_cost);
  demand(cost, resources_, id(Shared::dram), memory_bytes, "host.dram_gbps", graph_->alike);
  cost.weight = down ? host.h2d_weight : host.d2h_weight;
}

void CostModel::collective(const Task& task, TaskCost& cost) const {
  const CollectiveSpec& rates = hardware_.collectives;
  const double ranks = graph_->plan.ranks;
  // nccl-tests: the bus carries (N - 1) / N of the full buffer, except in a broadcast, where it carries all of it.
  const bool broadcast = task.kind == TaskKind::broadcast;
  const double bytes = static_cast<double>(task.work.link_bytes) * (broadcast ? 1.0 : (ranks - 1) / ranks);
  const LinkRate& rate = broadcast                           ? rates.broadcast
                         : task.kind == TaskKind::all_gather ? rates.all_gather
                                                             : rates.reduce_scatter;
  const char* key = broadcast                           ? "collectives.broadcast.gbps"
                    : task.kind == TaskKind::all_gather ? "collectives.all_gather.gbps"
                                                        : "collectives.reduce_scatter.gbps";
  cost.latency_s = rate.latency_s;
  if (bytes > 0) cost.solo_s = bytes / (needed(rate.gbps, key) * kGiga);
}

CostModel::KernelClass CostModel::kernel_class(const Task& task) const {
  const KernelSpec& kernels = hardware_.kernels;
  if (task.kind == TaskKind::head) return {kernels.head, "kernels.head.peak_gflops"};
  if (graph_->layout.units[static_cast<size_t>(task.unit)].kind == UnitKind::embedding) {
    return {kernels.embedding, "kernels.embedding.peak_gflops"};
  }
  if (task.kind == TaskKind::bwd) return {kernels.layer_bwd, "kernels.layer_bwd.peak_gflops"};
  return {kernels.layer_fwd, "kernels.layer_fwd.peak_gflops"};
}

double CostModel::flops_seconds(const Task& task) const {
  const auto [rate, key] = kernel_class(task);
  needed(rate.peak_gflops, key);
  const bool forward = &rate == &hardware_.kernels.layer_fwd;
  if (!forward && &rate != &hardware_.kernels.layer_bwd) return kernel_seconds(rate, task.work.flops);
  const LayerWork work{task.work.flops - task.work.attention_flops, task.work.attention_flops, task.work.layer_bytes};
  return layer_seconds(forward ? hardware_.kernels.forward() : hardware_.kernels.backward(), work, task.work.share);
}

void CostModel::kernel(const Task& task, TaskCost& cost) const {
  const KernelSpec& kernels = hardware_.kernels;
  cost.latency_s = task.work.share * kernels.launch_latency_s;
  if (task.kind != TaskKind::cast && task.work.flops > 0) {
    cost.solo_s = flops_seconds(task);
  }
  // Elementwise kernels run after or between the others.
  const auto bytes = static_cast<double>(task.work.device_bytes);
  if (bytes > 0) cost.solo_s += bytes / (needed(kernels.elementwise_gbps, "kernels.elementwise_gbps") * kGiga);
  // Kernels of one rank share its compute units, whichever lane issued them. The CPU backend's lanes are threads: they
  // share cores only.
  if (!cpu_backend_) {
    cost.demands.push_back({id(PerRank::compute, task.rank), cost.solo_s});
  }
}

double CostModel::worker_s(const Task& task) const {
  const HostSpec& host = hardware_.host;
  const auto elements = static_cast<double>(task.work.elements);
  if (task.kind == TaskKind::host_accumulate) {
    const double bytes = host_bytes(task.work);
    return bytes > 0 ? bytes / (needed(host.source_gbps, "host.source_gbps") * kGiga) : 0;
  }
  if (elements <= 0) return 0;
  const double rate = task.kind == TaskKind::norm
                          ? needed(host.norm_elements_per_s, "host.norm_elements_per_s")
                          : needed(host.update_elements_per_s(task.part), "host.adam_elements_per_s");
  double seconds = elements / rate;
  if (task.kind == TaskKind::update && graph_->plan.update == UpdatePolicy::eager) {
    // The norm is computed in the same pass (for the log), from gradients in the core's cache.
    seconds += elements / needed(host.norm_elements_per_s, "host.norm_elements_per_s");
  }
  if (task.work.sources > 1) {
    const double further = (task.work.sources - 1) * elements * static_cast<double>(size_of(graph_->plan.wire));
    seconds += further / (needed(host.source_gbps, "host.source_gbps") * kGiga);
  }
  return seconds;
}

void CostModel::host_stream(const Task& task, TaskCost& cost) const {
  cost.solo_s = worker_s(task);
  const double bytes = host_bytes(task.work);
  demand(cost, resources_, id(Shared::cpu_stream), bytes, "host.cpu_stream_gbps");
  demand(cost, resources_, id(Shared::dram), bytes, "host.dram_gbps");
  demand(cost, resources_, id(Shared::cores), cost.solo_s, "host.cores");
}

}  // namespace slidedp
