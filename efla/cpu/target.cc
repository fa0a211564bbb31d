#include "efla/cpu/target.h"

#include <hwy/targets.h>

#include "efla/base/error.h"

namespace efla::cpu {
namespace {

// Bits of the targets that the kernels are built for and this processor can run, best (lowest) first.
std::vector<std::int64_t> supported() { return hwy::SupportedAndGeneratedTargets(); }

}  // namespace

std::string target_name() { return hwy::TargetName(supported().front()); }

std::vector<std::string> supported_targets() {
  std::vector<std::string> names;
  for (const std::int64_t target : supported()) names.emplace_back(hwy::TargetName(target));
  return names;
}

void use_target(const std::string& name) {
  hwy::SetSupportedTargetsForTest(0);
  std::string expected;
  bool found = name.empty();
  for (const std::int64_t target : supported()) {
    expected += (expected.empty() ? "" : ", ") + std::string(hwy::TargetName(target));
    if (name == hwy::TargetName(target)) {
      hwy::SetSupportedTargetsForTest(target);
      found = true;
      break;
    }
  }
  hwy::GetChosenTarget().Update(hwy::SupportedTargets());
  if (!found) throw Error("use_target", "name", "'" + name + "'", expected);
}

}  // namespace efla::cpu
