#include "planner/estimate.h"

#include <algorithm>

#include "model/cost/activations.h"
#include "model/cost/flops.h"
#include "model/cost/layer_work.h"

namespace slidedp {
namespace {

constexpr double kGiga = 1e9;

double seconds(double amount, double rate) { return amount > 0 ? amount / std::max(rate, 1e-9) : 0; }

class Estimate {
 public:
  Estimate(const SearchProblem& problem, const Plan& plan)
      : problem_(problem), plan_(plan), hardware_(problem.hardware), ranks_(plan.ranks) {
    for (const UnitLayout& unit : problem.layout.units) {
      (unit.kind == UnitKind::layer ? layers_ : vocabulary_) += static_cast<double>(unit.elements);
    }
    embedding_ = static_cast<double>(problem.layout.units.front().elements);
    wire_ = static_cast<double>(size_of(plan.wire));
    sources_ = plan.reduction == Reduction::cpu ? ranks_ : 1;
    offloaded_ = static_cast<double>(activation_counts(plan).offload * plan.micro_batches *
                                     hidden_bytes(problem.model, plan.micro_batch_tokens(), plan.compute));
  }

  double step_s() const {
    const double forward_s = std::max({compute_forward_s(), delivery_s(layers_ + vocabulary_), up_s(offloaded_)});
    const double backward_s =
        std::max({compute_backward_s(), delivery_s(backward_deliveries(), offloaded_), reduction_s()});
    double first_forward = forward_s, first_backward = backward_s, last_backward = backward_s;
    const double further_s = plan_.waves > 1 ? accumulate_s() : 0;
    if (plan_.update == UpdatePolicy::eager) {
      last_backward = std::max(last_backward, update_s(UpdatePart::whole));
    } else {
      last_backward = std::max(last_backward, norm_s());
      const bool split = plan_.update == UpdatePolicy::split;
      first_forward = std::max(first_forward, update_s(split ? UpdatePart::weights : UpdatePart::whole));
      if (split) first_backward = std::max(first_backward, update_s(UpdatePart::moments) + further_s);
    }
    if (plan_.waves == 1) {
      last_backward = std::max(first_backward, last_backward);
      return std::max(first_forward + last_backward, duplex_s());
    }
    const double middle = (plan_.waves - 1) * forward_s + (plan_.waves - 2) * std::max(backward_s, further_s);
    const double passes = first_forward + std::max(first_backward, further_s) + middle + last_backward;
    return std::max(passes, duplex_s());
  }

 private:
  double tokens() const { return static_cast<double>(plan_.micro_batch_tokens()); }

  // Elements of the layers that are not in the slots any more when backward comes, and a tied matrix for the head.
  double backward_deliveries() const {
    const double resident = std::min(1.0, static_cast<double>(plan_.layer_slots) / problem_.layout.layers);
    const bool again = problem_.layout.tied && !plan_.vocabulary_kept;
    return layers_ * (1 - resident) + (again ? embedding_ : 0);
  }

  double compute_forward_s() const {
    const double embedding =
        kernel_seconds(kernels().embedding, embedding_forward_elements(problem_.model, plan_.micro_batch_tokens()));
    return slowed(plan_.micro_batches * (problem_.layout.layers * layer_forward_s() + embedding));
  }

  double layer_forward_s() const {
    return layer_seconds(kernels().forward(),
                         layer_forward_work(problem_.model, plan_.micro_batch_rows, plan_.seq, plan_.compute));
  }

  double compute_backward_s() const {
    const ModelSpec& model = problem_.model;
    const int64_t tokens = plan_.micro_batch_tokens();
    const ActivationCounts counts = activation_counts(plan_);
    const double layer =
        layer_seconds(kernels().backward(), layer_backward_work(model, plan_.micro_batch_rows, plan_.seq, plan_.compute,
                                                                plan_.accumulator, /*first=*/true));
    const auto formed_again_s = [&](ActivationPolicy policy) {
      return seconds(formed_again_bytes(model, tokens, plan_.compute, policy), kernels().elementwise_gbps * kGiga);
    };
    const double vocabulary = kernel_seconds(kernels().head, head_flops(model, tokens)) +
                              kernel_seconds(kernels().embedding, embedding_backward_elements(model, tokens, false));
    const double recompute = layer_forward_s() + formed_again_s(ActivationPolicy::recompute);
    const double selective = formed_again_s(ActivationPolicy::selective);
    const double compute =
        plan_.micro_batches * (problem_.layout.layers * layer + (counts.recompute + counts.offload) * recompute +
                               counts.selective * selective + vocabulary);
    return slowed(compute) + (plan_.backend == "cpu" ? 0 : cast_s());
  }

  // CPU ranks share the cores.
  double slowed(double compute_s) const {
    if (plan_.backend != "cpu") return compute_s;
    return compute_s * std::max(1.0, ranks_ * plan_.threads.compute_per_rank / hardware_.host.cores);
  }

  // `beside`: further bytes that each rank copies to its device in the same pass.
  double delivery_s(double elements, double beside = 0) const {
    const double per_rank = 2 * elements / (plan_.delivery == Delivery::replicated ? 1 : ranks_) + beside;
    const double link = std::max(seconds(per_rank, hardware_.pcie.h2d.gbps * kGiga),
                                 seconds(per_rank * ranks_, hardware_.pcie.root_h2d_gbps * kGiga));
    switch (plan_.delivery) {
      case Delivery::replicated:
        return link;
      case Delivery::sharded:
        return std::max(link,
                        seconds(2 * elements * (ranks_ - 1) / ranks_, hardware_.collectives.all_gather.gbps * kGiga));
      case Delivery::broadcast:
        return std::max(link, seconds(2 * elements, hardware_.collectives.broadcast.gbps * kGiga));
    }
    return link;
  }

  // Bytes of each rank to the host.
  double up_s(double bytes) const {
    return std::max(seconds(bytes, hardware_.pcie.d2h.gbps * kGiga),
                    seconds(bytes * ranks_, hardware_.pcie.root_d2h_gbps * kGiga));
  }

  double gradients() const { return layers_ + vocabulary_ + (problem_.layout.tied ? embedding_ : 0); }
  double landed_bytes() const { return gradients() * wire_ / (plan_.reduction == Reduction::gpu ? ranks_ : 1); }
  double cast_s() const {
    if (plan_.accumulator == plan_.wire) return 0;
    return seconds(gradients() * (static_cast<double>(size_of(plan_.accumulator)) + wire_),
                   kernels().elementwise_gbps * kGiga);
  }

  // The comm lane casts, gathers weights and scatters gradients one after another.
  double reduction_s() const {
    const double link = up_s(landed_bytes());
    double comm = cast_s();
    if (plan_.reduction == Reduction::gpu) {
      comm += seconds(gradients() * wire_ * (ranks_ - 1) / ranks_, hardware_.collectives.reduce_scatter.gbps * kGiga);
    }
    if (plan_.delivery != Delivery::replicated) comm += delivery_s(backward_deliveries());
    return std::max(link, comm);
  }

  // Both directions of a rank's link, all passes.
  double duplex_s() const {
    const double down =
        2 * (layers_ + vocabulary_ + backward_deliveries()) / (plan_.delivery == Delivery::replicated ? 1 : ranks_);
    return plan_.waves * seconds(down + landed_bytes() + 2 * offloaded_, hardware_.pcie.duplex_gbps * kGiga);
  }

  // Elements through the pool: workers' own time, or what the CPU can stream.
  double pool_s(double elements, double worker_s, double bytes) const {
    const int workers = std::min(plan_.threads.update, std::max(1, hardware_.host.cores));
    return elements * std::max(worker_s / workers, seconds(bytes, hardware_.host.cpu_stream_gbps * kGiga));
  }
  double source_bytes() const { return sources_ * wire_; }
  double read_s(double bytes) const { return seconds(bytes, hardware_.host.source_gbps * kGiga); }

  double update_s(UpdatePart part) const {
    const double state_bytes = part == UpdatePart::whole ? 24 : 16;  // of hi, lo, m, v, read and written
    double worker = seconds(1, hardware_.host.update_elements_per_s(part)) + read_s((sources_ - 1) * wire_);
    if (plan_.update == UpdatePolicy::eager) worker += seconds(1, hardware_.host.norm_elements_per_s);
    return pool_s(layers_ + vocabulary_, worker, state_bytes + (plan_.waves > 1 ? 4 : source_bytes()));
  }
  double norm_s() const {
    const double worker = seconds(1, hardware_.host.norm_elements_per_s) + read_s((sources_ - 1) * wire_);
    return pool_s(layers_ + vocabulary_, worker, source_bytes() + (plan_.waves > 1 ? 8 : 0));
  }
  double accumulate_s() const {
    const double bytes = source_bytes() + 8;
    return pool_s(gradients(), read_s(bytes), bytes);
  }

  const KernelSpec& kernels() const { return hardware_.kernels; }

  const SearchProblem& problem_;
  const Plan& plan_;
  const HardwareSpec& hardware_;
  double ranks_ = 1, layers_ = 0, vocabulary_ = 0, embedding_ = 0, wire_ = 2, sources_ = 1;
  double offloaded_ = 0;  // bytes of one rank and wave, each way
};

}  // namespace

double estimate_step(const SearchProblem& problem, const Plan& plan) { return Estimate(problem, plan).step_s(); }

}  // namespace slidedp
