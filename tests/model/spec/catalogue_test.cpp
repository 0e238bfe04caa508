// The catalogue's files, and what is derived from their figures.
#include "model/spec/catalogue.h"

#include <cmath>
#include <map>
#include <set>
#include <vector>

#include "tests/model/spec/support.h"

namespace slidedp {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

const std::filesystem::path kHardware = std::filesystem::path(SLIDEDP_SOURCE_DIR) / "configs" / "hardware";

CatalogueGpu gpu_of(const std::string& name) { return load_catalogue_gpu(kHardware / "gpu" / (name + ".yaml")); }
CatalogueHost host_of(const std::string& name) { return load_catalogue_host(kHardware / "host" / (name + ".yaml")); }

std::set<std::string> names_in(const char* folder) {
  std::set<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(kHardware / folder)) names.insert(entry.path().stem());
  return names;
}

// What vendors call them in sums that a reader can check: dense bf16 TFLOP/s and GB/s of memory.
const std::map<std::string, std::pair<double, double>> kGpus{
    {"rtx-3090", {71, 936}},           {"rtx-4090", {330.4 / 2, 1008}},  {"rtx-5090", {838.0 / 4, 1792}},
    {"l40s", {362.05, 864}},           {"a100-40gb", {624.0 / 2, 1555}}, {"a100-80gb", {624.0 / 2, 2039}},
    {"h100-pcie", {1513.0 / 2, 2000}}, {"h100-sxm", {1979.0 / 2, 3350}}, {"h200", {1979.0 / 2, 4800}},
    {"b200", {36000.0 / 8 / 2, 8000}}, {"gh200", {1979.0 / 2, 4000}},
};

struct HostFacts {
  int channels;
  double mtps, gbps;
  int cores;
};
const std::map<std::string, HostFacts> kHosts{
    {"ryzen-7950x", {2, 5200, 83.2, 16}},           {"threadripper-pro-7975wx", {8, 5200, 332.8, 32}},
    {"epyc-milan", {8, 3200, 204.8, 64}},           {"epyc-genoa", {12, 4800, 460.8, 64}},
    {"epyc-genoa-2s", {24, 4800, 921.6, 128}},      {"xeon-ice-lake", {8, 3200, 204.8, 40}},
    {"xeon-sapphire-rapids", {8, 4800, 307.2, 56}}, {"xeon-sapphire-rapids-2s", {16, 4800, 614.4, 112}},
};

TEST(Catalogue, GpusHaveTheirPublicFigures) {
  const std::set<std::string> found = names_in("gpu");
  EXPECT_EQ(found.size(), kGpus.size());
  for (const std::string& name : found) {
    ASSERT_TRUE(kGpus.contains(name)) << name << " has no figures in this test";
    const CatalogueGpu gpu = gpu_of(name);
    EXPECT_NEAR(gpu.bf16_tflops, kGpus.at(name).first, 0.1) << name;  // vendors round to 0.1
    EXPECT_EQ(gpu.memory_gbps, kGpus.at(name).second) << name;
    EXPECT_EQ(gpu.half_rate_tensor_cores, name.starts_with("rtx-")) << name;
  }
}

TEST(Catalogue, DramIsChannelsTimesEightBytesTimesTransfers) {
  std::set<std::string> found = names_in("host");
  EXPECT_EQ(found.erase("grace"), 1u);
  EXPECT_EQ(found.size(), kHosts.size());
  for (const std::string& name : found) {
    ASSERT_TRUE(kHosts.contains(name)) << name << " has no facts in this test";
    const HostFacts& facts = kHosts.at(name);
    const CatalogueHost host = host_of(name);
    EXPECT_EQ(host.cores, facts.cores) << name;
    EXPECT_EQ(host.memory_channels, facts.channels) << name;
    EXPECT_DOUBLE_EQ(host.memory_gbps(), facts.channels * 8 * facts.mtps * 1e6 / 1e9) << name;
    EXPECT_DOUBLE_EQ(host.memory_gbps(), facts.gbps) << name;
    EXPECT_EQ(host.memory_bytes % (host.memory_channels * (int64_t{1} << 30)), 0) << name << ": equal modules";
  }
  EXPECT_DOUBLE_EQ(host_of("grace").memory_gbps(), 384);
}

TEST(Catalogue, EstimatesAreShares) {
  const CatalogueEstimates& e = kCatalogueEstimates;
  for (const double share : {e.layer_fwd, e.layer_bwd, e.head, e.half_rate_layer_fwd, e.half_rate_layer_bwd,
                             e.half_rate_head, e.elementwise, e.device_memory, e.pcie, e.c2c_h2d, e.c2c_d2h, e.duplex,
                             e.nvlink, e.pcie_collective, e.dram, e.cpu_stream, e.host_memory}) {
    EXPECT_GT(share, 0);
    EXPECT_LE(share, 1);
  }
  EXPECT_GE(e.duplex, 0.5) << "both directions together are at least as fast as one";
  EXPECT_LE(e.cpu_stream, e.dram) << "the cores stream through the memory controller";
}

bool joined(const CatalogueGpu& gpu, const CatalogueHost& host, int gpus) {
  return gpu.c2c_gbps == 0 || gpus <= host.c2c_gpus;
}

class CataloguePairs : public TempDir {};

TEST_F(CataloguePairs, AllComposeAndRoundTrip) {
  int composed = 0;
  for (const std::string& gpu_name : names_in("gpu")) {
    for (const std::string& host_name : names_in("host")) {
      const CatalogueGpu gpu = gpu_of(gpu_name);
      const CatalogueHost host = host_of(host_name);
      for (const int gpus : {1, 2, 3, 8}) {
        SCOPED_TRACE(std::to_string(gpus) + " " + gpu_name + " " + host_name);
        if (!joined(gpu, host, gpus)) {
          EXPECT_THAT(error_of([&] { compose_hardware(gpu, host, gpus); }), HasSubstr(host.name));
          continue;
        }
        const HardwareSpec spec = compose_hardware(gpu, host, gpus);
        EXPECT_EQ(load_hardware_spec(write("hw.yaml", to_yaml(spec))), spec);
        EXPECT_FALSE(spec.measured);
        EXPECT_EQ(spec.gpus, gpus);
        EXPECT_EQ(spec.device.backend, "cuda");
        EXPECT_LT(spec.kernels.layer_fwd.peak_gflops, gpu.bf16_tflops * 1e3);
        EXPECT_LT(spec.host.dram_gbps, host.memory_gbps());
        EXPECT_DOUBLE_EQ(spec.pcie.root_h2d_gbps, gpus * spec.pcie.h2d.gbps);
        EXPECT_DOUBLE_EQ(spec.pcie.root_d2h_gbps, gpus * spec.pcie.d2h.gbps);
        ++composed;
      }
    }
  }
  EXPECT_EQ(composed, 4 * 10 * 9 + 1) << "ten GPUs in every host, and the superchip in its own";
}

TEST(Catalogue, TheSlowerEndSetsThePcieGeneration) {
  // One direction of 16 lanes: 16 GT/s (generation 4) or 32 (generation 5) each, 128 bits in 130.
  const double four = 16.0 * 16 * 128 / 130 / 8 * kCatalogueEstimates.pcie, five = 2 * four;
  EXPECT_NEAR(four, 27.1, 0.05);
  EXPECT_DOUBLE_EQ(compose_hardware(gpu_of("rtx-4090"), host_of("epyc-genoa"), 1).pcie.h2d.gbps, four);
  EXPECT_DOUBLE_EQ(compose_hardware(gpu_of("h100-pcie"), host_of("xeon-ice-lake"), 1).pcie.h2d.gbps, four);
  EXPECT_DOUBLE_EQ(compose_hardware(gpu_of("h100-pcie"), host_of("epyc-genoa"), 1).pcie.d2h.gbps, five);
}

TEST(Catalogue, GpusShareTheHostsLanes) {
  const auto link = [](const char* host, int gpus) {
    return compose_hardware(gpu_of("rtx-5090"), host_of(host), gpus).pcie.h2d.gbps;
  };
  const double full = link("ryzen-7950x", 1);
  EXPECT_DOUBLE_EQ(link("ryzen-7950x", 2), full / 2);  // 8 + 8 lanes
  EXPECT_DOUBLE_EQ(link("ryzen-7950x", 3), full / 4);  // a link has 4 or 8 lanes, not 5
  EXPECT_DOUBLE_EQ(link("epyc-genoa", 8), full);
  EXPECT_DOUBLE_EQ(link("xeon-sapphire-rapids", 8), full / 2);
  EXPECT_DOUBLE_EQ(link("xeon-sapphire-rapids-2s", 8), full);
  EXPECT_THAT(error_of([&] { link("ryzen-7950x", 17); }),
              AllOf(HasSubstr("16 PCIe lanes"), HasSubstr("too few for 17")));
}

TEST(Catalogue, CollectivesTakeNvlinkWhereItJoinsAllGpus) {
  const auto bus = [](const char* gpu, int gpus) {
    const CollectiveSpec all = compose_hardware(gpu_of(gpu), host_of("epyc-genoa"), gpus).collectives;
    EXPECT_EQ(all.all_gather, all.reduce_scatter);
    EXPECT_EQ(all.all_gather, all.broadcast);
    return all.all_gather.gbps;
  };
  EXPECT_DOUBLE_EQ(bus("h100-sxm", 8), 450 * kCatalogueEstimates.nvlink);
  EXPECT_DOUBLE_EQ(bus("rtx-3090", 2), 56.25 * kCatalogueEstimates.nvlink);
  const double pcie = compose_hardware(gpu_of("rtx-3090"), host_of("epyc-genoa"), 4).pcie.h2d.gbps;
  EXPECT_DOUBLE_EQ(bus("rtx-3090", 4), pcie * kCatalogueEstimates.pcie_collective);
  EXPECT_DOUBLE_EQ(bus("rtx-4090", 2), pcie * kCatalogueEstimates.pcie_collective);
  EXPECT_EQ(bus("h100-sxm", 1), 0) << "nobody to exchange data with";
}

TEST(Catalogue, TheSuperchipHasItsOwnLink) {
  const HardwareSpec spec = compose_hardware(gpu_of("gh200"), host_of("grace"), 1);
  EXPECT_DOUBLE_EQ(spec.pcie.h2d.gbps, 450 * kCatalogueEstimates.c2c_h2d);
  EXPECT_DOUBLE_EQ(spec.pcie.d2h.gbps, 450 * kCatalogueEstimates.c2c_d2h);
  EXPECT_THAT(error_of([] { compose_hardware(gpu_of("gh200"), host_of("epyc-genoa"), 1); }),
              AllOf(HasSubstr("EPYC 9554 does not have"), HasSubstr("grace.yaml")));
  EXPECT_THAT(error_of([] { compose_hardware(gpu_of("gh200"), host_of("grace"), 2); }),
              AllOf(HasSubstr("room for 1"), HasSubstr("not for 2")));
}

// Beside cores that stream all they can, a copy takes the estimate's part longer on every host.
TEST(Catalogue, CopiesContendWithAllThatTheCoresStream) {
  for (const char* host : {"epyc-genoa", "epyc-milan"}) {
    const HardwareSpec spec = compose_hardware(gpu_of("rtx-4090"), host_of(host), 1);
    const double streams = spec.host.cpu_stream_gbps / spec.host.dram_gbps;
    EXPECT_DOUBLE_EQ(spec.contention.h2d.beside_streams * streams, kCatalogueEstimates.copy_beside_streams);
    EXPECT_DOUBLE_EQ(spec.contention.d2h.beside_streams * streams, kCatalogueEstimates.copy_beside_streams);
    EXPECT_DOUBLE_EQ(spec.contention.streams.beside_h2d * streams, kCatalogueEstimates.stream_beside_copies);
    EXPECT_DOUBLE_EQ(spec.contention.streams.beside_d2h * streams, kCatalogueEstimates.stream_beside_copies);
  }
}

// The estimates reproduce the one machine that was measured. 10 %: machines of one kind, and shapes, differ by as much.
TEST(Catalogue, TheH200IsNearTheMeasuredOne) {
  const HardwareSpec measured =
      load_hardware_spec(std::filesystem::path(SLIDEDP_SOURCE_DIR) / "results" / "h200-profile" / "hardware.yaml");
  const HardwareSpec spec = compose_hardware(gpu_of("h200"), host_of("xeon-sapphire-rapids"), 1);
  const auto near = [](double estimate, double truth, const char* what) {
    EXPECT_NEAR(estimate / truth, 1, 0.1) << what;
  };
  near(spec.kernels.layer_fwd.peak_gflops, measured.kernels.layer_fwd.peak_gflops, "layer_fwd");
  near(spec.kernels.layer_bwd.peak_gflops, measured.kernels.layer_bwd.peak_gflops, "layer_bwd");
  near(spec.kernels.head.peak_gflops, measured.kernels.head.peak_gflops, "head");
  near(spec.kernels.elementwise_gbps, measured.kernels.elementwise_gbps, "elementwise");
  near(spec.pcie.h2d.gbps, measured.pcie.h2d.gbps, "h2d");
  near(spec.pcie.d2h.gbps, measured.pcie.d2h.gbps, "d2h");
  near(spec.pcie.duplex_gbps, measured.pcie.duplex_gbps, "duplex");
  near(static_cast<double>(spec.device.memory_bytes), static_cast<double>(measured.device.memory_bytes), "memory");
}

class CatalogueYaml : public TempDir {
 protected:
  std::string gpu_refused(const std::string& from, const std::string& to) {
    const std::string text = replaced(read_text(kHardware / "gpu" / "h100-sxm.yaml"), from, to);
    return error_of([&] { load_catalogue_gpu(write("gpu.yaml", text)); });
  }
  std::string host_refused(const std::string& from, const std::string& to) {
    const std::string text = replaced(read_text(kHardware / "host" / "epyc-genoa.yaml"), from, to);
    return error_of([&] { load_catalogue_host(write("host.yaml", text)); });
  }
};

TEST_F(CatalogueYaml, IsStrict) {
  EXPECT_THAT(gpu_refused("memory_gbps:", "memory_gpbs:"),
              AllOf(HasSubstr("memory_gpbs"), HasSubstr("\"memory_gbps\"")));
  EXPECT_THAT(gpu_refused("memory_gbps: 3350", "# 3350"), HasSubstr("\"memory_gbps\" is missing"));
  EXPECT_THAT(gpu_refused("pcie_generation: 5", "pcie_generation: 6"), HasSubstr("must be 3, 4 or 5"));
  EXPECT_THAT(gpu_refused("pcie_generation: 5", "pcie_lanes: 5\npcie_generation: 5"), HasSubstr("1, 2, 4, 8 or 16"));
  EXPECT_THAT(gpu_refused("nvlink_gpus: 8", "nvlink_gpus: 1"), HasSubstr("needs nvlink_gpus of at least 2"));
  EXPECT_THAT(gpu_refused("bf16_tflops: 989.5", "bf16_tflops: 0"), HasSubstr("greater than 0"));
  EXPECT_THAT(host_refused("memory_mtps: 4800", "memory_mtps: 0"), HasSubstr("greater than 0"));
  EXPECT_THAT(host_refused("pcie_generation: 5", "pcie_generation: 2"), HasSubstr("must be 3, 4 or 5"));
  EXPECT_THAT(host_refused("cores: 64", "cores: many"), HasSubstr("must be an integer"));
}

TEST_F(CatalogueYaml, AFileOfAnotherKindSaysWhatIsMissing) {
  const auto gpu = kHardware / "gpu" / "h200.yaml", host = kHardware / "host" / "epyc-genoa.yaml";
  const auto machine = kHardware / "h200.yaml";
  EXPECT_THAT(error_of([&] { load_hardware_spec(gpu); }),
              AllOf(HasSubstr("h200.yaml:2"), HasSubstr("a GPU only"), HasSubstr("--host")));
  EXPECT_THAT(error_of([&] { load_hardware_spec(host); }), AllOf(HasSubstr("a host only"), HasSubstr("--hardware")));
  EXPECT_THAT(error_of([&] { load_catalogue_gpu(machine); }), AllOf(HasSubstr("whole machine"), HasSubstr("--host")));
  EXPECT_THAT(error_of([&] { load_catalogue_gpu(host); }), AllOf(HasSubstr("is a host"), HasSubstr("--hardware")));
  EXPECT_THAT(error_of([&] { load_catalogue_host(gpu); }), HasSubstr("configs/hardware/host"));
  EXPECT_THAT(error_of([&] { load_catalogue_host(machine); }), HasSubstr("configs/hardware/host"));
}

TEST(Catalogue, ItTakesAtLeastOneGpu) {
  EXPECT_THAT(error_of([] { compose_hardware(gpu_of("h200"), host_of("epyc-genoa"), 0); }), HasSubstr("at least 1"));
}

TEST(Catalogue, AGpuTooSmallForItsContextIsRefused) {
  CatalogueGpu gpu = gpu_of("h200");
  gpu.memory_bytes = kCatalogueEstimates.context_bytes;
  EXPECT_THAT(error_of([&] { compose_hardware(gpu, host_of("epyc-genoa"), 1); }),
              AllOf(HasSubstr("NVIDIA H200"), HasSubstr("device.context_bytes")));
}

}  // namespace
}  // namespace slidedp
