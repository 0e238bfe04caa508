// What the report says of memory.
#include "runtime/run/run_report.h"

#include <gmock/gmock.h>

#include "model/graph/step_graph.h"
#include "tests/support/tiny_run.h"

namespace slidedp::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

std::string report(const MemoryPeaks& peaks) {
  const TinyTraining training(true);
  const StepGraph graph = build_step_graph(training.model(), training.train(), training.plan(2, 1));
  MemoryTable planned;
  planned.device_buffer_bytes = int64_t{5} << 20;
  planned.temporary_bytes = int64_t{3} << 20;
  return run_report(graph, {}, {}, planned, peaks, 0);
}

TEST(RunReport, BuffersAndTemporariesStandBesideTheirPlan) {
  EXPECT_THAT(report({.device_buffers = int64_t{4} << 20, .temporaries = int64_t{2} << 20}),
              AllOf(HasSubstr("| device buffers, one rank | 5.0 MiB | 4.0 MiB |"),
                    HasSubstr("| temporaries, all ranks | 6.0 MiB | 2.0 MiB |"), Not(HasSubstr("whole device"))));
}

TEST(RunReport, WholeDeviceIsShownWhereItIsKnown) {
  EXPECT_THAT(report({.device_used = int64_t{7} << 20, .device_planned = int64_t{8} << 20}),
              HasSubstr("| whole device, with context and other processes | 8.0 MiB | 7.0 MiB |"));
}

}  // namespace
}  // namespace slidedp::testing
