// The YAML keys of every spec, each listed once (see yaml_reader.h). Internal to model/spec.
#pragma once

#include "model/spec/catalogue.h"
#include "model/spec/hardware_spec.h"
#include "model/spec/plan.h"
#include "model/spec/train_spec.h"
#include "model/spec/yaml_reader.h"

namespace slidedp {

inline constexpr const char* kHardwareSchema = "slidedp.hardware/1";
inline constexpr const char* kGpuSchema = "slidedp.gpu/1";
inline constexpr const char* kHostSchema = "slidedp.host/1";
inline constexpr const char* kTrainSchema = "slidedp.train/1";
inline constexpr const char* kPlanSchema = "slidedp.plan/1";

// Combinations of keys that no single key's rule can check.
std::optional<Problem> check_hardware(const HardwareSpec& spec);
std::optional<Problem> check_train(const TrainSpec& spec);

template <typename Visitor>
void fields(Visitor& visit, LinkRate& rate) {
  visit.value("latency_s", rate.latency_s, kNotNegative);
  visit.value("gbps", rate.gbps, kNotNegative);
}

template <typename Visitor>
void fields(Visitor& visit, KernelRate& rate) {
  visit.value("peak_gflops", rate.peak_gflops, kPositive);
  visit.value("half_gflop", rate.half_gflop, kNotNegative);
}

template <typename Visitor>
void fields(Visitor& visit, DeviceSpec& spec) {
  visit.value("name", spec.name);
  visit.value("backend", spec.backend, kBackend);
  visit.value("memory_bytes", spec.memory_bytes, kBytes);
  visit.value("context_bytes", spec.context_bytes, kBytesOrZero);
}

template <typename Visitor>
void fields(Visitor& visit, PcieSpec& spec) {
  visit.section("h2d", spec.h2d, Style::flow);
  visit.section("d2h", spec.d2h, Style::flow);
  visit.value("duplex_gbps", spec.duplex_gbps, kPositive);
  visit.value("root_h2d_gbps", spec.root_h2d_gbps, kPositive);
  visit.value("root_d2h_gbps", spec.root_d2h_gbps, kPositive);
}

template <typename Visitor>
void fields(Visitor& visit, CollectiveSpec& spec) {
  visit.section("all_gather", spec.all_gather, Style::flow);
  visit.section("reduce_scatter", spec.reduce_scatter, Style::flow);
  visit.section("broadcast", spec.broadcast, Style::flow);
}

template <typename Visitor>
void fields(Visitor& visit, KernelSpec& spec) {
  visit.section("layer_fwd", spec.layer_fwd, Style::flow);
  visit.section("layer_bwd", spec.layer_bwd, Style::flow);
  visit.section("head", spec.head, Style::flow);
  visit.section("embedding", spec.embedding, Style::flow);
  visit.value("elementwise_gbps", spec.elementwise_gbps, kPositive);
  visit.value("launch_latency_s", spec.launch_latency_s, kNotNegative);
  visit.value("attention_fwd_gflops", spec.attention_fwd_gflops, kNotNegative.or_default());
  visit.value("attention_bwd_gflops", spec.attention_bwd_gflops, kNotNegative.or_default());
  visit.value("layer_fwd_gbps", spec.layer_fwd_gbps, kNotNegative.or_default());
  visit.value("layer_bwd_gbps", spec.layer_bwd_gbps, kNotNegative.or_default());
}

template <typename Visitor>
void fields(Visitor& visit, HostSpec& spec) {
  visit.value("cores", spec.cores, kPositive);
  visit.value("memory_bytes", spec.memory_bytes, kBytes);
  visit.value("dram_gbps", spec.dram_gbps, kPositive);
  visit.value("cpu_stream_gbps", spec.cpu_stream_gbps, kPositive);
  visit.value("adam_elements_per_s", spec.adam_elements_per_s, kPositive);
  visit.value("split_weights_elements_per_s", spec.split_weights_elements_per_s, kNotNegative.or_default());
  visit.value("split_moments_elements_per_s", spec.split_moments_elements_per_s, kNotNegative.or_default());
  visit.value("norm_elements_per_s", spec.norm_elements_per_s, kPositive);
  visit.value("source_gbps", spec.source_gbps, kPositive);
}

template <typename Visitor>
void fields(Visitor& visit, CopyContention& spec) {
  visit.value("headroom", spec.headroom, kPositive.or_default());
  visit.value("beside_streams", spec.beside_streams, kNotNegative.or_default());
  visit.value("beside_copies", spec.beside_copies, kNotNegative.or_default());
}

template <typename Visitor>
void fields(Visitor& visit, StreamContention& spec) {
  visit.value("beside_streams", spec.beside_streams, kNotNegative.or_default());
  visit.value("beside_h2d", spec.beside_h2d, kNotNegative.or_default());
  visit.value("beside_d2h", spec.beside_d2h, kNotNegative.or_default());
}

template <typename Visitor>
void fields(Visitor& visit, ContentionSpec& spec) {
  visit.optional_section("h2d", spec.h2d, Style::flow);
  visit.optional_section("d2h", spec.d2h, Style::flow);
  visit.optional_section("streams", spec.streams, Style::flow);
}

template <typename Visitor>
void fields(Visitor& visit, FieldError& error) {
  visit.value("field", error.field);
  visit.value("value", error.value, kNotNegative);
  visit.value("probe", error.probe);
}

template <typename Visitor>
void fields(Visitor& visit, FieldCorrelation& correlation) {
  visit.value("first", correlation.first);
  visit.value("second", correlation.second);
  visit.value("value", correlation.value);
}

template <typename Visitor>
void fields(Visitor& visit, FitQuality& quality) {
  visit.value("fit", quality.fit);
  visit.value("samples", quality.samples, kPositive);
  visit.value("residual_rms", quality.residual_rms, kNotNegative);
  visit.value("structured", quality.structured);
  visit.value("deficient", quality.deficient);
}

template <typename Visitor>
void fields(Visitor& visit, WaivedProbe& waived) {
  visit.value("probe", waived.probe);
  visit.value("reason", waived.reason);
}

template <typename Visitor>
void fields(Visitor& visit, KindCorrection& correction) {
  visit.value("kind", correction.kind);
  visit.value("factor", correction.factor, kPositive);
  visit.value("standard_error", correction.standard_error, kNotNegative);
}

template <typename Visitor>
void fields(Visitor& visit, Uncertainty& uncertainty) {
  visit.value("measured_at", uncertainty.measured_at);
  visit.value("program_version", uncertainty.program_version);
  visit.value("host", uncertainty.host);
  visit.value("processor", uncertainty.processor);
  visit.value("kernel", uncertainty.kernel);
  visit.value("gpu", uncertainty.gpu);
  visit.value("kernel_shapes", uncertainty.kernel_shapes);
  visit.value("rounds", uncertainty.rounds, kPositive);
  visit.value("quick", uncertainty.quick);
  visit.list("standard_errors", uncertainty.standard_errors);
  visit.list("correlations", uncertainty.correlations);
  visit.list("fits", uncertainty.fits);
  visit.list("waived", uncertainty.waived);
  visit.value("notes", uncertainty.notes);
  visit.list("corrections", uncertainty.corrections);
}

template <typename Visitor>
void fields(Visitor& visit, HardwareSpec& spec) {
  visit.value("name", spec.name);
  visit.value("measured", spec.measured);
  visit.value("gpus", spec.gpus, kPositive);
  visit.section("device", spec.device);
  visit.section("pcie", spec.pcie);
  visit.section("collectives", spec.collectives);
  visit.section("kernels", spec.kernels);
  visit.section("host", spec.host);
  visit.optional_section("contention", spec.contention);
  visit.section_if(spec.uncertainty.known(), "uncertainty", spec.uncertainty);
}

template <typename Visitor>
void fields(Visitor& visit, CatalogueGpu& gpu) {
  visit.value("name", gpu.name);
  visit.value("memory_bytes", gpu.memory_bytes, kBytes);
  visit.value("memory_gbps", gpu.memory_gbps, kPositive);
  visit.value("bf16_tflops", gpu.bf16_tflops, kPositive);
  visit.value("half_rate_tensor_cores", gpu.half_rate_tensor_cores, kAny.or_default());
  visit.value("pcie_generation", gpu.pcie_generation, kPositive);
  visit.value("pcie_lanes", gpu.pcie_lanes, kPositive.or_default());
  visit.value("nvlink_gbps", gpu.nvlink_gbps, kNotNegative.or_default());
  visit.value("nvlink_gpus", gpu.nvlink_gpus, kNotNegative.or_default());
  visit.value("c2c_gbps", gpu.c2c_gbps, kNotNegative.or_default());
}

template <typename Visitor>
void fields(Visitor& visit, CatalogueHost& host) {
  visit.value("name", host.name);
  visit.value("cores", host.cores, kPositive);
  visit.value("memory_bytes", host.memory_bytes, kBytes);
  visit.value("memory_channels", host.memory_channels, kPositive);
  visit.value("channel_bytes", host.channel_bytes, kPositive.or_default());
  visit.value("memory_mtps", host.memory_mtps, kPositive);
  visit.value("pcie_generation", host.pcie_generation, kPositive);
  visit.value("pcie_lanes", host.pcie_lanes, kPositive);
  visit.value("c2c_gpus", host.c2c_gpus, kNotNegative.or_default());
}

template <typename Visitor>
void fields(Visitor& visit, AdamSpec& spec) {
  visit.value("learning_rate", spec.learning_rate, kNotNegative);
  visit.value("beta1", spec.beta1, kBelowOne);
  visit.value("beta2", spec.beta2, kBelowOne);
  visit.value("eps", spec.eps, kPositive);
  visit.value("weight_decay", spec.weight_decay, kNotNegative);
}

template <typename Visitor>
void fields(Visitor& visit, TrainSpec& spec) {
  visit.value("seq", spec.seq, kPositive);
  visit.value("batch_rows", spec.batch_rows, kPositive);
  visit.value("steps", spec.steps, kPositive);
  visit.value("seed", spec.seed, kAny.or_default());
  visit.section("adam", spec.adam);
  visit.value("max_grad_norm", spec.max_grad_norm, kNotNegative);
  visit.value("touched_vocabulary_share", spec.touched_vocabulary_share, kShare.or_default());
}

template <typename Visitor>
void fields(Visitor& visit, ThreadSplit& threads) {
  visit.value("update", threads.update, kPositive);
  visit.value("compute_per_rank", threads.compute_per_rank, kPositive);
}

template <typename Visitor>
void fields(Visitor& visit, Plan& plan) {
  visit.value("model", plan.model);
  visit.value("backend", plan.backend, kBackend);
  visit.value("ranks", plan.ranks, kPositive);
  visit.value("delivery", plan.delivery);
  visit.value("reduction", plan.reduction);
  visit.value("chunk_elements", plan.chunk_elements, kPositive);
  visit.value("activation", plan.activation);
  visit.value("update", plan.update);
  visit.value("wire", plan.wire);
  visit.value("accumulator", plan.accumulator);
  visit.value("compute", plan.compute);
  visit.value("seq", plan.seq, kPositive);
  visit.value("micro_batch_rows", plan.micro_batch_rows, kPositive);
  visit.value("micro_batches", plan.micro_batches, kPositive);
  visit.value("waves", plan.waves, kPositive);
  visit.value("head_chunk_tokens", plan.head_chunk_tokens, kPositive);
  visit.value("layer_slots", plan.layer_slots, kPositive);
  visit.value("gradient_slots", plan.gradient_slots, kPositive);
  visit.value("vocabulary_slots", plan.vocabulary_slots, kPositive);
  visit.value("vocabulary_kept", plan.vocabulary_kept);
  visit.value("vocabulary_rows", plan.vocabulary_rows);
  visit.value("wire_slots", plan.wire_slots, kPositive);
  visit.value("landing_slots", plan.landing_slots, kNotNegative);
  visit.section("threads", plan.threads, Style::flow);
}

template <typename Visitor>
void fields(Visitor& visit, PlanForecast& forecast) {
  visit.value("step_s", forecast.step.seconds, kNotNegative);
  visit.value("tokens_per_second", forecast.tokens_per_second, kNotNegative);
  visit.value("bottleneck", forecast.bottleneck);
  visit.value("exposed_s", forecast.exposed.seconds, kNotNegative);
  visit.value("device_bytes", forecast.device_bytes, kBytesOrZero);
  visit.value("host_bytes", forecast.host_bytes, kBytesOrZero);
  visit.value("why", forecast.why);
}

template <typename Visitor>
void fields(Visitor& visit, PlanFile& file) {
  fields(visit, file.plan);
  visit.section("train", file.train);
  visit.section("hardware", file.hardware);
  visit.section("forecast", file.forecast);
}

}  // namespace slidedp
