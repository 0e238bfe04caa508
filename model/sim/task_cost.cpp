#include "model/sim/task_cost.h"

#include <algorithm>

#include "model/cost/layer_work.h"

namespace slidedp {
namespace {

constexpr double kGiga = 1e9;

double host_bytes(const Work& work) { return static_cast<double>(work.host_read_bytes + work.host_write_bytes); }

}  // namespace

CostModel::CostModel(const StepGraph& graph, const HardwareSpec& hardware)
    : graph_(&graph),
      hardware_(hardware),
      cpu_backend_(hardware.device.backend == "cpu"),
      machine_(hardware_, graph.ranks(), graph.alike) {}

TaskCost CostModel::cost(const Task& task) const {
  TaskCost cost;
  // A chunk of touched rows that the list is not expected to fill: its task does nothing.
  if (task.rows == Rows::touched && task.work.elements == 0) return cost;
  cost.demands.reserve(5);
  double lane_threads = 1;
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
      lane_threads = graph_->plan.threads.compute_per_rank;
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
  machine_.add_lane_threads(cost, lane_threads);
  return cost;
}

void CostModel::copy(const Task& task, TaskCost& cost) const {
  const bool host_to_device = task.kind == TaskKind::h2d || task.kind == TaskKind::act_h2d;
  cost.latency_s = host_to_device ? hardware_.pcie.h2d.latency_s : hardware_.pcie.d2h.latency_s;
  machine_.add_copy(cost, host_to_device, task.rank, static_cast<double>(task.work.link_bytes), host_bytes(task.work));
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
    cost.demands.push_back({machine_.id(RankResource::compute, task.rank), cost.solo_s});
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
  machine_.add_host_stream(cost, host_bytes(task.work));
}

}  // namespace slidedp
