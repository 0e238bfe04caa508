// A profiling run whose samples come from a known machine, with noise.
#pragma once

#include <cmath>
#include <map>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "model/calibration/contention_fit.h"
#include "model/calibration/profile_record.h"

namespace slidedp::test {

// One GPU and sixteen cores; all rates that the probes below measure.
inline HardwareSpec true_machine() {
  HardwareSpec spec =
      empty_profile({"node", "a processor", "Linux 6", 16, int64_t{1} << 37, 1 << 25, "a GPU"}, "cuda", 1);
  spec.device.memory_bytes = int64_t{80} << 30;
  spec.device.context_bytes = int64_t{512} << 20;
  spec.pcie = {{5e-6, 55}, {4e-6, 54}, 96, 55, 54};
  spec.kernels.layer_fwd = {600e3, 30};
  spec.kernels.layer_bwd = {550e3, 90};
  spec.kernels.head = {650e3, 80};
  spec.kernels.embedding = {1100, 0.13};
  spec.kernels.elementwise_gbps = 3700;
  spec.kernels.launch_latency_s = 8e-6;
  spec.host.cores = 16;
  spec.host.memory_bytes = int64_t{1} << 37;
  spec.host.cpu_stream_gbps = 190;  // more than the contention below leaves of them
  spec.host.dram_gbps = 190;
  spec.host.adam_elements_per_s = 7e8;
  spec.contention = {{1.2, 0.6, 1.4}, {1.1, 0.5, 0.75}, {0.65, 0.4, 0.75}};
  spec.host.split_weights_elements_per_s = 9e8;
  spec.host.split_moments_elements_per_s = 12e8;
  spec.host.norm_elements_per_s = 3e9;
  spec.host.source_gbps = 13;
  return spec;
}

struct Noise {
  double repeat = 0.01;  // standard deviation of one repeat's log
  double round = 0;      // of what all repeats of one probe in one round share
  double run = 0;        // of what all repeats of one probe in one run share
  double outliers = 0;   // share of repeats that take 1.5 to 4 times as long
};

class SyntheticProfile {
 public:
  SyntheticProfile(const HardwareSpec& truth, const Noise& noise, unsigned seed, int rounds = 3)
      : truth_(truth), noise_(noise), random_(seed) {
    run_.machine = {"node", "a processor", "Linux 6", 16, int64_t{1} << 37, 1 << 25, "a GPU"};
    run_.backend = "cuda";
    run_.model = "Qwen3-4B";
    run_.ranks = 1;
    run_.rounds = rounds;
    run_.started_unix_s = 1790000000;
    run_.seconds = 61.25;
    facts();
    host();
    links();
    contention();
    kernels();
  }
  ProfileRun run() const { return run_; }

 private:
  using Parameters = std::map<std::string, double>;

  // A value of the unit's shared disturbances, then each repeat's own.
  double shared(double sigma) { return std::exp(std::normal_distribution<double>(0, 1)(random_) * sigma); }

  void begin(const std::string& key) {
    run_.outcomes.push_back({key, "synthetic"});
    factors_.clear();
    const double whole = shared(noise_.run);
    for (int round = 0; round < run_.rounds; ++round) factors_.push_back(whole * shared(noise_.round));
  }

  // A measurement that would be `seconds` without noise.
  void add(const std::string& name, const Parameters& parameters, double seconds, const char* unit = "s") {
    constexpr int kRepeats = 6;
    for (int round = 0; round < run_.rounds; ++round) {
      Measurement measurement{name, unit, parameters, {}, true};
      for (int i = 0; i < kRepeats; ++i) {
        double value = seconds * factors_[static_cast<size_t>(round)] * shared(noise_.repeat);
        if (std::bernoulli_distribution(noise_.outliers)(random_)) {
          value *= std::uniform_real_distribution<double>(1.5, 4)(random_);
        }
        measurement.repeats.push_back(value);
      }
      add_round(run_.outcomes.back().measurements, {measurement}, round);
    }
  }
  void add_fact(const std::string& name, const char* unit, double value) {
    for (int round = 0; round < run_.rounds; ++round) {
      add_round(run_.outcomes.back().measurements, {{name, unit, {}, {value}, true}}, round);
    }
  }

  void facts() {
    begin("machine");
    add_fact("cores", "1", truth_.host.cores);
    add_fact("host memory", "B", static_cast<double>(truth_.host.memory_bytes));
    add_fact("device memory", "B", static_cast<double>(truth_.device.memory_bytes));
    run_.outcomes.push_back({"collective.all_gather", "synthetic", "one GPU has nobody to exchange data with"});
    begin("device.context");
    add_fact("context", "B", static_cast<double>(truth_.device.context_bytes));
    begin("launch.latency");
    add("hop", {}, truth_.kernels.launch_latency_s);
  }

  void host() {
    const HostSpec& host = truth_.host;
    const double elements = 2 << 20;
    begin("host.dram");
    for (const char* name : {"read", "triad"}) {
      add(name, {{"threads", 16}, {"bytes", 1e9}}, (name[0] == 'r' ? 1.5 : 1) / host.cpu_stream_gbps);
    }
    begin("host.adam");
    add("seconds", {{"threads", 1}, {"elements", elements}}, elements / host.adam_elements_per_s);
    // Together no more than the streaming cap: a little less, so that host.dram's value stays.
    add("seconds", {{"threads", 16}, {"elements", 16 * elements}}, 16 * elements * 26 / (0.8e9 * host.cpu_stream_gbps));
    begin("host.split");
    add("seconds", {{"part", 1}, {"elements", elements}}, elements / host.split_weights_elements_per_s);
    add("seconds", {{"part", 2}, {"elements", elements}}, elements / host.split_moments_elements_per_s);
    begin("host.norm");
    add("seconds", {{"elements", elements}}, elements / host.norm_elements_per_s);
    begin("host.sources");
    const double one = elements / host.adam_elements_per_s, further = elements * 2 / (host.source_gbps * 1e9);
    for (int sources : {1, 2, 4}) {
      add("seconds", {{"sources", sources}, {"elements", elements}}, one + (sources - 1) * further);
    }
  }

  void link(const std::string& key, const LinkRate& rate) {
    begin(key);
    for (double bytes = 65536; bytes <= 1 << 30; bytes *= 4) {
      add("seconds", {{"bytes", bytes}}, rate.latency_s + bytes / (rate.gbps * 1e9));
    }
  }

  void links() {
    link("copy.h2d", truth_.pcie.h2d);
    link("copy.d2h", truth_.pcie.d2h);
    begin("copy.duplex");
    add("seconds", {{"bytes", 1e9}}, 1 / truth_.pcie.duplex_gbps);
    begin("copy.root");
    add("h2d", {{"bytes", 1e9}, {"ranks", 1}}, 1 / truth_.pcie.root_h2d_gbps);
    add("d2h", {{"bytes", 1e9}, {"ranks", 1}}, 1 / truth_.pcie.root_d2h_gbps);
  }

  void contention() {
    begin("host.contention");
    for (const int threads : {5, 10, 14}) {
      for (const auto& [h2d, d2h] : {std::pair(false, false), {true, false}, {false, true}, {true, true}}) {
        const TogetherRates rates = predict_together(truth_, {h2d, d2h, threads});
        const Parameters parameters{{"h2d", h2d ? 1.0 : 0.0}, {"d2h", d2h ? 1.0 : 0.0}, {"threads", threads}};
        if (h2d) add("h2d", parameters, rates.h2d_gbps, "GB/s");
        if (d2h) add("d2h", parameters, rates.d2h_gbps, "GB/s");
        add("adam", parameters, rates.adam_gbps, "GB/s");
      }
    }
  }

  void kernel(const std::string& name, const KernelRate& rate, double largest) {
    for (double gflop = largest / 32; gflop <= largest; gflop *= 2) {
      add(name, {{"flops", gflop * 1e9}}, (gflop + rate.half_gflop) / rate.peak_gflops);
    }
  }

  void kernels() {
    begin("kernel.layer");
    kernel("forward", truth_.kernels.layer_fwd, 7000);
    kernel("backward", truth_.kernels.layer_bwd, 14000);
    begin("kernel.head");
    kernel("seconds", truth_.kernels.head, 76000);
    begin("kernel.embedding");
    kernel("backward", truth_.kernels.embedding, 0.4);
    begin("kernel.cast");
    add("seconds", {{"bytes", 1e9}}, 1 / truth_.kernels.elementwise_gbps);
  }

  HardwareSpec truth_;
  Noise noise_;
  std::mt19937 random_;
  ProfileRun run_;
  std::vector<double> factors_;  // of the current probe, by round
};

}  // namespace slidedp::test
