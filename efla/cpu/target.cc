#include "efla/cpu/target.h"

#include <hwy/targets.h>

#include <atomic>

#include "efla/base/error.h"

#if HWY_ARCH_X86_64 && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace efla::cpu {
namespace {

constexpr const char* kAmx = "AMX";

// Bits of the targets that the kernels are built for and this processor can run, best (lowest) first.
std::vector<std::int64_t> supported() { return hwy::SupportedAndGeneratedTargets(); }

// Whether the processor has the tiles and their bfloat16 products, and the kernel of the operating system
// lets this process use the tiles' registers, which it must ask for.
bool ask_for_matrix_unit() {
#if HWY_ARCH_X86_64 && defined(__linux__)
  constexpr unsigned kAmxBfloat16 = 1U << 22U, kAmxTile = 1U << 24U;  // of leaf 7's d
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d) == 0) return false;
  if ((d & kAmxBfloat16) == 0 || (d & kAmxTile) == 0) return false;
  constexpr int kRequestPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

bool has_matrix_unit() {
  static const bool has = ask_for_matrix_unit();
  return has;
}

// The matrix unit's kernels are built for this target.
bool is_amx_host(std::int64_t target) { return target == HWY_AVX3; }

// Asking Highway costs some CPUID instructions, dear in a virtual machine: once, not in every call.
std::atomic<bool>& matrix_unit_in_use() {
  static std::atomic<bool> in_use = is_amx_host(supported().front()) && has_matrix_unit();
  return in_use;
}

}  // namespace

bool uses_matrix_unit() { return matrix_unit_in_use().load(std::memory_order_relaxed); }

std::string target_name() { return uses_matrix_unit() ? kAmx : hwy::TargetName(supported().front()); }

std::vector<std::string> supported_targets() {
  std::vector<std::string> names;
  for (const std::int64_t target : supported()) {
    if (is_amx_host(target) && has_matrix_unit()) names.emplace_back(kAmx);
    names.emplace_back(hwy::TargetName(target));
  }
  return names;
}

void use_target(const std::string& name) {
  hwy::SetSupportedTargetsForTest(0);
  std::string expected;
  bool found = name.empty();
  for (const std::int64_t target : supported()) {
    const bool amx = is_amx_host(target) && has_matrix_unit();
    if (amx) expected += std::string(expected.empty() ? "" : ", ") + kAmx;
    expected += (expected.empty() ? "" : ", ") + std::string(hwy::TargetName(target));
    if (name == hwy::TargetName(target) || (amx && name == kAmx)) {
      hwy::SetSupportedTargetsForTest(target);
      found = true;
      break;
    }
  }
  hwy::GetChosenTarget().Update(hwy::SupportedTargets());
  matrix_unit_in_use() = (name.empty() || name == kAmx) && is_amx_host(supported().front()) && has_matrix_unit();
  if (!found) throw Error("use_target", "name", "'" + name + "'", expected);
}

}  // namespace efla::cpu
