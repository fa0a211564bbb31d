#include "efla/cpu/common/target.h"

#include <hwy/highway.h>
#include <hwy/targets.h>

#include <algorithm>
#include <atomic>

#include "efla/base/error.h"

#if HWY_ARCH_X86_64
#include <cpuid.h>
#endif
#if HWY_ARCH_X86_64 && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace efla::cpu {
namespace {

constexpr const char* kAmx = "AMX";

// Returns the bits of the targets that are built and that this processor supports, best (lowest) first.
std::vector<std::int64_t> supported() { return hwy::SupportedAndGeneratedTargets(); }

// Returns whether the kernels on AMX are built, the processor has AMX with bfloat16, and the operating system lets this
// process use the tile registers. Linux does so only after a request.
bool request_amx() {
#if HWY_ARCH_X86_64 && defined(__linux__) && !defined(EFLA_NO_AMX)
  constexpr unsigned kAmxBfloat16 = 1U << 22U, kAmxTile = 1U << 24U;  // bits of register EDX of CPUID leaf 7
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d) == 0) return false;
  if ((d & kAmxBfloat16) == 0 || (d & kAmxTile) == 0) return false;
  constexpr int kRequestPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

bool has_amx() {
  static const bool has = request_amx();
  return has;
}

// Returns whether the processor has products of bfloat16 in AVX-512.
bool has_bfloat16() {
#if HWY_ARCH_X86_64
  constexpr unsigned kBfloat16 = 1U << 5U;  // bit of register EAX of CPUID leaf 7, subleaf 1
  unsigned a = 0, b = 0, c = 0, d = 0;
  static const bool has = __get_cpuid_count(7, 1, &a, &b, &c, &d) != 0 && (a & kBfloat16) != 0;
  return has;
#else
  return false;
#endif
}

// Returns whether the best of the active targets has AVX-512, Highway's AVX3, which every better (lower) target
// includes.
bool best_is_avx512() { return (HWY_TARGETS & HWY_AVX3) != 0 && supported().front() <= HWY_AVX3; }

// Return whether the kernels on AMX, which also use AVX-512, and the products of bfloat16 can run with the best of the
// active targets.
bool best_takes_amx() { return best_is_avx512() && has_amx(); }
bool best_takes_bfloat16() { return best_is_avx512() && has_bfloat16(); }

// Returns whether the kernels use AMX. Highway is asked only once, because CPUID instructions are slow in a virtual
// machine.
std::atomic<bool>& amx_in_use() {
  static std::atomic<bool> in_use = best_takes_amx();
  return in_use;
}

std::atomic<bool>& bfloat16_in_use() {
  static std::atomic<bool> in_use = best_takes_bfloat16();
  return in_use;
}

}  // namespace

bool uses_bfloat16() { return bfloat16_in_use().load(std::memory_order_relaxed); }

bool uses_amx() { return amx_in_use().load(std::memory_order_relaxed); }

std::string target_name() { return uses_amx() ? kAmx : hwy::TargetName(supported().front()); }

std::vector<std::string> supported_targets() {
  std::vector<std::string> names;
  if (best_takes_amx()) names.emplace_back(kAmx);
  for (const std::int64_t target : supported()) names.emplace_back(hwy::TargetName(target));
  return names;
}

void use_target(const std::string& name) {
  hwy::SetSupportedTargetsForTest(0);
  const std::vector<std::string> names = supported_targets();
  const bool found = name.empty() || std::find(names.begin(), names.end(), name) != names.end();
  for (const std::int64_t target : supported()) {
    if (name == hwy::TargetName(target)) {
      hwy::SetSupportedTargetsForTest(target);
      break;
    }
  }
  hwy::GetChosenTarget().Update(hwy::SupportedTargets());
  amx_in_use() = (!found || name.empty() || name == kAmx) && best_takes_amx();
  bfloat16_in_use() = best_takes_bfloat16();
  if (found) return;
  std::string expected;
  for (const std::string& one : names) expected += (expected.empty() ? "" : ", ") + one;
  throw Error("use_target", "name", "'" + name + "'", expected);
}

}  // namespace efla::cpu
