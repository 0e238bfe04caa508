// Runs the kernels on an instruction set of the test's choice.
#pragma once

#include <hwy/targets.h>

#include <cstdint>
#include <string>
#include <vector>

#include "runtime/host/kernels.h"

namespace slidedp {

// While it lives, the kernels run on one instruction set (a HWY_ target bit).
class ForcedTarget {
 public:
  explicit ForcedTarget(int64_t target) { use(target); }
  ~ForcedTarget() { use(0); }
  ForcedTarget(const ForcedTarget&) = delete;
  ForcedTarget& operator=(const ForcedTarget&) = delete;

 private:
  static void use(int64_t target) {
    hwy::SetSupportedTargetsForTest(target);
    hwy::GetChosenTarget().Update(hwy::SupportedTargets());
  }
};

// Instruction sets that this CPU has and the kernels were compiled for, the widest first.
inline std::vector<int64_t> kernel_targets() {
  std::vector<int64_t> found;
  const int64_t supported = hwy::SupportedTargets();
  for (int bit = 0; bit < 63; ++bit) {
    const int64_t target = int64_t{1} << bit;
    if ((supported & target) == 0) continue;
    const ForcedTarget forced(target);
    if (kernels::target() == std::string(hwy::TargetName(target))) found.push_back(target);
  }
  return found;
}

}  // namespace slidedp
