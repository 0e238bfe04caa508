#include "model/spec/overrides.h"

#include "tests/model/spec/support.h"

namespace slidedp {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

class Overrides : public ::testing::Test {
 protected:
  Overrides() {
    hardware = load_hardware_spec(std::filesystem::path(SLIDEDP_SOURCE_DIR) / "configs/hardware/cpu-2rank.yaml");
    train.seq = 256;
    train.batch_rows = 4;
    train.steps = 10;
  }
  void set(const std::string& assignment) { apply_set(assignment, hardware, train); }
  std::string refused(const std::string& assignment) {
    const HardwareSpec hardware_before = hardware;
    const TrainSpec train_before = train;
    const std::string message = error_of([&] { set(assignment); });
    EXPECT_TRUE(hardware == hardware_before && train == train_before) << "a refused assignment changed something";
    return message;
  }
  HardwareSpec hardware;
  TrainSpec train;
};

TEST_F(Overrides, WholePathsOfEveryType) {
  HardwareSpec wanted = hardware;
  wanted.pcie.h2d.gbps = 12.5;
  wanted.gpus = 4;
  wanted.measured = true;
  wanted.name = "what if";
  wanted.host.memory_bytes = int64_t{3} << 30;
  set("pcie.h2d.gbps=12.5");
  set("gpus=4");
  set("measured=true");
  set("name=what if");
  set("host.memory_bytes=3GiB");
  EXPECT_EQ(hardware, wanted);
}

TEST_F(Overrides, TrainKeysHaveAPrefix) {
  TrainSpec wanted = train;
  wanted.batch_rows = 16;
  wanted.adam.learning_rate = 3e-4;
  wanted.adam.beta2 = 0.95;
  wanted.seed = 18446744073709551615u;
  set("train.batch_rows=16");
  set("train.adam.learning_rate=3e-4");
  set("train.beta2=0.95");
  set("train.seed=18446744073709551615");
  EXPECT_EQ(train, wanted);
}

TEST_F(Overrides, ShortForms) {
  set("dram_gbps=460");
  EXPECT_EQ(hardware.host.dram_gbps, 460);
  set("pcie.h2d_gbps=33");
  EXPECT_EQ(hardware.pcie.h2d.gbps, 33);
  set("h2d_gbps=34");  // not root_h2d_gbps, whose last part is longer
  EXPECT_EQ(hardware.pcie.h2d.gbps, 34);
  set("all_gather.gbps=7");
  EXPECT_EQ(hardware.collectives.all_gather.gbps, 7);
  EXPECT_EQ(hardware.pcie.root_h2d_gbps, 12);
}

TEST_F(Overrides, Factors) {
  set("pcie.h2d_gbps=*2");
  EXPECT_EQ(hardware.pcie.h2d.gbps, 16);
  set("gpus=*4");
  EXPECT_EQ(hardware.gpus, 8);
  set("gpus=*0.5");
  EXPECT_EQ(hardware.gpus, 4);
  hardware.device.memory_bytes = 1001;
  set("device.memory_bytes=*0.5");  // bytes are rounded
  EXPECT_EQ(hardware.device.memory_bytes, 501);
  set("train.batch_rows=*3");
  EXPECT_EQ(train.batch_rows, 12);
}

TEST_F(Overrides, FactorsThatMakeNoSense) {
  EXPECT_THAT(refused("gpus=*1.3"), AllOf(HasSubstr("\"gpus\" is 2"), HasSubstr("must stay an integer")));
  EXPECT_THAT(refused("name=*2"), AllOf(HasSubstr("\"name\""), HasSubstr("cannot be multiplied")));
  EXPECT_THAT(refused("measured=*2"), HasSubstr("cannot be multiplied"));
  EXPECT_THAT(refused("train.seed=*2"), HasSubstr("cannot be multiplied"));
  EXPECT_THAT(refused("gpus=*0"), AllOf(HasSubstr("factor is 0"), HasSubstr("greater than 0")));
  EXPECT_THAT(refused("gpus=*"), HasSubstr("finite number"));
  EXPECT_THAT(refused("gpus=*1e30"), HasSubstr("must be an integer"));
  EXPECT_THAT(refused("dram_gbps=*1e308"), HasSubstr("finite number"));
}

TEST_F(Overrides, UnknownKeysNameTheNearest) {
  EXPECT_THAT(refused("host.dram_gpbs=1"), AllOf(HasSubstr("\"host.dram_gpbs\""), HasSubstr("host.dram_gbps")));
  EXPECT_THAT(refused("batch_rows=1"), HasSubstr("train.batch_rows"));
  EXPECT_THAT(refused("train.gpus=1"), HasSubstr("no key \"train.gpus\""));
  EXPECT_THAT(refused("ram_gbps=1"), HasSubstr("no key")) << "a short form is whole parts";
}

TEST_F(Overrides, AmbiguousKeysNameAll) {
  EXPECT_THAT(refused("memory_bytes=1GiB"), AllOf(HasSubstr("device.memory_bytes"), HasSubstr("host.memory_bytes")));
  EXPECT_THAT(refused("gbps=1"), AllOf(HasSubstr("pcie.h2d.gbps"), HasSubstr("collectives.broadcast.gbps")));
}

TEST_F(Overrides, ValuesFollowTheKeysRules) {
  EXPECT_THAT(refused("gpus=0"), HasSubstr("greater than 0"));
  EXPECT_THAT(refused("gpus=two"), HasSubstr("must be an integer"));
  EXPECT_THAT(refused("gpus="), HasSubstr("must be an integer"));
  EXPECT_THAT(refused("dram_gbps=nan"), HasSubstr("finite number"));
  EXPECT_THAT(refused("measured=yes"), HasSubstr("true or false"));
  EXPECT_THAT(refused("device.backend=tpu"), HasSubstr("cpu or cuda"));
  EXPECT_THAT(refused("train.adam.beta1=1"), HasSubstr("below 1"));
  EXPECT_THAT(refused("pcie.h2d.gbps=0"), HasSubstr("greater than 0"));
  EXPECT_THAT(refused("device.context_bytes=100GiB"), HasSubstr("less than device.memory_bytes"));
  EXPECT_THAT(refused("train.seq=3000000000"), HasSubstr("\"train.seq\""));
}

TEST_F(Overrides, NoEqualsSign) {
  EXPECT_THAT(refused("gpus"), HasSubstr("key=value"));
  EXPECT_THAT(refused("=3"), HasSubstr("key=value"));
}

}  // namespace
}  // namespace slidedp
